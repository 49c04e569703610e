"""What the suites compare: equal runs of an optimizer, and how they are swapped."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from swapckpt.config import SwapConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]

BOUND_SECS = 60.0
"""Of waits that end at once unless something is wrong."""

SHAPES = ((40, 50), (7,), (64, 32), (2000,), (1, 1200), (33, 65))
CONFIGS = {
    "packed": SwapConfig(swap_times=3, min_numel=2),
    "each-2-buffers": SwapConfig(swap_times=100, packed=False, min_numel=0, staging_buffers=2),
    "kept": SwapConfig(swap_times=3, release_staging=False),
    "one-batch": SwapConfig(swap_times=1, min_numel=2),
}


@contextmanager
def raises(*expected: type[BaseException]) -> Iterator[None]:
    """As ``pytest.raises``, without pytest."""
    try:
        yield
    except expected:
        return
    raise AssertionError(f"raised nothing, expected {' or '.join(each.__name__ for each in expected)}")


class Run:
    """Parameters and their optimizer; runs that are made alike get the same values and gradients."""

    def __init__(
        self,
        optimizer_factory: OptimizerFactory,
        device: torch.device,
        shapes: Sequence[tuple[int, ...]],
        *,
        in_first_group: int | None = None,
    ) -> None:
        self.model = nn.ParameterList(
            nn.Parameter(_drawn(shape, seed=index).to(device)) for index, shape in enumerate(shapes)
        )
        self.params = list(self.model.parameters())
        self.optimizer = optimizer_factory(self.params[:in_first_group])
        self.num_steps = 0

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for index, param in enumerate(self.params):
                active = (self.num_steps + index) % 4 != 3  # no gradient, in every fourth step
                values = _drawn(param.shape, seed=1000 * (self.num_steps + 1) + index)
                param.grad = values.to(param.device) if active else None
            self.optimizer.step()
            self.num_steps += 1

    def continue_from(self, params: Sequence[Tensor], num_steps: int) -> None:
        """Take these parameters, and gradients from this step on."""
        self.num_steps = num_steps
        with torch.no_grad():
            for param, value in zip(self.params, params, strict=True):
                param.copy_(value)

    def values(self) -> dict[str, object]:
        """Parameters, state and group settings, by name."""
        found: dict[str, object] = {}
        for index, param in enumerate(self.params):
            found[f"parameter {index}"] = param.detach()
            for key, value in self.optimizer.state.get(param, {}).items():
                found[f"{key} of {index}"] = value
        for number, group in enumerate(self.optimizer.param_groups):
            fields = {key: value for key, value in group.items() if key != "params"}
            found |= {f"{key} of group {number}": value for key, value in fields.items()}
        return found


def _drawn(shape: Sequence[int], *, seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def differences(run: Run, other: Run) -> list[str]:
    """Names of what is not equal, tensors as bits."""
    found, expected = run.values(), other.values()
    common = found.keys() & expected.keys()
    wrong = [name for name in common if not _same(found[name], expected[name])]
    return sorted([*wrong, *(found.keys() ^ expected.keys())])


def _same(value: object, other: object) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        first, second = (each.cpu().contiguous().reshape(-1).view(torch.uint8) for each in (value, other))
        return value.dtype == other.dtype and value.shape == other.shape and torch.equal(first, second)
    return type(value) is type(other) and value == other
