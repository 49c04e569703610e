"""SwapSavePlanner plans once per structure, on one rank and on many; writers reuse what it keeps."""

from __future__ import annotations

import gc
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from swapckpt.collector import collector_paused
from swapckpt.errors import CheckpointExistsError, PlanError, StorageError
from swapckpt.storage import writer
from swapckpt.storage.metadata import dump_metadata
from swapckpt.storage.planner import SwapSavePlanner
from swapckpt.storage.posix import PosixFiles
from swapckpt.storage.reader import SwapStorageReader
from swapckpt.storage.writer import SwapStorageWriter
from tests.storage.stores import HookedFiles, equal, load, stock_load, unwrapped, zeroed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.checkpoint.metadata import Metadata


def state(value: float = 0.0, *, rows: int = 4) -> dict[str, Any]:
    return {
        "optim": {f"w{n}": torch.full((rows, 3), value + n) for n in range(5)},
        "settings": {"lr": value, "betas": (0.9, 0.99)},
    }


class CountingPlanner(SwapSavePlanner):
    """Counts how often stock's planning is asked."""

    planned = 0

    def _create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        self.planned += 1
        return super()._create_global_plan(all_plans)


class Saves:
    """Saves with one writer and one planner, as a job does."""

    def __init__(self, root: Path, planner: CountingPlanner, **options: Any) -> None:
        self.root = root
        self.planner = planner
        self.writer = SwapStorageWriter(**options)

    def save(self, state: dict[str, Any], step: int) -> None:
        with unwrapped():
            dcp_save(
                state,
                storage_writer=self.writer,
                planner=self.planner,
                checkpoint_id=f"{self.root}/step-{step}",
            )


@pytest.fixture
def saves(tmp_path: Path) -> Saves:
    return Saves(tmp_path, CountingPlanner())


def test_an_unchanged_structure_is_planned_once_and_saved_as_it_is_now(
    saves: Saves, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumped = []

    def counted(metadata: Metadata) -> bytes:
        dumped.append(metadata)
        return dump_metadata(metadata)

    monkeypatch.setattr(writer, "dump_metadata", counted)
    for step in range(4):
        saves.save(state(float(step)), step)
    assert saves.planner.planned == 1
    assert len(dumped) == 1
    for step in range(4):
        expected = state(float(step))
        assert equal(load(zeroed(expected), f"{saves.root}/step-{step}"), expected)
        assert equal(stock_load(zeroed(expected), f"{saves.root}/step-{step}"), expected)
    folders = [saves.root / f"step-{step}" for step in range(4)]
    ids = {pickle.loads((folder / ".metadata").read_bytes()).storage_meta.save_id for folder in folders}
    assert len(ids) == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["optim"].update(w0=torch.zeros(5, 3)),
        lambda state: state["optim"].update(w0=state["optim"]["w0"].double()),
        lambda state: state["optim"].update(new=torch.zeros(1)),
        lambda state: state["optim"].pop("w0"),
        lambda state: state["settings"].update(extra=1),
        lambda state: state["optim"].update(w0=3),
    ],
    ids=["shape", "dtype", "more tensors", "fewer tensors", "more values", "kind"],
)
def test_a_changed_structure_is_planned_again(
    saves: Saves, change: Callable[[dict[str, Any]], object]
) -> None:
    saves.save(state(), 1)
    changed = state(5.0)
    change(changed)
    saves.save(changed, 2)
    assert saves.planner.planned == 2
    assert equal(stock_load(zeroed(changed), f"{saves.root}/step-2"), changed)
    saves.save(state(6.0), 3)
    assert equal(load(zeroed(state()), f"{saves.root}/step-3"), state(6.0))


