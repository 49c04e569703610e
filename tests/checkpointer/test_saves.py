"""What a save holds: exactly the step it was made at, in every mode, whatever training does meanwhile."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import swapckpt
from swapckpt.errors import CheckpointError, SaveInProgressError, StorageError
from swapckpt.storage import datafile, open_files, prune
from tests.checkpointer.jobs import (
    ASYNC,
    CONFIGS,
    LAST,
    SWAP,
    SYNC,
    Failing,
    Gate,
    Job,
    Net,
    differing,
    history,
    hooked,
    loaded,
)
from tests.storage.stores import unwrapped

if TYPE_CHECKING:
    from pathlib import Path

SPARES = replace(SWAP, spare_nbytes=1 << 30)
"""Enough for a step never to wait for a writer, so that a test can hold the writer as long as it likes."""
PINNED = replace(ASYNC, async_mode="async_with_pinned_mem")


def unlike(job: Job, expected: dict[str, object], *, flat: bool) -> list[str]:
    """What differs. The flat layout says nothing about a group without parameters, nor its learning rate."""
    unsaid = ("group 2", "scheduler _last_lr") if flat else ()
    return [name for name in differing(job.contents(), expected) if not name.startswith(unsaid)]


# ------------------------------------------------------------------------------------------ C1 and C20


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("config", [SPARES, None], ids=["swapped", "unswapped"])
def test_c1_steps_taken_while_a_writer_is_held_do_not_reach_the_file(
    tmp_path: Path, config: swapckpt.SwapConfig | None, flat: bool
) -> None:
    job, gate = Job.build(config, flat=flat), Gate()
    reference = history(last=20)
    done = 0
    with hooked(gate), swapckpt.Checkpointer(tmp_path, job.states, ASYNC) as checkpointer:
        saved = []
        for _ in range(5):
            with gate.closed():
                for _ in range(2):
                    done += 1
                    job.step(done)
                checkpointer.save(done)
                saved.append(done)
                assert gate.arrived.wait(30)
                done += 1
                job.step(done)  # at once
            checkpointer.wait()
    for step in saved:
        assert not unlike(loaded(tmp_path, step, flat=flat)[1], reference[step], flat=flat), step
    assert not differing(job.contents(), reference[done])


@pytest.mark.parametrize(
    ("mode", "config"),
    [(ASYNC, SWAP), (ASYNC, None), (PINNED, SWAP)],
    ids=["async-swapped", "async-unswapped", "pinned-swapped"],
)
def test_c1_five_saves_back_to_back_with_steps_until_each_ends(
    tmp_path: Path, mode: swapckpt.CheckpointConfig, config: swapckpt.SwapConfig | None
) -> None:
    job = Job.build(config)
    expected: dict[int, dict[str, object]] = {}
    done = 0
    with swapckpt.Checkpointer(tmp_path, job.states, mode) as checkpointer:
        for _ in range(5):
            done += 1
            job.step(done)
            expected[done] = job.contents()
            handle = checkpointer.save(done)
            while True:
                done += 1
                job.step(done)
                if handle.done():
                    break
    assert checkpointer.steps() == sorted(expected)
    for step, contents in expected.items():
        assert not differing(loaded(tmp_path, step)[1].contents(), contents), step
    plain = Job.build(None)
    for step in range(1, done + 1):
        plain.step(step)
    assert not differing(job.contents(), plain.contents())


def test_c1_a_step_waits_for_what_is_not_written_yet_and_for_nothing_else(tmp_path: Path) -> None:
    job, gate = Job.build(replace(SWAP, spare_nbytes=0, timeout_secs=20)), Gate("close")
    with hooked(gate), swapckpt.Checkpointer(tmp_path, job.states, ASYNC) as checkpointer:
        job.step(1)
        with gate.closed():  # all is written, and no file is closed
            handle = checkpointer.save(1)
            assert gate.arrived.wait(60)
            job.step(2)
            assert not handle.done()
        handle.wait()
    assert not differing(loaded(tmp_path)[1].contents(), history()[1])


def test_c20_buffers_hold_the_step_when_the_next_forward_comes_at_once(tmp_path: Path) -> None:
    job, gate = Job.build(), Gate()
    with hooked(gate), swapckpt.Checkpointer(tmp_path, job.states, ASYNC) as checkpointer:
        job.step(1)
        before = job.model.norm.running_mean.clone()
        with gate.closed():
            checkpointer.save(1)
            job.model(torch.full((4, 96), 3.0))
        checkpointer.wait()
    assert not torch.equal(job.model.norm.running_mean, before)
    _, resumed = loaded(tmp_path)
    assert torch.equal(resumed.model.norm.running_mean, before)
    assert resumed.model.norm.num_batches_tracked == 1


def test_c20_large_buffers_are_copied_before_save_returns(tmp_path: Path) -> None:
    """They do not wait for a thread as parameters do, which nothing changes before the next step."""

    def with_average() -> Job:
        model = Net()
        model.register_buffer("average", torch.zeros(4 << 20))
        return Job.build(model=model)

    job, resumed = with_average(), with_average()
    with swapckpt.Checkpointer(tmp_path, job.states, ASYNC) as checkpointer:
        checkpointer.save(1)
        job.model.average.add_(1)
    with swapckpt.Checkpointer(tmp_path, resumed.states, ASYNC) as checkpointer:
        checkpointer.load()
    assert not resumed.model.average.any()


def test_values_and_settings_changed_right_after_save_do_not_reach_the_file(tmp_path: Path) -> None:
    job, gate = Job.build(SPARES), Gate()
    states = {**job.states, "count": 1, "nested": {"list": [1, {"t": torch.ones(2)}]}}
    with hooked(gate), swapckpt.Checkpointer(tmp_path, states, ASYNC) as checkpointer:
        job.step(1)
        expected = job.contents()
        with gate.closed():
            checkpointer.save(1)
            states["count"] = 2
            states["nested"]["list"][1]["t"].fill_(5)
            states["nested"]["list"][0] = 7
            job.progress["seen"].fill_(9)
            job.optimizer.param_groups[0]["lr"] = 55.0
            job.scheduler.last_epoch = 77
    job = Job.build()
    states = {**job.states, "count": 0, "nested": {"list": [0, {"t": torch.zeros(2)}]}}
    with swapckpt.Checkpointer(tmp_path, states, ASYNC) as checkpointer:
        checkpointer.load()
    assert not differing(job.contents(), expected)
    assert states["count"] == 1
    assert states["nested"]["list"][0] == 1
    assert torch.equal(states["nested"]["list"][1]["t"], torch.ones(2))


def test_a_save_inside_a_step_hook_holds_the_moment(tmp_path: Path) -> None:
    """A hook in front of the step that runs behind the checkpointer's own: nothing fences it any more."""
    job = Job.build(SPARES)
    moments: dict[int, dict[str, object]] = {}
    with swapckpt.Checkpointer(tmp_path, job.states, ASYNC) as checkpointer:
        lane_of_lazy(checkpointer, job)

        def save(step: int) -> None:
            moments[step] = job.contents()
            checkpointer.save(step)

        before = job.optimizer.register_step_pre_hook(lambda *_: save(1))
        job.step(1)
        before.remove()
        after = job.optimizer.register_step_post_hook(lambda *_: save(2))
        job.step(2)
        after.remove()
        job.step(3)
    for step, contents in moments.items():
        assert not differing(loaded(tmp_path, step)[1].contents(), contents), step
    assert not differing(job.contents(), history()[3])


