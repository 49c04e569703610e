"""Muon over sharded matrices with ``gather_matrices=True``: the bits of one process that holds them whole."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import swapckpt
from swapckpt.device import CpuDevice
from swapckpt.errors import UnsupportedOptimizerError
from swapckpt.optimizer import swap_of
from swapckpt.precision import MASTER
from tests.manager.training import CONFIG, assert_same_bits

if TYPE_CHECKING:
    from tests.multirank import RankRunner

SHAPES = ((12, 8), (5, 16), (8, 8), (1, 6), (16, 24))
"""Rows that are even, uneven, and fewer than ranks."""
GATHERED = replace(CONFIG, gather_matrices=True)


def value(index: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(SHAPES[index], generator=torch.Generator().manual_seed(10 * step + index)).to(dtype)


def placed(full: torch.Tensor) -> torch.Tensor:
    return distribute_tensor(full, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])


def assert_equals_one_process(dtype: torch.dtype, masters: bool, policy: str) -> dict[str, list[int]]:
    """Returns the number of elements that each rank stepped."""
    config = replace(GATHERED, master_weights=masters, swap_times=3)
    whole = [nn.Parameter(value(index, 0, torch.float32)) for index in range(len(SHAPES))]
    if not masters:
        whole = [nn.Parameter(param.detach().to(dtype)) for param in whole]
    else:  # as the masters of parameters of low precision
        whole = [nn.Parameter(param.detach().to(dtype).float()) for param in whole]
    sharded = nn.ParameterList([nn.Parameter(placed(param.detach().to(dtype))) for param in whole])
    reference = torch.optim.Muon(whole, lr=0.05, weight_decay=0.1)
    optimizer = torch.optim.Muon(sharded.parameters(), lr=0.05, weight_decay=0.1)
    manager = swapckpt.StateManager(
        sharded,
        optimizer,
        config,
        device=CpuDevice(policy),  # type: ignore[arg-type]
    )
    for step in range(1, 5):
        for index, (param, other) in enumerate(zip(whole, sharded, strict=True)):
            grad = None if (step, index) == (2, 1) else value(index, step, dtype)
            param.grad = None if grad is None else grad.to(param.dtype)
            other.grad = None if grad is None else placed(grad)
        reference.step()
        optimizer.step()
        for param, other in zip(whole, sharded, strict=True):
            assert isinstance(other, DTensor)
            assert_same_bits({"param": other.full_tensor().detach()}, {"param": param.detach().to(dtype)})
            found = dict(optimizer.state[other])
            assert set(found) == ({"momentum_buffer", MASTER} if masters else {"momentum_buffer"})
            assert_same_bits(
                {"m": found["momentum_buffer"].full_tensor()},
                {"m": reference.state[param]["momentum_buffer"]},
            )
            if masters:
                assert_same_bits({"m": found[MASTER].full_tensor()}, {"m": param.detach()})
    assert set(optimizer.state) == set(sharded.parameters())
    assert manager.memory().device_nbytes == 0
    gathering = swap_of(optimizer)._gathering
    assert gathering is not None
    owners = [owned[1] for owned in gathering._owners.values() if owned is not None]
    return {"owners": owners}


@pytest.mark.parametrize("world_size", [2, 3])
def test_equals_one_process_bit_for_bit(run_ranks: RankRunner, world_size: int) -> None:
    found = run_ranks(world_size, assert_equals_one_process, torch.float32, False, "thread")
    owners = found[0]["owners"]
    assert all(each["owners"] == owners for each in found)
    assert len(owners) == len(SHAPES)
    assert set(owners) == set(range(world_size))


def test_with_masters(run_ranks: RankRunner) -> None:
    run_ranks(2, assert_equals_one_process, torch.bfloat16, True, "lazy")


def batches_of_every_rank() -> list[list[str]]:
    model = nn.ParameterList([nn.Parameter(placed(value(index, 0, torch.float32))) for index in range(5)])
    optimizer = torch.optim.Muon(model.parameters())
    swapckpt.StateManager(model, optimizer, replace(GATHERED, swap_times=3))
    return [[entry.name for entry in batch.params] for batch in swap_of(optimizer).table.batches]


def test_all_ranks_cut_the_same_batches(run_ranks: RankRunner) -> None:
    """Exchanges follow the batches. Local sizes differ: (1, 6) lies on one rank."""
    ranks = run_ranks(3, batches_of_every_rank)
    assert ranks[0] == ranks[1] == ranks[2]


def refusal() -> str:
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)]))
    optimizer = torch.optim.Muon([param])
    with pytest.raises(UnsupportedOptimizerError) as caught:
        swapckpt.swap_optimizer(optimizer, GATHERED)
    assert not swapckpt.is_swapped(optimizer)
    swapckpt.swap_optimizer(optimizer, CONFIG)
    return str(caught.value)


def late_refusal() -> None:
    mesh = init_device_mesh("cpu", (2,))
    params = [nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [Shard(dim)])) for dim in (0, 1)]
    optimizer = swapckpt.swap_optimizer(torch.optim.Muon(params[:1]), GATHERED)
    with pytest.raises(UnsupportedOptimizerError):
        optimizer.add_param_group({"params": params[1:]})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": params[1:]})
    for _ in range(2):
        with pytest.raises(UnsupportedOptimizerError):  # it is not left out in silence
            optimizer.step()


def test_other_placements_added_later_are_refused_too(run_ranks: RankRunner) -> None:
    run_ranks(2, late_refusal)


def test_other_placements_are_refused(run_ranks: RankRunner) -> None:
    for message in run_ranks(2, refusal):
        assert "parameter 0, shape [4, 6]: placed as (Shard(dim=1),), expected rows sharded" in message


def test_no_effect_without_sharding_and_on_other_optimizers() -> None:
    for cls in (torch.optim.Muon, torch.optim.AdamW):
        param = nn.Parameter(torch.ones(8, 8))
        optimizer = swapckpt.swap_optimizer(cls([param]), GATHERED)
        param.grad = torch.ones(8, 8)
        optimizer.step()
        other = nn.Parameter(torch.ones(8, 8))
        plain = cls([other])
        other.grad = torch.ones(8, 8)
        plain.step()
        assert_same_bits({"param": param.detach()}, {"param": other.detach()})