def test_values_of_another_length_move_what_follows(saves: Saves) -> None:
    """The plan stays, the places in the file do not."""
    for step, name in enumerate(["a", "b" * 5000, "c", "c"]):
        saves.save({"name": {"v": name}, "w": {"t": torch.full((3,), float(step))}}, step)
    assert saves.planner.planned == 1
    for step, name in enumerate(["a", "b" * 5000, "c", "c"]):
        loaded = load({"name": {"v": ""}, "w": {"t": torch.zeros(3)}}, f"{saves.root}/step-{step}")
        assert (loaded["name"]["v"], loaded["w"]["t"].tolist()) == (name, [step] * 3)


def test_a_failed_save_leaves_the_next_one_right(tmp_path: Path) -> None:
    failing = False

    def before(_number: int, operation: str, _path: str) -> None:
        if failing and operation == "put":
            raise StorageError("disk full")

    saves = Saves(tmp_path, CountingPlanner(), files=HookedFiles(PosixFiles(tmp_path), before))
    saves.save({"name": {"v": "a"}, "w": {"t": torch.zeros(3)}}, 0)
    failing = True
    with pytest.raises(StorageError):
        saves.save({"name": {"v": "b" * 5000}, "w": {"t": torch.ones(3)}}, 1)
    failing = False
    for step, name in ((2, "b" * 5000), (3, "a")):
        saves.save({"name": {"v": name}, "w": {"t": torch.full((3,), float(step))}}, step)
        loaded = load({"name": {"v": ""}, "w": {"t": torch.zeros(3)}}, f"{tmp_path}/step-{step}")
        assert (loaded["name"]["v"], loaded["w"]["t"].tolist()) == (name, [step] * 3)


def test_a_plan_that_was_refused_is_not_taken_for_that_of_the_next_save(saves: Saves) -> None:
    """The coordinator has planned the larger state when the attempt is refused; no rank has that plan."""
    saves.save(state(1.0), 1)
    with pytest.raises(CheckpointExistsError):
        saves.save(state(2.0) | {"more": {"t": torch.zeros(2)}}, 1)
    for step in (3, 4):
        saves.save(state(float(step)), step)
        path = f"{saves.root}/step-{step}"
        assert equal(load(zeroed(state()), path), state(float(step)))
        assert "more.t" not in SwapStorageReader(path).read_metadata().state_dict_metadata


def test_another_writer_with_the_same_planner_gets_all_places(tmp_path: Path) -> None:
    planner = CountingPlanner()
    for step in range(3):
        Saves(tmp_path, planner).save(state(float(step)), step)
        assert equal(load(zeroed(state()), f"{tmp_path}/step-{step}"), state(float(step)))
    assert planner.planned == 1


def test_planners_share_nothing(tmp_path: Path) -> None:
    """Two states with the same names in turns: a model and its average. Stock's planners share a cache."""
    jobs = {torch.float32: Saves(tmp_path / "a", CountingPlanner())}
    jobs[torch.bfloat16] = Saves(tmp_path / "b", CountingPlanner())
    for step in range(3):
        for dtype, job in jobs.items():
            job.save({"w": {"t": torch.full((3,), float(step), dtype=dtype)}}, step)
    for dtype, job in jobs.items():
        assert job.planner.planned == 1
        for step in range(3):
            expected = {"w": {"t": torch.full((3,), float(step), dtype=dtype)}}
            assert equal(load(zeroed(expected), f"{job.root}/step-{step}"), expected)


def test_a_lost_plan_is_an_error() -> None:
    empty = SavePlan([], usable=False)
    with pytest.raises(PlanError, match="has not seen"):
        SwapSavePlanner().create_global_plan([empty])
    with pytest.raises(PlanError, match="has not seen"):
        SwapSavePlanner().finish_plan(empty)


# -------------------------------------------------------------------------------------- names

