"""Owners write what they own: nobody broadcasts, and any reader gets all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import swapckpt
from swapckpt.storage.planner import SwapSavePlanner
from tests.manager.test_exchange import StockOptimizer
from tests.manager.training import assert_same_bits, contents
from tests.ranks.training import OPTIMIZERS, WIDTH, SpareNet, Twins

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from tests.multirank import RankRunner

KIND = "AdamW-amsgrad"
LAYOUTS = [("nested", False), ("flat", True)]


def save(twins: Twins, path: Path) -> None:
    planner = SwapSavePlanner()
    for name, flat in LAYOUTS:
        twins.manager.flat = flat
        state = {"model": get_model_state_dict(twins.model), "optimizer": twins.manager}
        dcp.save(state, checkpoint_id=path / name, planner=planner)


def load(model: nn.Module, target: object, path: Path, **options: object) -> None:
    parameters = get_model_state_dict(model)
    dcp.load({"model": parameters, "optimizer": target}, checkpoint_id=path, **options)
    set_model_state_dict(model, parameters)


def train_and_save(layout: str, source: Path | None, target: Path, steps: range) -> dict[str, object]:
    """Resume both twins, train, save the one with owners; what the other one has, in full."""
    twins = Twins(layout, KIND)
    if source is not None:
        plain = swapckpt.StateManager(twins.plain_model, twins.plain, flat=True)
        load(twins.plain_model, plain, source / "flat")
        planner = swapckpt.StrictLoadPlanner(twins.manager)
        load(twins.model, twins.manager, source / "nested", planner=planner)
        twins.assert_same()
    twins.train(steps)
    twins.assert_same()
    save(twins, target)
    exported = twins.manager.state_dict()
    names = {key.removeprefix("state.").rpartition(".")[0] for key in exported if key.startswith("state.")}
    assert names == set(twins.owned())
    return contents(twins.plain_net, twins.plain)


def assert_complete(path: Path) -> None:
    """Every tensor is there, each of its elements once."""
    for name, _ in LAYOUTS:
        metadata = dcp.FileSystemReader(path / name).read_metadata()
        tensors = {
            key: value
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }
        state = {key for key in tensors if key.startswith("optimizer.state.") and not key.endswith(".step")}
        assert len(state) == 3 * 10
        for value in tensors.values():
            assert sum(chunk.sizes.numel() for chunk in value.chunks) == value.size.numel()


def read(path: Path, side: str, *, flat: bool) -> dict[str, object]:
    """Everything, in a process of its own without ranks."""
    model = SpareNet(WIDTH)
    optimizer = OPTIMIZERS[KIND](list(model.parameters()))
    if side == "stock":
        load(model, StockOptimizer(model, optimizer, flat=flat), path)
    else:
        manager = swapckpt.StateManager(model, optimizer, swapckpt.SwapConfig(shard_replicas=True), flat=flat)
        load(model, manager, path, planner=swapckpt.StrictLoadPlanner(manager))
    return contents(model, optimizer)


def test_c18_owners_change_between_save_and_load(run_ranks: RankRunner, tmp_path: Path) -> None:
    """2 x 2 HSDP, four DDP replicas, one process of ours, one of stock torch. ``spare`` is stepped late."""
    first, second = tmp_path / "first", tmp_path / "second"
    saved = run_ranks(4, train_and_save, "hsdp", None, first, range(3))[0]
    assert_complete(first)
    for name, flat in LAYOUTS:
        assert_same_bits(read(first / name, "ours", flat=flat), saved)
    saved = run_ranks(4, train_and_save, "ddp", first, second, range(3, 5))[0]
    assert_complete(second)
    for name, flat in LAYOUTS:
        for side in ("ours", "stock"):
            assert_same_bits(read(second / name, side, flat=flat), saved)


def save_with_a_service(path: Path) -> dict[str, object]:
    """Saved in the background while training goes on, and loaded by ranks with other owners."""
    twins = Twins("ddp", KIND)
    parts = {"model": twins.net, "optimizer": twins.manager}
    with swapckpt.Checkpointer(path, parts, swapckpt.CheckpointConfig(async_mode="async")) as service:
        twins.train(range(4))
        saved = contents(twins.plain_net, twins.plain)
        handle = service.save(4)
        twins.train(range(4, 6))
        handle.wait()
        assert service.load() == 4
        own = contents(twins.net, twins.optimizer)
        assert_same_bits(own, {key: saved[key] for key in own})
    other = Twins("ddp", KIND, replica_group_size=2)
    with swapckpt.Checkpointer(path, {"model": other.net, "optimizer": other.manager}) as service:
        assert service.load() == 4
    own = contents(other.net, other.optimizer)
    assert_same_bits(own, {key: saved[key] for key in own})
    return own


def test_the_checkpoint_service_saves_and_loads_what_ranks_own(run_ranks: RankRunner, tmp_path: Path) -> None:
    ranks = run_ranks(4, save_with_a_service, tmp_path)
    names = dict(SpareNet(WIDTH).named_parameters())
    assert [sum(key not in names for key in own) for own in ranks[:2]] == [
        sum(key not in names for key in own) for own in ranks[2:]
    ]
    assert sum(key not in names for own in ranks[:2] for key in own) == 4 * 10


def load_what_does_not_fit(path: Path) -> tuple[list[str], dict[int, str]]:
    """An entry too many and one too few for parameters of one owner each, and a stranger."""
    twins = Twins("ddp", "AdamW")
    twins.train(range(4))
    exported = twins.manager.state_dict()
    state = exported["state"]
    assert isinstance(state, dict)
    state["stranger"] = {"step": torch.zeros(())}
    if "head.weight" in state:
        state["head.weight"]["other"] = torch.zeros(3)
    if "head.bias" in state:
        del state["head.bias"]["exp_avg"]
    dcp.save({"optimizer": exported}, checkpoint_id=path)
    before = contents(twins.net, twins.optimizer)
    failures = {}
    try:
        dcp.load({"optimizer": twins.manager}, checkpoint_id=path, planner=swapckpt.StrictLoadPlanner())
    except CheckpointException as error:
        failures = {rank: str(problem) for rank, (problem, _) in error.failures.items()}
    assert_same_bits(contents(twins.net, twins.optimizer), before)
    return twins.owned(), failures


def test_what_does_not_fit_is_told_by_the_rank_that_owns_it(run_ranks: RankRunner, tmp_path: Path) -> None:
    ranks = run_ranks(4, load_what_does_not_fit, tmp_path / "checkpoint")
    for rank, (owned, failures) in enumerate(ranks):
        assert failures == ranks[0][1]
        lines = ["optimizer.state.stranger.step: unexpected"]
        if "head.weight" in owned:
            lines.append("optimizer.state.head.weight.other: unexpected")
        if "head.bias" in owned:
            lines.append("optimizer.state.head.bias.exp_avg: missing")
        assert failures[rank].splitlines()[1:] == [f"  - {line}" for line in sorted(lines)]


def state_of(twins: Twins) -> dict[str, object]:
    names = dict(twins.net.named_parameters())
    return {key: value for key, value in contents(twins.net, twins.optimizer).items() if key not in names}


def load_by_hand() -> int:
    """A full state dict, by name and as torch's own: each rank takes what it owns."""
    twins = Twins("ddp", "AdamW")
    twins.train(range(4))
    by_name, by_position = Twins("ddp", "AdamW"), Twins("ddp", "AdamW")
    by_name.manager.load_state_dict(swapckpt.StateManager(twins.plain_model, twins.plain).state_dict())
    by_position.optimizer.load_state_dict(twins.plain.state_dict())
    for fresh in (by_name, by_position):
        assert_same_bits(state_of(fresh), state_of(twins))
    return len(state_of(twins))


def test_a_full_state_dict_is_loaded_in_part(run_ranks: RankRunner) -> None:
    assert sum(run_ranks(4, load_by_hand)) == 3 * 10