def lane_of_lazy(checkpointer: swapckpt.Checkpointer, job: Job) -> None:
    """Copies of parameters run as late as the rules allow."""
    from swapckpt.device import CpuDevice

    checkpointer.save(0).wait()
    (lane,) = checkpointer._staging._lanes.values()
    lane._device = CpuDevice("lazy", timeout_secs=60)
    del job


def test_weights_that_no_hooked_step_changes_are_staged_before_save_returns(tmp_path: Path) -> None:
    """An average of the weights, frozen, changed by code of its own."""
    job = Job.build()
    average = nn.Linear(200, 200).requires_grad_(requires_grad=False)
    with swapckpt.Checkpointer(tmp_path, {**job.states, "average": average}, ASYNC) as checkpointer:
        lane_of_lazy(checkpointer, job)
        before = average.weight.clone()
        checkpointer.save(1)
        average.weight.mul_(0.5)
    other = nn.Linear(200, 200)
    with swapckpt.Checkpointer(tmp_path, {**Job.build().states, "average": other}, ASYNC) as checkpointer:
        checkpointer.load()
    assert torch.equal(other.weight, before)


# ------------------------------------------------------------------- C4, C5, layouts, modes, other readers


@pytest.mark.parametrize("reader_flat", [False, True], ids=["to nested", "to flat"])
@pytest.mark.parametrize("writer_flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("reader", CONFIGS.values(), ids=[f"to {name}" for name in CONFIGS])
@pytest.mark.parametrize("writer", CONFIGS.values(), ids=CONFIGS)
def test_c4_c5_resumed_training_equals_uninterrupted_training(
    tmp_path: Path, writer: Any, reader: Any, writer_flat: bool, reader_flat: bool
) -> None:
    reference = history()
    job = Job.build(writer, flat=writer_flat)
    with swapckpt.Checkpointer(tmp_path, job.states, ASYNC) as checkpointer:
        for step in range(1, 4):
            job.step(step)
        checkpointer.save(3)
    found, resumed = loaded(tmp_path, config=reader, flat=reader_flat)
    assert found == 3
    assert not unlike(resumed, reference[3], flat=writer_flat)
    assert not any(name.startswith("unused.weight.") for name in resumed.contents())
    for step in range(4, LAST + 1):
        resumed.step(step)
    assert not unlike(resumed, reference[LAST], flat=writer_flat)


@pytest.mark.parametrize(
    ("mode", "config"),
    [(SYNC, SWAP), (SYNC, None), (ASYNC, SWAP), (ASYNC, None), (PINNED, None)],
    ids=["disabled-swapped", "disabled-unswapped", "async-swapped", "async-unswapped", "pinned-unswapped"],
)
def test_modes_write_the_same_checkpoint(
    tmp_path: Path, mode: swapckpt.CheckpointConfig, config: Any
) -> None:
    job = Job.build(config)
    with swapckpt.Checkpointer(tmp_path, job.states, mode) as checkpointer:
        assert checkpointer.load() is None
        job.step(1)
        handle = checkpointer.save(1)
        assert handle.done() or mode is not SYNC
        stats = handle.result()
    assert stats.step == handle.step == 1
    files = (tmp_path / "step-1").glob("*.distcp")
    assert stats.nbytes == sum(file.stat().st_size for file in files) > 0
    assert min(stats.staged_secs, stats.write_secs, handle.stalled_secs) >= 0
    assert not differing(loaded(tmp_path)[1].contents(), history()[1])


def test_stock_torch_reads_what_was_saved(tmp_path: Path) -> None:
    job = Job.build()
    with swapckpt.Checkpointer(tmp_path, job.states, ASYNC) as checkpointer:
        job.step(1)
        checkpointer.save(1)
    stock = Job.build(None)
    for param in stock.model.unused.parameters():
        param.requires_grad_(False)  # else stock asks for state that was never there
    stock.optimizer = torch.optim.AdamW(
        [param for param in stock.model.parameters() if param.requires_grad], lr=0.01
    )
    state: dict[str, Any] = {"model": stock.model.state_dict(), "progress": {"tokens": 0}}
    with unwrapped():
        dcp.load(state, checkpoint_id=tmp_path / "step-1")
    reference = history()[1]
    assert all(torch.equal(value, reference[name]) for name, value in state["model"].items())
    assert state["progress"]["tokens"] == 10


def test_contract_10_a_stock_file_without_state_of_a_parameter(tmp_path: Path) -> None:
    """Stock torch saves nothing for a parameter that never had a gradient."""
    stock = Job.build(None)
    for step in range(1, 4):
        stock.step(step)
    exported = get_optimizer_state_dict(stock.model, stock.optimizer)
    assert "unused.weight" not in exported["state"]
    state = {"model": stock.model.state_dict(), "optimizer": exported, "progress": stock.progress}
    dcp.save({**state, "scheduler": stock.scheduler.state_dict()}, checkpoint_id=tmp_path / "step-3")
    for config in CONFIGS.values():
        found, job = loaded(tmp_path, config=config)
        assert found == 3
        reference = history()
        assert not differing(job.contents(), reference[3])
        for step in range(4, LAST + 1):
            job.step(step)
        assert not differing(job.contents(), reference[LAST])


# ------------------------------------------------------------------------------------------ C13, C14


def test_c13_saves_requested_while_one_is_in_flight_come_one_after_the_other(tmp_path: Path) -> None:
    job = Job.build(SPARES)
    gate = Gate("make_folder")
    begun: list[str] = []
    with hooked(gate) as made, swapckpt.Checkpointer(tmp_path, job.states, ASYNC) as checkpointer:
        with gate.closed():
            first = checkpointer.save(1)
            assert gate.arrived.wait(30)
            job.step(1)
            threading.Timer(0.3, gate.open).start()
            second = checkpointer.save(2)
            assert first.done()
        third, fourth = checkpointer.save(3), checkpointer.save(4)
        assert second.done()
        assert third.done()
        fourth.wait()
        begun = [path for operation, path in made[0].calls if operation in ("make_folder", "rename") if path]
    assert checkpointer.steps() == [1, 2, 3, 4]
    assert [" -> step-" in call for call in begun] == [False, True] * 4  # never two at a time
    reference = history()
    for step, moment in ((1, 0), (2, 1), (3, 1), (4, 1)):
        assert not differing(loaded(tmp_path, step)[1].contents(), reference[moment])


def test_c13_on_busy_raise_refuses_until_the_save_is_over(tmp_path: Path) -> None:
    job, gate = Job.build(), Gate()
    config = replace(ASYNC, on_busy="raise")
    with hooked(gate), swapckpt.Checkpointer(tmp_path, job.states, config) as checkpointer:
        with gate.closed():
            handle = checkpointer.save(1)
            assert gate.arrived.wait(30)
            assert not handle.wait(0.01)
            for step in (2, 3, 4):
                with pytest.raises(SaveInProgressError, match="Step 1 is still being saved"):
                    checkpointer.save(step)
            assert not handle.done()
        handle.wait()
        checkpointer.save(5).wait()
        assert checkpointer.steps() == [1, 5]


def test_c14_the_newest_durable_checkpoint_is_never_removed(tmp_path: Path) -> None:
    job, gate = Job.build(SPARES), Gate("rename")
    config = replace(ASYNC, keep_latest=2)
    with hooked(gate), swapckpt.Checkpointer(tmp_path, job.states, config) as checkpointer:
        for step in range(1, 6):
            with gate.closed():
                checkpointer.save(step)
                assert gate.arrived.wait(30)  # all written, nothing committed
                assert checkpointer.steps() == list(range(max(1, step - 2), step))
            checkpointer.wait()
            assert checkpointer.steps() == list(range(max(1, step - 1), step + 1))


def test_c14_keep_every_is_never_removed(tmp_path: Path) -> None:
    job = Job.build()
    config = replace(SYNC, keep_latest=1, keep_every=3)
    with swapckpt.Checkpointer(tmp_path, job.states, config) as checkpointer:
        for step in range(1, 9):
            checkpointer.save(step)
        assert checkpointer.steps() == [3, 6, 8]


def test_a_job_that_went_back_keeps_what_it_saves_now(tmp_path: Path) -> None:
    job = Job.build()
    with swapckpt.Checkpointer(tmp_path, job.states, SYNC) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step)
    with swapckpt.Checkpointer(tmp_path, job.states, replace(SYNC, keep_latest=2)) as checkpointer:
        checkpointer.load(10)
        checkpointer.save(15)
        assert 15 in checkpointer.steps()


