"""One owner steps, its replicas get the result: the bits of a run in which every replica steps."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import swapckpt
from swapckpt.errors import AdoptionError, ConfigError, ReplicaError, StepError
from swapckpt.optimizer import swap_of
from swapckpt.plan import align_up
from swapckpt.swap import Phase
from tests.ranks.training import CONFIG, OPTIMIZERS, Twins, backward, build, local

if TYPE_CHECKING:
    from tests.multirank import RankRunner


def train_with_owners(layout: str, kinds: list[str]) -> dict[str, list[str]]:
    owned = {}
    for kind in kinds:
        twins = Twins(layout, kind)
        twins.train(range(6))
        twins.assert_same()
        assert twins.manager.memory().device_nbytes == 0
        owned[kind] = twins.owned()
    return owned


ELEMENTWISE = ["AdamW", "AdamW-fused", "SGD-momentum"]


@pytest.mark.parametrize(("layout", "kinds"), [("hsdp", ELEMENTWISE), ("ddp", [*ELEMENTWISE, "Muon"])])
def test_owners_change_no_bit(run_ranks: RankRunner, layout: str, kinds: list[str]) -> None:
    """Gradients are clipped; ``spare`` has one in some of the steps only."""
    ranks = run_ranks(4, train_with_owners, layout, kinds)
    for kind in kinds:
        names = [name for rank in (range(4) if layout == "ddp" else (0, 2)) for name in ranks[rank][kind]]
        assert len(names) == len(set(names)) == {"Muon": 6}.get(kind, 10)


def disagree_about_gradients() -> list[bytes]:
    """Each rank has gradients for other parameters: what the owner has counts."""
    twins = Twins("ddp", "AdamW")
    twins.train(range(2))
    owned = set(twins.owned())
    backward(twins.model, twins.net, 2)
    for index, (name, param) in enumerate(twins.net.named_parameters()):
        if index % 4 == dist.get_rank():
            param.grad = None
        assert name in owned or param not in twins.optimizer.state
    twins.optimizer.step()
    return [param.detach().numpy().tobytes() for param in twins.net.parameters()]


def test_ranks_that_disagree_about_gradients_end_with_the_same_parameters(run_ranks: RankRunner) -> None:
    ranks = run_ranks(4, disagree_about_gradients)
    assert all(rank == ranks[0] for rank in ranks)


def train_with_scaler(layout: str, kind: str) -> list[float]:
    """An infinite gradient on one rank in step 2: the step is skipped everywhere, and the scale halves."""
    twins = Twins(layout, kind)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    for step in range(4):
        for scaler, model, net, optimizer in (
            (scalers[0], twins.plain_model, twins.plain_net, twins.plain),
            (scalers[1], twins.model, twins.net, twins.optimizer),
        ):
            backward(model, net, step, scale=8.0 if step != 2 or dist.get_rank() else float("inf"))
            scaler.scale(torch.zeros(()))  # creates the scale
            scaler.step(optimizer)
            scaler.update()
        twins.assert_same()
    return [scaler.get_scale() for scaler in scalers]


@pytest.mark.parametrize(("layout", "kind"), [("ddp", "AdamW-fused"), ("hsdp", "AdamW")])
def test_grad_scaler_skips_the_step_on_all_ranks(run_ranks: RankRunner, layout: str, kind: str) -> None:
    assert run_ranks(4, train_with_scaler, layout, kind) == [[4.0, 4.0]] * 4


def measure_memory(layout: str) -> dict[str, int]:
    twins = Twins(layout, "AdamW", replica_bucket_nbytes=2048)
    swapckpt.swap_optimizer(twins.plain, replace(CONFIG, shard_replicas=False))
    twins.manager.reset_peak_memory()
    twins.train([3])  # all parameters have gradients
    table, sharing = swap_of(twins.optimizer).table, swap_of(twins.optimizer).sharing
    sizes = {name: local(param).nbytes for name, param, _ in twins.pairs()}
    return {
        "swapped": table.swapped_nbytes,
        "without": swap_of(twins.plain).table.swapped_nbytes,
        "expected": sum(2 * sizes[name] + 4 for name in twins.owned()),
        "largest": 2 * max(sizes.values()),
        "host": sum(segment.nbytes for batch in table.batches for segment in batch.segments),
        "aligned": sum(2 * align_up(sizes[name]) + align_up(4) for name in twins.owned()),
        "device_peak": twins.manager.memory().device_peak_nbytes,
        "bound": CONFIG.staging_buffers * table.largest_batch_nbytes
        + 2 * max(each.parcel.nbytes for each in sharing._deliveries),
    }


@pytest.mark.parametrize(("layout", "replicas"), [("hsdp", 2), ("ddp", 4)])
def test_state_is_divided_among_replicas(run_ranks: RankRunner, layout: str, replicas: int) -> None:
    ranks = run_ranks(4, measure_memory, layout)
    for rank in ranks:
        assert rank["swapped"] == rank["expected"]
        assert rank["swapped"] <= rank["without"] / replicas + rank["largest"] + 4 * 10
        assert rank["host"] == rank["aligned"]
        assert 0 < rank["device_peak"] <= rank["bound"]
    shards = 4 // replicas
    for shard in range(shards):
        same = ranks[shard::shards]
        assert sum(rank["swapped"] for rank in same) == same[0]["without"]


def share_along_two_dimensions() -> list[list[float]]:
    """A mesh that replicates along both dimensions: what an owner sends is passed on by its row."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    torch.manual_seed(0)
    params = [
        torch.nn.Parameter(distribute_tensor(torch.randn(rows, 50), mesh, [Replicate(), Replicate()]))
        for rows in (7, 6, 5, 4, 3)
    ]
    plain = [torch.nn.Parameter(local(param.detach()).clone()) for param in params]
    optimizer = torch.optim.AdamW(params, lr=0.1)
    swapckpt.swap_optimizer(optimizer, CONFIG)
    expected = torch.optim.AdamW(plain, lr=0.1)
    for step in range(3):
        for param, other in zip(params, plain, strict=True):
            other.grad = torch.full_like(other, step + 1.0)
            param.grad = DTensor.from_local(other.grad.clone(), mesh, [Replicate(), Replicate()])
        optimizer.step()
        expected.step()
    assert all(torch.equal(local(param), other) for param, other in zip(params, plain, strict=True))
    return [list(param.shape) for param in swap_of(optimizer).table.entries]


