"""Muon under HSDP with owners: the ranks of one replica step its matrices, and no other rank takes part."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import swapckpt
from swapckpt.broadcast import ParameterBroadcast
from swapckpt.device import CpuDevice
from swapckpt.errors import ReplicaError, StepError
from swapckpt.optimizer import swap_of
from swapckpt.precision import MASTER
from swapckpt.replicas import Replicas
from swapckpt.submesh import Submeshes, largest_shard_numel
from swapckpt.swap import Phase
from swapckpt.update import is_local
from tests.manager.test_exchange import StockOptimizer
from tests.manager.training import assert_same_bits, same_bits
from tests.ranks.training import CONFIG, OPTIMIZERS, WIDTH, SpareNet, Twins, local

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from tests.multirank import RankRunner

MATRICES = 6  # of SpareNet: square, wide and tall ones, and one whose 3 rows lie unevenly on 2 ranks


def stepped_on(mesh_shape: tuple[int, ...], shape: tuple[int, int]) -> tuple[Tensor, int]:
    """A matrix after a step of torch's own Muon, and the number of collectives that took."""
    mesh = init_device_mesh("cpu", mesh_shape)
    placements = [*[Replicate()] * (len(mesh_shape) - 1), Shard(0)]
    seeds = (torch.Generator().manual_seed(seed) for seed in (0, 1))
    value, grad = (distribute_tensor(torch.randn(shape, generator=seed), mesh, placements) for seed in seeds)
    param = nn.Parameter(value)
    param.grad = grad
    optimizer = torch.optim.Muon([param], lr=0.05)
    with CommDebugMode() as seen:
        optimizer.step()
    return value.full_tensor(), seen.get_total_counts()


def step_stock_muon() -> list[tuple[Tensor, int]]:
    return [stepped_on((2, 2), shape) for shape in ((32, 8), (8, 32))]


def step_stock_muon_of_one_replica() -> list[tuple[Tensor, int]]:
    return [stepped_on((2,), shape) for shape in ((32, 8), (8, 32))]


def test_torch_divides_the_products_of_tall_matrices_among_replicas(run_ranks: RankRunner) -> None:
    """Why an owner needs a mesh of its own, and why its bits are those of one replica: see docs/ranks.md."""
    (tall, tall_count), (wide, wide_count) = run_ranks(4, step_stock_muon)[0]
    (alone, alone_count), (wide_alone, wide_alone_count) = run_ranks(2, step_stock_muon_of_one_replica)[0]
    assert tall_count > alone_count
    assert not torch.equal(tall, alone)
    assert wide_count == wide_alone_count
    assert torch.equal(wide, wide_alone)


class OneReplica(torch.optim.Optimizer):
    """Torch's own Muon over the same shards as ``net``, on the mesh of this rank's replica, and unswapped."""

    def __init__(self, net: nn.Module, *, masters: bool = False) -> None:
        self.params = [param for param in net.parameters() if param.ndim == 2]
        super().__init__(self.params, {})
        shards = [self._shard(param.detach()) for param in self.params]
        self.stepped = [nn.Parameter(shard.float() if masters else shard) for shard in shards]
        self._optimizer = OPTIMIZERS["Muon"](self.stepped)

    @staticmethod
    def _shard(tensor: Tensor) -> Tensor:
        assert isinstance(tensor, DTensor)
        submesh = tensor.device_mesh["shard"]
        return DTensor.from_local(
            tensor.to_local(), submesh, [Shard(0)], shape=tensor.shape, stride=tensor.stride()
        )

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for param, stepped in zip(self.params, self.stepped, strict=True):
            stepped.grad = None if param.grad is None else self._shard(param.grad).to(stepped.dtype)
        self._optimizer.step()
        for param, stepped in zip(self.params, self.stepped, strict=True):
            local(param).copy_(local(stepped))
            if stepped in self._optimizer.state:
                self.state[param] = self._optimizer.state[stepped]


class MuonTwins(Twins):
    """The same training twice: swapped with owners, and by ``OneReplica``."""

    def __init__(self, *, masters: bool = False, **options: object) -> None:
        dtype = torch.bfloat16 if masters else torch.float32
        super().__init__("hsdp", "Muon", dtype=dtype, master_weights=masters, **options)
        self.plain = OneReplica(self.plain_net, masters=masters)

    def assert_same(self) -> None:
        owners = swap_of(self.optimizer).sharing.replicas
        for name, param, other in self.pairs():
            assert same_bits(param.data, other.data), name
            state, expected = self.optimizer.state.get(param, {}), self.plain.state.get(other, {})
            assert state.keys() - {MASTER} == (expected.keys() if owners.owns(param) else set()), name
            for key, value in state.items():
                assert isinstance(param, DTensor)
                assert value.device_mesh == param.device_mesh
                assert value.placements == (Replicate(), Shard(0))
                assert key == MASTER or same_bits(local(value), local(expected[key])), (name, key)