def test_a_checkpoint_that_cannot_be_removed_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job, failing = Job.build(), Failing("remove", StorageError("the store refuses"))
    config = replace(SYNC, keep_latest=1)
    with hooked(failing), swapckpt.Checkpointer(tmp_path, job.states, config) as checkpointer:
        checkpointer.save(1)
        failing.arm()
        checkpointer.save(2)
        assert "the store refuses" in caplog.text
        assert checkpointer.steps() == [1, 2]
        checkpointer.save(3)
        assert checkpointer.steps() == [3]


# ------------------------------------------------------------------------------------------ C7, C15


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_c7_a_full_disk_in_a_writer_thread(
    tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datafile, "FILE_NBYTES", 1 << 10)  # so that there is a file for each thread
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    job, failing = Job.build(), Failing("append", full)
    reference = history()
    with (
        hooked(failing),
        swapckpt.Checkpointer(tmp_path, job.states, replace(ASYNC, threads=threads)) as checkpointer,
    ):
        job.step(1)
        checkpointer.save(1).wait()
        assert len(list((tmp_path / "step-1").glob("*.distcp"))) == threads
        job.step(2)
        count = failing.counts["append"]
        for number in (0, count // 2, count - 1):
            failing.arm(number)
            with pytest.raises(CheckpointError, match="No space left"):
                checkpointer.save(2).wait()
            assert checkpointer.steps() == [1]
        assert not (tmp_path / "step-2").exists()
        assert not differing(loaded(tmp_path)[1].contents(), reference[1])
        checkpointer.save(2).wait()
        assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]  # noqa: PTH208 - nothing is left of attempts
    assert not differing(loaded(tmp_path)[1].contents(), reference[2])


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest) -> str:
    name = request.node.name.translate(str.maketrans("[]", "--"))
    if request.param == "s3":
        return f"{request.getfixturevalue('s3_bucket')}/{name}"
    return f"memory://{name}"