def test_updates_are_passed_on_along_every_replicate_dimension(run_ranks: RankRunner) -> None:
    ranks = run_ranks(4, share_along_two_dimensions)
    assert [owned[0][0] for owned in ranks] == [7, 6, 5, 4]  # the fifth, 3 rows, goes to the lightest
    assert ranks[3][1:] == [[3, 50]]


def share_within_groups() -> tuple[list[str], bool]:
    """Four replicas in groups of two: each group holds all state once."""
    twins = Twins("ddp", "SGD-momentum", replica_group_size=2)
    twins.train(range(3))
    twins.assert_same()
    late = torch.nn.Parameter(torch.ones(3))  # in no DDP module: every rank steps it
    twins.optimizer.add_param_group({"params": [late]})
    late.grad = torch.ones(3)
    twins.optimizer.step()
    with pytest.raises(ConfigError, match="replica_group_size=3 does not divide the 4 replicas"):
        Twins("ddp", "AdamW", replica_group_size=3)
    with pytest.raises(
        AdoptionError, match=r"cannot be released: the state of \d+ of its parameters is on other"
    ):
        swapckpt.release(twins.optimizer)
    with pytest.raises(AdoptionError, match="cannot be copied or pickled"):
        copy.deepcopy(twins.optimizer)
    return twins.owned(), bool((late != 1).all())


def test_replicas_share_within_groups(run_ranks: RankRunner) -> None:
    ranks = run_ranks(4, share_within_groups)
    assert ranks[:2] == ranks[2:]
    names = ranks[0][0] + ranks[1][0]
    assert len(names) == len(set(names)) == 10
    assert all(stepped for _, stepped in ranks)