leaves = st.one_of(
    st.none(),
    st.integers(),
    st.just((0.9, 0.99)),
    st.builds(lambda: torch.zeros(2)),
    st.lists(st.integers(), max_size=3),
    st.lists(st.builds(lambda: torch.zeros(1)), max_size=2),
)
keys = st.one_of(st.text("ab.", min_size=1, max_size=3), st.integers(0, 3))
nested = st.recursive(
    st.dictionaries(keys, leaves, max_size=4),
    lambda inner: st.one_of(
        st.dictionaries(keys, st.one_of(leaves, inner, inner.map(OrderedDict)), max_size=4),
        st.lists(st.one_of(leaves, inner), max_size=3).map(lambda entries: {"list": entries}),
    ),
    max_leaves=12,
)


@given(nested)
@settings(max_examples=200)
def test_names_are_those_of_stock_torch(state_dict: dict[Any, Any]) -> None:
    stock, ours = DefaultSavePlanner(), SwapSavePlanner()
    try:
        stock.set_up_planner(state_dict, None, True)
    except ValueError as error:  # two paths with one name
        with pytest.raises(ValueError, match=str(error)):
            ours.set_up_planner(state_dict, None, True)
        return
    ours.set_up_planner(state_dict, None, True)
    assert list(ours.state_dict) == list(stock.state_dict)
    assert all(ours.state_dict[fqn] is value for fqn, value in stock.state_dict.items())
    assert ours.mappings == stock.mappings


def test_the_collector_runs_again_whatever_happens() -> None:
    def fail() -> None:
        with collector_paused():
            assert not gc.isenabled()
            with collector_paused():
                pass
            assert not gc.isenabled()
            raise KeyError

    assert gc.isenabled()
    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()


# -------------------------------------------------------------------------------------- ranks


def save_on_ranks(root: str) -> list[int]:
    """Three saves; rank 1's values grow in the second, so that its places alone change."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    saves = Saves(Path(root), CountingPlanner())
    sent = []
    report = SwapStorageWriter._report

    def counting(task: Any, kept: Any, written: Any) -> Any:
        made = report(task, kept, written)
        sent.append(made.places is not None)
        return made

    SwapStorageWriter._report = staticmethod(counting)  # type: ignore[method-assign]
    for step in range(4):
        full = torch.arange(10.0).reshape(5, 2) + step
        name = "n" * (5000 if step == 1 and dist.get_rank() == 1 else 1)
        state = {
            "w": distribute_tensor(full, mesh, [Shard(0)]),
            f"rank{dist.get_rank()}": name,
            "z": distribute_tensor(-full, mesh, [Shard(0)]),
        }
        saves.save(state, step)
    return [saves.planner.planned, *sent]


def test_ranks_send_what_has_changed_only(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    first, second = run_ranks(2, save_on_ranks, str(tmp_path))
    assert first == [1, True, False, False, False]
    assert second == [0, True, True, True, False]
    for step in range(4):
        expected = torch.arange(10.0).reshape(5, 2) + step
        target = {"w": torch.zeros(5, 2), "z": torch.zeros(5, 2), "rank0": "", "rank1": ""}
        loaded = load(target, tmp_path / f"step-{step}")
        assert torch.equal(loaded["w"], expected)
        assert torch.equal(loaded["z"], -expected)
        assert loaded["rank1"] == "n" * (5000 if step == 1 else 1)


def save_placed_otherwise(root: str) -> int:
    """The same names, shapes and dtypes: shards of rows twice, shards of columns, a plain tensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    saves = Saves(Path(root), CountingPlanner())
    full = torch.arange(16.0).reshape(4, 4)
    for step, placement in enumerate([Shard(0), Shard(0), Shard(1), None]):
        tensor = full + step if placement is None else distribute_tensor(full + step, mesh, [placement])
        saves.save({"w": tensor}, step)
    return saves.planner.planned


def test_a_tensor_that_is_placed_otherwise_is_planned_again(
    run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    planned, _ = run_ranks(2, save_placed_otherwise, str(tmp_path))  # the coordinator plans
    assert planned == 3
    for step in range(4):
        expected = torch.arange(16.0).reshape(4, 4) + step
        assert equal(load({"w": torch.zeros(4, 4)}, tmp_path / f"step-{step}"), {"w": expected})