def test_c15_object_stores(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs: list[None] = []
    monkeypatch.setattr(os, "sync", lambda: syncs.append(None))
    job, failing = Job.build(), Failing("append", StorageError("the connection is lost"))
    reference = history()
    with hooked(failing), swapckpt.Checkpointer(url, job.states, ASYNC) as checkpointer:
        for step in (1, 2):
            job.step(step)
            checkpointer.save(step)
        checkpointer.wait()
        job.step(3)
        failing.arm(1)
        with pytest.raises(StorageError, match="connection is lost"):
            checkpointer.save(3).wait()
        assert checkpointer.steps() == [1, 2]
        with pytest.raises(StorageError, match="committed"):
            checkpointer.save(2).wait()
        checkpointer.save(2, overwrite=True).wait()
    assert not syncs
    assert not differing(loaded(url, 1)[1].contents(), reference[1])
    assert not differing(loaded(url, 2)[1].contents(), reference[3])
    files = open_files(url)
    prune(files, min_age_secs=-60, dry_run=False)
    assert files.uploads("") == []
    assert [entry.name for entry in files.entries("") if files.entries(entry.name)] == ["step-1", "step-2"]


# ------------------------------------------------------------------------------------------ C17 and RNG


def test_c17_a_load_needs_the_memory_of_the_state_and_no_more(tmp_path: Path) -> None:
    def build() -> Job:
        return Job.build(model=nn.Sequential(nn.Linear(96, 4096), nn.Linear(4096, 96)))

    job = build()
    job.step(1)
    with swapckpt.Checkpointer(tmp_path, job.states, SYNC) as checkpointer:
        checkpointer.save(1)
    fresh = build()
    with swapckpt.Checkpointer(tmp_path, fresh.states, ASYNC) as checkpointer:
        fresh.manager.reset_peak_memory()
        checkpointer.load()
        memory = fresh.manager.memory()
        assert memory.device_peak_nbytes == memory.device_nbytes == 0
        assert memory.host_peak_nbytes == memory.host_nbytes == job.manager.memory().host_nbytes
        assert checkpointer._staging.nbytes == 0


def test_c19_generators_of_one_process(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        return [random.random(), np.random.rand(), random.gauss(0, 1), torch.rand(2).tolist()]  # noqa: NPY002

    epoch = swapckpt.PerRank({"n": 3, "t": torch.ones(2)})
    states: dict[str, object] = {"rng": swapckpt.RngState(), "epoch": epoch}
    with swapckpt.Checkpointer(tmp_path, states, ASYNC) as checkpointer:
        draw()
        checkpointer.save(1)
        expected = [draw(), draw()]
        epoch.value["n"] = 4
        checkpointer.load()
        assert [draw(), draw()] == expected
        assert epoch.value["n"] == 3


def test_a_folder_that_is_copied_or_moved_stays_a_folder_of_checkpoints(tmp_path: Path) -> None:
    job = Job.build()
    with swapckpt.Checkpointer(tmp_path / "a", job.states, SYNC) as checkpointer:
        job.step(1)
        checkpointer.save(1)
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert not differing(loaded(tmp_path / "b")[1].contents(), history()[1])
    assert loaded(tmp_path / "a")[0] is None