def adopt_late(kind: str) -> int:
    """State from before the adoption is kept where its owner is."""
    model, net, optimizer = build("ddp", "AdamW")
    backward(model, net, 0)
    optimizer.step()
    swapckpt.StateManager(model, optimizer, CONFIG)
    return len(optimizer.state)


def test_adoption(run_ranks: RankRunner) -> None:
    """Of state from before the adoption each value is kept by one rank."""
    assert sum(run_ranks(4, adopt_late, "AdamW")) == 8  # two of the ten parameters were not used


def own_nothing() -> tuple[int, list[float], Phase]:
    """Two parameters, four replicas: two ranks own nothing, and a group field still advances there.

    Parameters are replaced on the way. In the end rank 0 fails.
    """
    model = torch.nn.Linear(10, 4)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.ones_(model.bias)
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    groups = dict.fromkeys(model.parameters(), dist.group.WORLD)
    swapckpt.swap_optimizer(optimizer, CONFIG, replica_groups=groups)
    manager = swapckpt.StateManager(model, optimizer)
    for step in range(3):
        if step == 2:
            replaced = {name: torch.nn.Parameter(param.data) for name, param in model.named_parameters()}
            new_to_old = {new: model.get_parameter(name) for name, new in replaced.items()}
            model.weight, model.bias = replaced["weight"], replaced["bias"]
            manager.rebind(new_to_old)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    calls, values = (
        optimizer.param_groups[0]["calls"],
        [each.tolist()[0] for each in (model.bias, model.weight[0])],
    )
    optimizer.fails = dist.get_rank() == 0
    with pytest.raises(StepError if optimizer.fails else ReplicaError):
        optimizer.step()
    return calls, values, swap_of(optimizer).phase


class Counting(torch.optim.SGD):
    fails = False

    def step(self, closure: object = None) -> object:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
        if self.fails:
            raise ArithmeticError("no more")
        return super().step(closure)


def test_a_rank_that_owns_nothing_takes_part(run_ranks: RankRunner) -> None:
    ranks = run_ranks(4, own_nothing)
    assert [calls for calls, _, _ in ranks] == [3] * 4
    for _, values, phase in ranks:
        assert values == pytest.approx([1 - 0.1 * (1 + 1.9 + 2.71)] * 2)
        assert phase is Phase.FAILED  # also where nothing is owned: what came from others is torn


def step_special_kinds() -> tuple[list[str], int]:
    """fp32 masters of bf16 parameters, and parameters that are stepped in slices."""
    twins = Twins("ddp", "AdamW", dtype=torch.bfloat16, master_weights=True)
    swapckpt.swap_optimizer(twins.plain, replace(CONFIG, shard_replicas=False, master_weights=True))
    twins.train(range(5))
    twins.assert_same()
    params = [torch.nn.Parameter(torch.linspace(-1, 1, numel)) for numel in (20_000, 15_000, 7)]
    plain_params = [torch.nn.Parameter(param.detach().clone()) for param in params]
    optimizer, plain = OPTIMIZERS["AdamW"](params), OPTIMIZERS["AdamW"](plain_params)
    config = replace(CONFIG, swap_times=8, min_slice_numel=1024, replica_bucket_nbytes=30_000)
    swapckpt.swap_optimizer(optimizer, config, replica_groups=dict.fromkeys(params, dist.group.WORLD))
    for _ in range(3):
        for param, other in zip(params, plain_params, strict=True):
            param.grad = other.grad = param.detach().cos()
        optimizer.step()
        plain.step()
    assert all(map(torch.equal, params, plain_params))
    with pytest.warns(UserWarning, match="shard_replicas=True has no effect"):
        swapckpt.swap_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]), CONFIG)
    return twins.owned(), len(swap_of(optimizer)._sliced)


def test_masters_and_slices_are_shared_too(run_ranks: RankRunner) -> None:
    ranks = run_ranks(4, step_special_kinds)
    assert [num_sliced for _, num_sliced in ranks] == [1, 1, 0, 0]
    owned = [name for names, _ in ranks for name in names]
    assert len(owned) == len(set(owned)) == 10
