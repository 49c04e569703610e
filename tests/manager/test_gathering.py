"""Muon over sharded matrices with ``gather_matrices=True``: the bits of one process that holds them whole."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import swapckpt
from swapckpt._torch import local_of
from swapckpt.device import CpuDevice
from swapckpt.errors import UnsupportedOptimizerError
from swapckpt.optimizer import swap_of
from swapckpt.ownership import assign_owners
from swapckpt.precision import MASTER
from tests.manager.training import CONFIG, assert_same_bits

if TYPE_CHECKING:
    from swapckpt.ownership import Coordinate
    from tests.multirank import RankRunner

SHAPES = ((12, 8), (5, 16), (8, 8), (1, 6), (16, 24))
"""Rows that are even, uneven, and fewer than ranks."""
GATHERED = replace(CONFIG, gather_matrices=True)


def value(index: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(SHAPES[index], generator=torch.Generator().manual_seed(10 * step + index)).to(dtype)


def placed(full: torch.Tensor, mesh_shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """Rows along the last dimension of the mesh, replicas along the others."""
    mesh = init_device_mesh("cpu", mesh_shape or (dist.get_world_size(),))
    return distribute_tensor(full, mesh, [*[Replicate()] * (mesh.ndim - 1), Shard(0)])


def assert_equals_one_process(
    dtype: torch.dtype,
    masters: bool,
    policy: str,
    mesh_shape: tuple[int, ...] | None = None,
    shares: bool = False,
) -> tuple[list[Coordinate], list[int]]:
    """Returns who owns which matrix, and which of them this rank stepped."""
    config = replace(GATHERED, master_weights=masters, swap_times=3, shard_replicas=shares)
    whole = [nn.Parameter(value(index, 0, torch.float32)) for index in range(len(SHAPES))]
    if not masters:
        whole = [nn.Parameter(param.detach().to(dtype)) for param in whole]
    else:  # as the masters of parameters of low precision
        whole = [nn.Parameter(param.detach().to(dtype).float()) for param in whole]
    sharded = nn.ParameterList(
        [nn.Parameter(placed(param.detach().to(dtype), mesh_shape)) for param in whole]
    )
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
            other.grad = None if grad is None else placed(grad, mesh_shape)
        reference.step()
        optimizer.step()
        for param, other in zip(whole, sharded, strict=True):
            assert isinstance(other, DTensor)
            assert_same_bits({"param": other.full_tensor().detach()}, {"param": param.detach().to(dtype)})
            found = dict(optimizer.state.get(other, {}))
            if shares and not found:
                continue
            assert set(found) == ({"momentum_buffer", MASTER} if masters else {"momentum_buffer"})
            assert_same_bits(
                {"m": found["momentum_buffer"].redistribute(placements=whole_replica(other)).to_local()},
                {"m": reference.state[param]["momentum_buffer"]},
            )
            if masters:
                master = found[MASTER].redistribute(placements=whole_replica(other)).to_local()
                assert_same_bits({"m": master}, {"m": param.detach()})
    assert set(optimizer.state) <= set(sharded.parameters())
    assert shares or set(optimizer.state) == set(sharded.parameters())
    assert manager.memory().device_nbytes == 0
    gathering = swap_of(optimizer)._gathering
    assert gathering is not None
    owned = {index: gathering.owner_of(param) for index, param in enumerate(sharded)}
    return (
        [owner.coordinate for owner in owned.values() if owner is not None],
        [index for index, owner in owned.items() if owner is not None and owner.is_here],
    )


def whole_replica(param: torch.Tensor) -> list[Replicate]:
    assert isinstance(param, DTensor)
    return [Replicate()] * param.device_mesh.ndim


@pytest.mark.parametrize("world_size", [2, 3])
def test_equals_one_process_bit_for_bit(run_ranks: RankRunner, world_size: int) -> None:
    found = run_ranks(world_size, assert_equals_one_process, torch.float32, False, "thread")
    owners = found[0][0]
    assert all(each == owners for each, _ in found)
    assert len(owners) == len(SHAPES)
    assert set(owners) == {(rank,) for rank in range(world_size)}


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 2, 1)])
def test_each_matrix_is_stepped_by_one_rank_of_all_replicas(
    run_ranks: RankRunner, masters: bool, mesh_shape: tuple[int, ...]
) -> None:
    """HSDP, and a mesh that replicates along two dimensions and has each matrix whole on every rank."""
    dtype = torch.bfloat16 if masters else torch.float32
    found = run_ranks(4, assert_equals_one_process, dtype, masters, "lazy", mesh_shape)
    numels = [math.prod(shape) for shape in SHAPES]
    assert all(owners == list(assign_owners(numels, mesh_shape)) for owners, _ in found)
    assert sorted(index for _, here in found for index in here) == list(range(len(SHAPES)))


@pytest.mark.parametrize("mesh_shape", [(2, 2), (4, 1)])
def test_replicas_that_share_state_gather_what_they_own(
    run_ranks: RankRunner, mesh_shape: tuple[int, ...]
) -> None:
    found = run_ranks(4, assert_equals_one_process, torch.float32, False, "thread", mesh_shape, True)
    stepped = sorted(index for _, here in found for index in here)
    assert stepped == (list(range(len(SHAPES))) if mesh_shape == (2, 2) else [])  # each whole on its owner


def test_with_masters(run_ranks: RankRunner) -> None:
    run_ranks(2, assert_equals_one_process, torch.bfloat16, True, "lazy")


def measure(shares: bool, masters: bool, swap_times: int) -> tuple[swapckpt.SwapReport, int, int]:
    """The report before the first step; the peak of accounted bytes of the second one, and its formula."""
    dtype = torch.bfloat16 if masters else torch.float32
    model = nn.ParameterList([nn.Parameter(placed(value(i, 0, dtype), (2, 2))) for i in range(len(SHAPES))])
    optimizer = torch.optim.Muon(model.parameters())
    config = replace(GATHERED, swap_times=swap_times, shard_replicas=shares, master_weights=masters)
    manager = swapckpt.StateManager(model, optimizer, config)
    report = manager.report(gbps=10)
    for step in (1, 2):
        manager.reset_peak_memory()
        for index, param in enumerate(model):
            param.grad = placed(value(index, step, dtype), (2, 2))
        optimizer.step()
    swap = swap_of(optimizer)
    whole_nbytes, grad_nbytes = 0, 0
    for batch in swap.table.batches:
        owners = {entry.param: swap.matrix_owner(entry.param) for entry in batch.params}
        numel = sum(param.numel() for param, owner in owners.items() if owner is not None and owner.is_here)
        whole_nbytes = max(whole_nbytes, (4 + 4 + 4) * numel)  # parameter or master, gradient, momentum
        local_numel = sum(local_of(param).numel() for param in owners)
        grad_nbytes = max(grad_nbytes, 4 * local_numel if masters else 0)
    parcels = [each.parcel.nbytes for each in swap.sharing._deliveries] if swap.sharing is not None else []
    sent_nbytes = min(2, len(parcels)) * max(parcels, default=0)
    staged = swap.table.largest_batch_nbytes * min(config.staging_buffers, len(swap.table.batches))
    formula = staged + whole_nbytes + grad_nbytes + sent_nbytes
    assert report.gathered_peak_nbytes == whole_nbytes
    assert report == manager.report(gbps=10)
    return report, manager.memory().device_peak_nbytes, formula


@pytest.mark.parametrize(("shares", "masters"), [(False, False), (False, True), (True, False)])
def test_the_report_says_what_whole_matrices_take(run_ranks: RankRunner, shares: bool, masters: bool) -> None:
    """Accounted bytes of a step are those of the formula: in one batch exactly, in more at most."""
    for report, peak, formula in run_ranks(4, measure, shares, masters, 1):
        assert peak == formula
        assert report.largest_gathered_nbytes == 12 * 16 * 24 or shares
    ranks = run_ranks(4, measure, shares, masters, 3)
    for report, peak, formula in ranks:
        assert report.gathered_peak_nbytes < peak <= formula
    largest = max(ranks, key=lambda rank: rank[0].gathered_peak_nbytes)[0]
    assert largest.largest_gathered_nbytes == 12 * 16 * 24
    assert largest.largest_gathered == "4"
    assert largest.gathered_peak_nbytes >= largest.largest_gathered_nbytes
    assert "whole matrices in a step" in str(largest)
    assert "largest whole matrix       4.5 KiB on its owner: 4" in str(largest)


def add_late() -> list[Coordinate]:
    params = [nn.Parameter(placed(value(index, 0, torch.float32), (2, 2))) for index in range(len(SHAPES))]
    optimizer = swapckpt.swap_optimizer(torch.optim.Muon(params[:3]), GATHERED)
    optimizer.add_param_group({"params": params[3:]})
    owners = [swap_of(optimizer).matrix_owner(param) for param in params]
    return [owner.coordinate for owner in owners if owner is not None]


def test_matrices_that_are_added_go_to_the_lightest_rank(run_ranks: RankRunner) -> None:
    ranks = run_ranks(4, add_late)
    # 96, 80 and 64 elements; then 6 and 384, the larger one first.
    assert all(owners == [(0, 0), (0, 1), (1, 0), (1, 0), (1, 1)] for owners in ranks)


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
