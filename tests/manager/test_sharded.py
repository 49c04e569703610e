"""Sharded training on real ranks: the same bits as without swapping, and checkpoints for any other layout.

Rows do not divide evenly (5 and 10 rows on 2, 3 and 4 ranks), and the head has fewer rows than 4 ranks: some
shards are empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import swapckpt
from swapckpt.errors import SchemaError, ShardError
from swapckpt.optimizer import swap_of
from tests.manager.test_exchange import StockOptimizer
from tests.manager.training import CONFIG, OPTIMIZERS, Net, assert_same_bits, backward, contents

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch.optim import Optimizer

    from tests.multirank import RankRunner

WIDTH = 5
TENSOR_PARALLEL = {"up": ColwiseParallel, "down": RowwiseParallel}


def build(layout: str, kind: str) -> tuple[Net, Optimizer]:
    """A model in ``layout`` over all ranks, and its optimizer; parameters are the same in all layouts."""
    model = Net(WIDTH)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (world_size,))
        _shard(model, mesh)
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
        _shard(model, mesh)
    elif layout == "fsdp-tp":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
        plan = {
            f"blocks.{index}.{name}": style() for index in range(2) for name, style in TENSOR_PARALLEL.items()
        }
        whole = {name: ColwiseParallel(output_layouts=Replicate()) for name in ("spare", "head")}
        parallelize_module(model, mesh["tp"], plan | whole)
        _shard(model, mesh["dp"])
    return model, OPTIMIZERS[kind](list(model.parameters()))


def _shard(model: Net, mesh: object) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    """``spare`` is used from step 10 on; gradients are clipped, which takes a norm over all shards."""
    for step in steps:
        optimizer.zero_grad()
        backward(model, step, use_spare=step >= 10)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    optimizer.zero_grad()


def stateful(
    side: str, model: Net, optimizer: Optimizer, *, flat: bool
) -> StockOptimizer | swapckpt.StateManager:
    if side == "stock":
        return StockOptimizer(model, optimizer, flat=flat)
    return swapckpt.StateManager(model, optimizer, CONFIG, flat=flat)


def save(model: Net, source: StockOptimizer | swapckpt.StateManager, path: Path) -> None:
    dcp.save({"model": get_model_state_dict(model), "optimizer": source}, checkpoint_id=path)


def load(model: Net, target: StockOptimizer | swapckpt.StateManager, path: Path) -> None:
    parameters = get_model_state_dict(model)
    dcp.load({"model": parameters, "optimizer": target}, checkpoint_id=path)
    set_model_state_dict(model, parameters)


def local_state(optimizer: Optimizer) -> list[dict[str, object]]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [dict(optimizer.state.get(param, {})) for param in params]


# ------------------------------------------------------------------ the same bits


def assert_swapping_changes_no_bit(layout: str, kinds: list[str]) -> None:
    for kind in kinds:
        plain_model, plain_optimizer = build(layout, kind)
        model, optimizer = build(layout, kind)
        manager = swapckpt.StateManager(model, optimizer, CONFIG)
        for steps in (range(2), range(10, 12)):
            train(plain_model, plain_optimizer, steps)
            train(model, optimizer, steps)
        for (name, param), (_, other) in zip(
            model.named_parameters(), plain_model.named_parameters(), strict=True
        ):
            assert_same_bits({name: param.data}, {name: other.data})
        for state, other_state in zip(local_state(optimizer), local_state(plain_optimizer), strict=True):
            assert_same_bits(state, other_state)
        assert manager.memory().device_nbytes == 0
        assert swap_of(optimizer).device.ledger.num_offloads > 0


@pytest.mark.parametrize(("layout", "world_size"), [("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("fsdp-tp", 4)])
def test_swapped_equals_unswapped(run_ranks: RankRunner, layout: str, world_size: int) -> None:
    kinds = ["AdamW", "AdamW-fused", "SGD-dampening", "NAdam"]
    if (layout, world_size) == (
        "fsdp",
        2,
    ):  # stock's Muon cannot step a DTensor that has fewer rows than ranks
        kinds += ["Muon"]
    run_ranks(world_size, assert_swapping_changes_no_bit, layout, kinds)


def assert_ddp_changes_no_bit(path: Path) -> None:
    plain = DistributedDataParallel(Net(WIDTH), find_unused_parameters=True)
    model = DistributedDataParallel(Net(WIDTH), find_unused_parameters=True)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager = swapckpt.StateManager(model, optimizer, CONFIG)
    names = [name.removeprefix("module.") for name, _ in model.named_parameters()]
    assert list(manager.state_dict()["state"]) == names
    for step in range(3):
        for net, each in ((plain, plain_optimizer), (model, optimizer)):
            each.zero_grad()
            data = torch.Generator().manual_seed(100 * step + dist.get_rank())
            net(torch.randn(4, WIDTH, generator=data)).square().mean().backward()
            each.step()
    assert_same_bits(contents(model, optimizer), contents(plain, plain_optimizer))
    dcp.save({"optimizer": manager}, checkpoint_id=path)


def test_ddp(run_ranks: RankRunner, tmp_path: Path) -> None:
    """Every rank holds all state; each value is in the file once, under its plain name."""
    run_ranks(2, assert_ddp_changes_no_bit, tmp_path / "checkpoint")
    model, optimizer = build("plain", "AdamW")
    manager = swapckpt.StateManager(model, optimizer, CONFIG)
    dcp.load({"optimizer": manager}, checkpoint_id=tmp_path / "checkpoint")
    assert optimizer.state[model.head.weight]["step"] == 3


# ------------------------------------------------------------------ other layouts and world sizes

Contents = dict[str, object]


def run_stage(
    layout: str,
    *,
    kind: str = "AdamW",
    side: str = "swapped",
    flat: bool = False,
    source: Path | None = None,
    steps: Iterable[int] = (),
    target: Path | None = None,
) -> tuple[Contents, Contents]:
    """Resume, train, save. Full contents right after the load and at the end, the same on every rank."""
    model, optimizer = build(layout, kind)
    manager = stateful(side, model, optimizer, flat=flat)
    if source is not None:
        load(model, manager, source)
    loaded = contents(model, optimizer)
    train(model, optimizer, steps)
    if target is not None:
        save(model, manager, target)
    return loaded, contents(model, optimizer)


def run_both_layouts(path: Path, number: int) -> list[tuple[Contents, Contents]]:
    """Stage ``number`` of two chains of runs, one with the nested and one with the flat layout."""
    stages = []
    for flat in (False, True):
        chain = path / ("flat" if flat else "nested")
        stage = run_stage(
            "fsdp",
            flat=flat,
            source=chain / str(number - 1) if number else None,
            steps=range(2 * number, 2 * number + 2),
            target=chain / str(number),
        )
        stages.append(stage)
    return stages


def test_c6_resume_with_other_world_sizes(run_ranks: RankRunner, tmp_path: Path) -> None:
    """2 -> 1 -> 3 -> 2 ranks, then a plain process. Stock keeps one rank's data for plain local tensors."""
    saved: list[Contents] = []
    for number, world_size in enumerate((2, 1, 3, 2)):
        ranks = run_ranks(world_size, run_both_layouts, tmp_path, number)
        for stages in ranks:
            for chain, (loaded, trained) in enumerate(stages):
                if saved:
                    assert_same_bits(loaded, saved[chain])
                assert_same_bits(trained, ranks[0][chain][1])
        saved = [trained for _, trained in ranks[0]]
    assert_same_bits(saved[0], saved[1])
    for flat in (False, True):
        loaded, _ = run_stage("plain", flat=flat, source=tmp_path / ("flat" if flat else "nested") / "3")
        assert_same_bits(loaded, saved[flat])
        assert loaded["head.weight.step"] == 8
        assert "spare.weight.step" not in loaded


