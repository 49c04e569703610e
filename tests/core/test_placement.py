"""What is worked out once holds for later steps: places in staging, mirrors after a redirect."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swapckpt import SwapConfig, swap_optimizer
from swapckpt.device import CpuDevice
from swapckpt.optimizer import swap_of

if TYPE_CHECKING:
    from swapckpt.swap import Swap


def start() -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer, Swap]:
    """Three parameters in one batch, stepped once."""
    params = [torch.nn.Parameter(torch.randn(size)) for size in (300, 40, 500)]
    optimizer = swap_optimizer(
        torch.optim.AdamW(params), SwapConfig(swap_times=1, min_numel=16), device=CpuDevice()
    )
    step(params, optimizer)
    return params, optimizer, swap_of(optimizer)


def step(
    params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, *, without: int | None = None
) -> None:
    for index, param in enumerate(params):
        param.grad = None if index == without else torch.randn_like(param)
    optimizer.step()


def test_a_placement_is_kept_while_the_same_tensors_move() -> None:
    params, optimizer, swap = start()
    (batch,) = swap.table.batches
    step(params, optimizer)
    everything = batch.placement
    assert len(everything.tensors) == 6
    step(params, optimizer)
    assert batch.placement is everything
    step(params, optimizer, without=1)
    assert [tensor.id.param for tensor in batch.placement.tensors] == ["group0.param0"] * 2 + [
        "group0.param2"
    ] * 2
    assert batch.placement.nbytes < everything.nbytes
    step(params, optimizer)
    assert batch.placement == everything


def test_a_redirected_mirror_is_the_mirror_from_then_on() -> None:
    params, optimizer, swap = start()
    before = optimizer.state[params[0]]["exp_avg"]
    (segment,) = swap.table.batches[0].segments
    swap.gate.begin_read(segment)
    step(params, optimizer)
    swap.gate.end_read(segment)
    redirected = optimizer.state[params[0]]["exp_avg"]
    assert redirected is not before
    step(params, optimizer)
    assert optimizer.state[params[0]]["exp_avg"] is redirected
