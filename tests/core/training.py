"""Twins: a plain and a swapped optimizer over equal parameters, fed equal gradients and compared as bits."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import swapckpt
from swapckpt.device import CpuDevice
from swapckpt.optimizer import swap_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from swapckpt.swap import Swap

Shape = tuple[int, ...]
MATRICES: tuple[Shape, ...] = ((40, 50), (16, 5), (64, 32), (33, 65), (48, 30))
SHAPES: tuple[Shape, ...] = ((40, 50), (7,), (64, 32), (2000,), (), (1, 1200), (33, 65))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to make an optimizer: equal recipes give equal optimizers over parameters of their own."""

    cls: type[Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    shapes: tuple[Shape, ...] = SHAPES
    transposed: tuple[int, ...] = ()  # indices of parameters that are not contiguous
    groups: tuple[tuple[int, ...], ...] | None = None  # indices of parameters; default two groups

    def __str__(self) -> str:
        options = ",".join(
            f"{key}={value}" if not isinstance(value, torch.Tensor) else f"{key}=tensor"
            for key, value in self.options.items()
        )
        return f"{self.cls.__name__}({options})-{str(self.dtype).removeprefix('torch.')}"

    def build(self) -> tuple[list[Parameter], Optimizer]:
        """Fresh parameters and an optimizer over them; groups differ in their learning rate."""
        generator = torch.Generator().manual_seed(7)
        params = []
        for index, shape in enumerate(self.shapes):
            value = torch.randn(shape, generator=generator).to(self.dtype)
            if index in self.transposed:
                value = value.t().contiguous().t()
            params.append(torch.nn.Parameter(value))
        half = (len(params) + 1) // 2
        cut = self.groups or tuple(
            group for group in (tuple(range(half)), tuple(range(half, len(params)))) if group
        )
        options = copy.deepcopy(self.options)
        lr = options.pop("lr", 0.01)
        groups = [
            {"params": [params[index] for index in group], "lr": lr * (position + 1)}
            for position, group in enumerate(cut)
        ]
        return params, self.cls(groups, **options)


def gradient(param: Tensor, *, step: int, index: int) -> Tensor:
    """The gradient of parameter ``index`` in ``step``: the same for twins, in the parameter's own layout."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    values = torch.randn(param.shape, generator=generator).to(param.dtype)
    return torch.empty_like(param).copy_(values)


def always(step: int, index: int) -> bool:
    """Every parameter has a gradient in every step."""
    del step, index
    return True


def shifting(step: int, index: int) -> bool:
    """Parameter 1 never has a gradient, 2 only until step 3; of the others another quarter goes without
    each time."""
    if index == 1:
        return False
    if index == 2:
        return step < 3
    return (step + index) % 4 != 0


class Twins:
    """A plain optimizer and the same one swapped.

    Args:
        recipe: What both are made of.
        config: Of the swapped one.
        device: Of the swapped one.
        steps_before: Steps that both take before the second one is adopted, so that its state exists.
        active: Which parameters have gradients, by step and index.
    """

    def __init__(
        self,
        recipe: Recipe,
        config: swapckpt.SwapConfig | None = None,
        device: CpuDevice | None = None,
        *,
        steps_before: int = 0,
        active: Callable[[int, int], bool] = always,
    ) -> None:
        self.active = active
        self.steps = 0
        self.plain_params, self.plain = recipe.build()
        self.params, self.swapped = recipe.build()
        for _ in range(steps_before):
            self.step()
        self.device = device if device is not None else CpuDevice()
        swapckpt.swap_optimizer(self.swapped, config, device=self.device)

    @property
    def swap(self) -> Swap:
        return swap_of(self.swapped)

    def set_gradients(self) -> None:
        """Equal gradients for the next step."""
        for index, (plain, swapped) in enumerate(zip(self.plain_params, self.params, strict=True)):
            on = self.active(self.steps, index) and plain.requires_grad
            plain.grad = gradient(plain, step=self.steps, index=index) if on else None
            swapped.grad = gradient(swapped, step=self.steps, index=index) if on else None
        self.steps += 1

    def step(self, count: int = 1) -> None:
        """``count`` steps of both with equal gradients."""
        for _ in range(count):
            self.set_gradients()
            self.plain.step()
            self.swapped.step()

    def check(self) -> None:
        """Parameters, state and groups are equal as bits."""
        found = differences(self)
        assert not found, f"after {self.steps} steps: {found}"


def differences(twins: Twins) -> list[str]:
    """What differs between twins, by name: parameters, state values, group fields."""
    found = []
    for index, (plain, swapped) in enumerate(zip(twins.plain_params, twins.params, strict=True)):
        if not same_bits(plain, swapped):
            found.append(f"parameter {index}")
        expected, state = twins.plain.state.get(plain, {}), twins.swapped.state.get(swapped, {})
        found += unequal(expected, state, f"state of {index}")
    groups = zip(twins.plain.param_groups, twins.swapped.param_groups, strict=True)
    for index, (group, other) in enumerate(groups):
        found += unequal(fields_of(group), fields_of(other), f"group {index}")
        if positions(group["params"], twins.plain_params) != positions(other["params"], twins.params):
            found.append(f"parameters of group {index}")
    return found


def fields_of(group: dict[str, Any]) -> dict[str, object]:
    """The settings of a group."""
    return {key: value for key, value in group.items() if key != "params"}


def unequal(expected: dict[str, object], found: dict[str, object], name: str) -> list[str]:
    """Keys that two mappings do not share, or whose values differ."""
    if list(expected) != list(found):
        return [f"{name}: keys {list(found)}, expected {list(expected)}"]
    return [f"{name}: {key}" for key in expected if not same(expected[key], found[key])]


def positions(params: Iterable[Tensor], among: Sequence[Tensor]) -> list[int]:
    """Where each of ``params`` is in ``among``, by identity."""
    return [next(index for index, other in enumerate(among) if other is param) for param in params]


def same(first: object, second: object) -> bool:
    """Equal as bits for tensors, equal and of one type for anything else."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return same_bits(first, second)
    return type(first) is type(second) and first == second


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Same form and same bits: distinguishes 0.0 from -0.0 and compares NaN."""
    form = (first.shape, first.stride(), first.dtype, first.device)
    if form != (second.shape, second.stride(), second.dtype, second.device):
        return False
    return bits(first) == bits(second)


def bits(tensor: Tensor) -> bytes:
    """The elements of a tensor in logical order, as bytes."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
