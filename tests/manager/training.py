"""A small training run that any part of can be repeated bit for bit, and what to compare afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import swapckpt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.optim import Optimizer

CONFIG = swapckpt.SwapConfig(min_numel=1, swap_times=3)
"""Swaps every tensor, step counters too, in more than one batch."""

DEFAULT_CONFIG = swapckpt.SwapConfig(swap_times=3, min_numel=8)
"""Swaps the large tensors: step counters and the smallest biases stay where torch puts them."""


class Net(nn.Module):
    """A chain of blocks; ``spare`` is used only when asked for, so it can go without gradients."""

    def __init__(self, width: int = 6, *, depth: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width, dtype) for _ in range(depth))
        self.spare = nn.Linear(width, width, dtype=dtype)
        self.head = nn.Linear(width, 3, dtype=dtype)

    def forward(self, x: torch.Tensor, *, use_spare: bool = False) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        if use_spare:
            x = x + self.spare(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, dtype=dtype)
        self.down = nn.Linear(2 * width, width, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def matrices(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [param for param in params if param.ndim == 2]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.05),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=0.5),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, initial_accumulator_value=0.1),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "AdamW-fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "AdamW-foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "Muon": lambda params: torch.optim.Muon(matrices(params), lr=0.01),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05),
    "SGD-dampening": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.5),
}


def backward(model: nn.Module, step: int, *, use_spare: bool = False) -> None:
    """Gradients of step ``step``; the same on every call with the same parameters."""
    parameter = next(model.parameters())
    generator = torch.Generator().manual_seed(1000 + step)
    width = model.get_parameter("head.weight").shape[1] if isinstance(model, Net) else parameter.shape[1]
    x = torch.randn(4, width, generator=generator).to(parameter)
    output = model(x, use_spare=use_spare) if isinstance(model, Net) else model(x)
    output.float().square().mean().backward()


def train(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    steps: Iterable[int],
    use_spare: Callable[[int], bool] | None = None,
) -> None:
    """Take the given steps. ``use_spare(step)`` tells whether ``spare`` gets gradients."""
    for step in steps:
        optimizer.zero_grad()
        backward(model, step, use_spare=use_spare is not None and use_spare(step))
        optimizer.step()
    optimizer.zero_grad()


def contents(model: nn.Module, optimizer: Optimizer) -> dict[str, object]:
    """Copies of all parameters and all state on the CPU, by name; sharded tensors in full."""
    names = {param: name for name, param in model.named_parameters()}
    copied: dict[str, object] = {name: _copy(param) for param, name in names.items()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            for key, value in optimizer.state.get(param, {}).items():
                copied[f"{names[param]}.{key}"] = _copy(value)
    return copied


def _copy(value: object) -> object:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def assert_same_bits(found: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Equal keys, and for every tensor equal dtype, shape and bits (a negative zero is not a zero)."""
    assert found.keys() == expected.keys()
    different = [name for name, value in expected.items() if not same_bits(found[name], value)]
    assert not different


def same_bits(found: object, expected: object) -> bool:
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return type(found) is type(expected) and found == expected
    if isinstance(found, DTensor) != isinstance(expected, DTensor):
        return False
    if isinstance(found, DTensor) and isinstance(expected, DTensor):
        if found.placements != expected.placements or found.shape != expected.shape:
            return False
        found, expected = found.to_local(), expected.to_local()
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and found.contiguous()
        .view(-1)
        .view(torch.uint8)
        .equal(expected.contiguous().view(-1).view(torch.uint8))
    )