def test_c6_from_a_plain_process_to_more_ranks_than_rows(run_ranks: RankRunner, tmp_path: Path) -> None:
    _, saved = run_stage("plain", kind="NAdam", steps=range(2), target=tmp_path)
    for loaded, _ in run_ranks(4, run_stage, "fsdp", kind="NAdam", source=tmp_path):
        assert_same_bits(loaded, saved)


def resume_in_the_same_layout(layout: str, path: Path) -> Contents:
    _, uninterrupted = run_stage(layout, side="stock", steps=range(4))
    _, saved = run_stage(layout, steps=range(2), target=path / "first")
    loaded, trained = run_stage(layout, source=path / "first", steps=range(2, 4), target=path / "second")
    assert_same_bits(loaded, saved)
    assert_same_bits(trained, uninterrupted)
    return trained


@pytest.mark.parametrize("layout", ["hsdp", "fsdp-tp"])
def test_two_dimensional_layouts_resume_anywhere(run_ranks: RankRunner, tmp_path: Path, layout: str) -> None:
    saved = run_ranks(4, resume_in_the_same_layout, layout, tmp_path)[0]
    for loaded, _ in run_ranks(2, run_stage, "fsdp", source=tmp_path / "second"):
        assert_same_bits(loaded, saved)
    loaded, _ = run_stage("plain", source=tmp_path / "second")
    assert_same_bits(loaded, saved)


WAYS = [(side, flat) for side in ("stock", "swapped") for flat in (False, True)]


def write_all_ways(path: Path) -> list[Contents]:
    steps = range(10, 12)  # all parameters are used: a stock reader insists on state for each
    return [
        run_stage("fsdp", side=side, flat=flat, steps=steps, target=path / f"{side}-{flat}")[1]
        for side, flat in WAYS
    ]


def read_all_ways(path: Path) -> list[Contents]:
    other = {"stock": "swapped", "swapped": "stock"}
    return [
        run_stage("fsdp", side=other[side], flat=flat, source=path / f"{side}-{flat}")[0]
        for side, flat in WAYS
    ]