def train(masters: bool) -> tuple[list[str], int, int]:
    twins = MuonTwins(masters=masters)
    for step in range(6):
        twins.train([step])
        twins.assert_same()
    memory = twins.manager.memory()
    assert memory.device_nbytes == 0
    sizes = {name: local(param).numel() for name, param, _ in twins.pairs()}
    assert swap_of(twins.optimizer).table.swapped_nbytes == sum(
        (8 if masters else 4) * sizes[name] for name in twins.owned()
    )
    return twins.owned(), sum(sizes[name] for name in twins.owned()), sum(sizes.values())


@pytest.mark.parametrize("masters", [False, True])
def test_owners_have_the_bits_of_one_replica(run_ranks: RankRunner, masters: bool) -> None:
    """Gradients are clipped; ``spare`` has one in some of the steps only. State is halved."""
    ranks = run_ranks(4, train, masters)
    for shard in (0, 1):
        names = ranks[shard][0] + ranks[2 + shard][0]
        assert len(names) == len(set(names)) == MATRICES
        assert ranks[shard][1] + ranks[2 + shard][1] == ranks[shard][2]
        assert abs(ranks[shard][1] - ranks[2 + shard][1]) <= 2 * WIDTH * WIDTH // 2
    assert ranks[0][0] == ranks[1][0]


