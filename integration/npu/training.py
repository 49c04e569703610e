"""A small training on the NPU: parameters, their optimizer, and the same gradients in every run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import swapckpt

SHAPES = ((40, 50), (7,), (64, 32), (2000,), (), (1, 1200), (33, 65))


class Training:
    """AdamW with ``options``; ``config`` swaps it. In some steps some parameters have no gradient, unless
    ``all_active``."""

    def __init__(
        self,
        options: dict[str, Any],
        config: swapckpt.SwapConfig | None = None,
        *,
        all_active: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=generator) for shape in SHAPES]
        self.model = nn.ParameterList([nn.Parameter(value.to("npu")) for value in values])
        self.params = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.params, lr=0.01, **options)
        self.manager = swapckpt.StateManager(self.model, self.optimizer, config)
        self.all_active = all_active
        self.num_steps = 0

    def set_gradients(self) -> None:
        for index, param in enumerate(self.params):
            generator = torch.Generator().manual_seed(1000 * self.num_steps + index)
            values = torch.randn(param.shape, generator=generator)
            active = self.all_active or (self.num_steps + index) % 4 != 0
            param.grad = values.to("npu") if active else None
        self.num_steps += 1

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.set_gradients()
            self.optimizer.step()

    def values(self) -> dict[str, torch.Tensor]:
        """Parameters and state, copied to the host."""
        found = {f"{index}": param.detach() for index, param in enumerate(self.params)}
        for index, param in enumerate(self.params):
            for key, value in self.optimizer.state.get(param, {}).items():
                found[f"{index}.{key}"] = value
        return {name: value.cpu().clone() for name, value in found.items()}


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is not equal as bits."""
    common = found.keys() & expected.keys()
    wrong = [name for name in common if not torch.equal(_bits(found[name]), _bits(expected[name]))]
    return sorted([*wrong, *(found.keys() ^ expected.keys())])


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1).view(torch.uint8)