def test_stock_and_swapped_read_each_others_shards(run_ranks: RankRunner, tmp_path: Path) -> None:
    written = run_ranks(2, write_all_ways, tmp_path)[0]
    for read in run_ranks(3, read_all_ways, tmp_path):
        for found, expected in zip(read, written, strict=True):
            assert_same_bits(found, expected)


def assert_loads_in_place(path: Path) -> None:
    model, optimizer = build("fsdp", "AdamW")
    manager = swapckpt.StateManager(model, optimizer, CONFIG)
    train(model, optimizer, range(2))
    save(model, manager, path)
    before = contents(model, optimizer)

    model, optimizer = build("fsdp", "AdamW")
    manager = swapckpt.StateManager(model, optimizer, CONFIG)
    destination = _local_pointers(model, manager.state_dict())
    host_nbytes = manager.memory().host_nbytes
    load(model, manager, path)
    state = {"state": {name: optimizer.state.get(param, {}) for name, param in model.named_parameters()}}
    loaded = _local_pointers(model, state)
    assert loaded
    assert loaded == {place: destination[place] for place in loaded}
    assert manager.memory().host_nbytes == host_nbytes
    assert manager.memory().device_peak_nbytes == 0
    assert_same_bits(contents(model, optimizer), before)


def _local_pointers(model: Net, state_dict: dict[str, object]) -> dict[tuple[str, str], int]:
    state = state_dict["state"]
    assert isinstance(state, dict)
    pointers = {}
    for name, values in state.items():
        for key, value in values.items():
            assert isinstance(value, DTensor) == (key != "step")
            local = value.to_local() if isinstance(value, DTensor) else value
            if isinstance(value, DTensor):
                param = model.get_parameter(name)
                assert isinstance(param, DTensor)
                assert local.shape == param.to_local().shape
            pointers[name, key] = local.data_ptr()
    return pointers


def test_shards_are_read_in_place(run_ranks: RankRunner, tmp_path: Path) -> None:
    run_ranks(4, assert_loads_in_place, tmp_path / "checkpoint")


# ------------------------------------------------------------------ what is refused


def shard_errors() -> tuple[list[str], list[str]]:
    """Problems with plain local tensors for every sharded state, and with a DTensor of other placements."""
    model, optimizer = build("fsdp", "AdamW")
    manager = swapckpt.StateManager(model, optimizer, CONFIG)
    train(model, optimizer, range(10, 11))
    before = contents(model, optimizer)
    exported = manager.state_dict()
    state = exported["state"]
    assert isinstance(state, dict)
    local = {
        name: {
            key: value.to_local() if isinstance(value, DTensor) else value for key, value in values.items()
        }
        for name, values in state.items()
    }
    with pytest.raises(ShardError) as plain:
        manager.load_state_dict({**exported, "state": local})
    replicated = {name: dict(values) for name, values in state.items()}
    replicated["head.weight"]["exp_avg"] = replicated["head.weight"]["exp_avg"].redistribute(
        placements=[Replicate()]
    )
    with pytest.raises(SchemaError) as other:
        manager.load_state_dict({**exported, "state": replicated})
    assert_same_bits(contents(model, optimizer), before)
    return str(plain.value).splitlines()[1:], str(other.value).splitlines()[1:]


def test_plain_shards_and_other_placements_are_refused(run_ranks: RankRunner) -> None:
    plain, other = run_ranks(2, shard_errors)[1]
    names = [name for name, _ in Net(WIDTH).named_parameters()]
    assert [line.split(":")[0] for line in plain] == sorted(
        f"  - {name}.{key}" for name in names for key in ("exp_avg", "exp_avg_sq")
    )
    assert all("expected a DTensor placed (Shard(dim=0),), found a plain tensor of" in line for line in plain)
    assert other == ["  - head.weight.exp_avg: expected placements (Shard(dim=0),), found (Replicate(),)"]


def planner_failures(path: Path) -> dict[int, str]:
    model, optimizer = build("fsdp", "AdamW")
    save(model, swapckpt.StateManager(model, optimizer, CONFIG), path)
    parameters = get_model_state_dict(model)
    if dist.get_rank() == 1:  # only one rank cannot read it
        parameters["head.weight"] = torch.zeros(3, WIDTH + 1)
    try:
        dcp.load({"model": parameters}, checkpoint_id=path, planner=swapckpt.StrictLoadPlanner())
    except CheckpointException as error:
        return {rank: str(problem) for rank, (problem, _) in error.failures.items()}
    return {}


def test_the_strict_planner_tells_every_rank(run_ranks: RankRunner, tmp_path: Path) -> None:
    ranks = run_ranks(2, planner_failures, tmp_path / "checkpoint")
    assert ranks[0] == ranks[1]
    assert list(ranks[0]) == [1]
    assert "model.head.weight: expected torch.float32 [3, 6], found torch.float32 [3, 5]" in ranks[0][1]