class ProductOfMany(torch.optim.Optimizer):
    """No optimizer of torch: it looks at whole DTensors, moves one state to another key, and drops it."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                count = state["count"] = state.get("count", 0) + 1
                state["old"] = state.pop("new", torch.zeros_like(param))
                state["new"] = param.grad * param.grad.norm()
                if count == 3:
                    del state["old"]
                param.sub_(state["new"] + state.get("old", 0), alpha=group["lr"])


def step_whole(kind: str) -> dict[str, bool]:
    """Matrices that every rank holds in full: the part of the mesh without replicas is one rank."""
    mesh = init_device_mesh("cpu", (2, 2))
    placements = [Replicate(), Replicate()]
    whole = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((16, 6), (6, 16))]
    plain = [nn.Parameter(each.clone()) for each in whole]
    params = [nn.Parameter(distribute_tensor(each, mesh, placements)) for each in whole]
    make = ProductOfMany if kind == "own" else torch.optim.Muon
    optimizer, reference = make(params), make(plain)
    swapckpt.swap_optimizer(optimizer, CONFIG)
    for step in range(4):
        for param, other in zip(params, plain, strict=True):
            other.grad = torch.randn(other.shape, generator=torch.Generator().manual_seed(step))
            param.grad = distribute_tensor(other.grad, mesh, placements)
        optimizer.step()
        reference.step()
    owned = {}
    for index, (param, other) in enumerate(zip(params, plain, strict=True)):
        assert_same_bits({"param": local(param.data)}, {"param": other.data})
        owned[str(index)] = param in optimizer.state
        for key, value in optimizer.state.get(param, {}).items():
            is_whole = not isinstance(value, DTensor) or value.placements == (Replicate(), Replicate())
            assert is_whole
            found = local(value) if isinstance(value, DTensor) else value
            assert_same_bits({key: found}, {key: reference.state[other][key]})
    return owned


@pytest.mark.parametrize("kind", ["Muon", "own"])
def test_matrices_without_shards_are_stepped_by_one_rank(run_ranks: RankRunner, kind: str) -> None:
    ranks = run_ranks(4, step_whole, kind)
    assert [sum(rank[index] for rank in ranks) for index in ("0", "1")] == [1, 1]


def measure_shards() -> list[tuple[int, int]]:
    mesh = init_device_mesh("cpu", (2, 2))
    tensors = [
        distribute_tensor(torch.ones(shape), mesh, placements)
        for shape in ((5, 3), (1, 7), (8, 8))
        for placements in (
            [Replicate(), Shard(0)],
            [Shard(1), Shard(0)],
            [Shard(0), Shard(0)],
            [Replicate()] * 2,
        )
    ]
    return [(local(tensor).numel(), largest_shard_numel(tensor)) for tensor in [*tensors, torch.ones(3, 3)]]


def test_the_largest_shard_is_known_everywhere(run_ranks: RankRunner) -> None:
    """Batches and parcels follow it: the ranks of a replica have to wait for others in the same places."""
    for shards in zip(*run_ranks(4, measure_shards), strict=True):
        assert {largest for _, largest in shards} == {max(numel for numel, _ in shards)}


def stand_in() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    param, grad, kept, other = (
        distribute_tensor(torch.full((4, 3), float(index)), mesh, [Replicate(), Shard(0)])
        for index in range(4)
    )
    param.grad = grad
    plain = torch.zeros(3)
    state = {param: {"kept": kept, "gone": other, "plain": plain, "none": None}}
    values = state[param]
    with Submeshes(timeout_secs=30).alone({param: param, plain: None}, state) as standins:
        (standin,) = standins.values()
        assert isinstance(standin, DTensor)
        assert isinstance(standin.grad, DTensor)
        assert standin.device_mesh.get_group() is mesh.get_group(1)
        assert standin.placements == standin.grad.placements == (Shard(0),)
        assert local(standin).data_ptr() == local(param).data_ptr()
        assert list(state[standin]) == list(values)
        assert state[standin]["kept"].device_mesh == standin.device_mesh
        del state[standin]["gone"]
        state[standin]["new"] = torch.zeros_like(standin)
    assert list(state) == [param]
    assert state[param] is values
    assert list(values) == ["kept", "plain", "none", "new"]
    assert values["kept"] is kept  # and not another tensor over the same memory, which would count as new
    assert values["plain"] is plain
    assert values["new"].device_mesh == mesh
    assert values["new"].placements == (Replicate(), Shard(0))
    assert standin.grad is None


def test_a_stand_in_shares_memory_and_gives_its_place_back(run_ranks: RankRunner) -> None:
    run_ranks(4, stand_in)


def test_who_steps_local_shards() -> None:
    assert is_local(torch.optim.AdamW, CONFIG)
    assert is_local(type("Derived", (torch.optim.SGD,), {}), CONFIG)
    assert not is_local(torch.optim.Muon, CONFIG)
    assert not is_local(ProductOfMany, CONFIG)
    assert is_local(ProductOfMany, replace(CONFIG, split_oversized=True))


def save(path: Path) -> dict[str, Tensor]:
    twins = MuonTwins()
    twins.train(range(3))
    dcp.save({"optimizer": twins.manager}, checkpoint_id=path)
    other = MuonTwins()
    dcp.load(
        {"optimizer": other.manager}, checkpoint_id=path, planner=swapckpt.StrictLoadPlanner(other.manager)
    )
    for (_, param, _), (_, loaded, _) in zip(twins.pairs(), other.pairs(), strict=True):
        assert_same_bits(other.optimizer.state.get(loaded, {}), twins.optimizer.state.get(param, {}))
    full = {}
    for name, _, param in twins.pairs():
        for key, value in twins.plain.state.get(param, {}).items():
            full[f"{name}.{key}"] = value.full_tensor()
    return full


def test_stock_torch_reads_what_owners_saved(run_ranks: RankRunner, tmp_path: Path) -> None:
    saved = run_ranks(4, save, tmp_path)[0]
    model = SpareNet(WIDTH)
    optimizer = OPTIMIZERS["Muon"](list(model.parameters()))
    dcp.load({"optimizer": StockOptimizer(model, optimizer, flat=False)}, checkpoint_id=tmp_path)
    names = {param: name for name, param in model.named_parameters()}
    found = {
        f"{names[param]}.{key}": value
        for param, values in optimizer.state.items()
        for key, value in values.items()
        if f"{names[param]}.{key}" in saved  # ``spare`` had no gradient in all steps
    }
    assert_same_bits(found, saved)


def fail_on_one_rank(gather: bool, dies: bool) -> tuple[str, str, Phase]:
    """Rank 3 fails inside an update: what the others wait for does not come."""
    twins = Twins("hsdp", "Muon", timeout_secs=3.0, gather_matrices=gather)
    for _, param, _ in twins.pairs():
        param.grad = torch.ones_like(param)
    twins.optimizer.step()
    if dist.get_rank() == 3:
        twins.optimizer.param_groups[0]["ns_steps"] = 100  # Muon refuses that
    with pytest.raises((StepError, ReplicaError)) as caught:
        twins.optimizer.step()
    if dies and dist.get_rank() == 3:
        os._exit(0)
    return type(caught.value).__name__, str(caught.value), swap_of(twins.optimizer).phase


@pytest.mark.parametrize("is_joint", [False, True])
def test_a_failed_rank_is_silent_where_ranks_communicate_inside_an_update(is_joint: bool) -> None:
    replicas = Replicas(group_size=None, groups={}, timeout_secs=30)
    sharing = ParameterBroadcast(replicas, CpuDevice(), bucket_nbytes=512, timeout_secs=30)
    with pytest.raises(ArithmeticError), sharing.together(is_joint=is_joint):
        raise ArithmeticError
    assert sharing.relay.is_broken == is_joint


@pytest.mark.parametrize(("gather", "dies"), [(False, True), (True, False)])
def test_a_rank_that_fails_in_an_update_is_an_error_on_the_others(
    run_ranks: RankRunner, gather: bool, dies: bool
) -> None:
    """It says nothing more, since others are in the middle of an exchange. Those find out in time."""
    outcomes = run_ranks.outcomes(4, fail_on_one_rank, gather, dies)
    for outcome in outcomes[: 3 if dies else 4]:
        assert outcome.value is not None, outcome.error
        _, message, phase = outcome.value
        assert ("less than 100" in message) == (outcome.rank == 3)
        assert phase is Phase.FAILED
