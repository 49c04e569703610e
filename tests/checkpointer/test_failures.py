"""Saves and loads that fail, on one process: what is raised and where, what is left, and what works next."""

from __future__ import annotations

import os
import signal
import threading
import types
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import swapckpt
from swapckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    SchemaError,
    StateFailedError,
    StepError,
    StorageError,
    TransferError,
    UnsafePickleError,
)
from swapckpt.storage.commit import aside
from tests.checkpointer.jobs import (
    ASYNC,
    MODES,
    SWAP,
    SYNC,
    Failing,
    Gate,
    Job,
    differing,
    history,
    hooked,
    loaded,
)
from tests.core.devices import FailingDevice

if TYPE_CHECKING:
    from collections.abc import Callable


def saved(folder: Path, *steps: int, **options: Any) -> None:
    """Checkpoints of the first steps of a job."""
    job = Job.build(**options)
    with swapckpt.Checkpointer(folder, job.states, SYNC) as checkpointer:
        for step in range(1, max(steps) + 1):
            job.step(step)
            if step in steps:
                checkpointer.save(step)


# --------------------------------------------------------------------------------- who hears of a failure


def failing_save(
    folder: Path, config: swapckpt.CheckpointConfig = ASYNC
) -> tuple[swapckpt.Checkpointer, Any]:
    failing = Failing("append", StorageError("the disk is full"))
    with hooked(failing):
        checkpointer = swapckpt.Checkpointer(folder, Job.build().states, config)
    failing.arm()
    return checkpointer, checkpointer.save(1)


@pytest.mark.parametrize(
    "then",
    [
        lambda checkpointer, _: checkpointer.save(2),
        lambda checkpointer, _: checkpointer.wait(),
        lambda checkpointer, _: checkpointer.close(),
        lambda _, handle: handle.wait(),
        lambda _, handle: handle.result(),
    ],
    ids=["save", "wait", "close", "handle.wait", "handle.result"],
)
def test_an_unread_failure_is_raised_once_by_whatever_comes_next(
    tmp_path: Path, then: Callable[..., object]
) -> None:
    checkpointer, handle = failing_save(tmp_path)
    with pytest.raises(StorageError, match="disk is full"):
        then(checkpointer, handle)
    assert handle.done()
    checkpointer.close()  # it was heard
    assert checkpointer.steps() == []
    assert list(tmp_path.iterdir()) == []  # what was written is not kept on a disk that may be full


def test_a_load_leaves_an_unread_failure_for_later(tmp_path: Path) -> None:
    checkpointer, handle = failing_save(tmp_path)
    assert checkpointer.load() is None
    assert handle.done()
    with pytest.raises(StorageError, match="disk is full"):
        checkpointer.wait()
    checkpointer.close()


def test_a_disabled_save_raises_at_once_and_nothing_later(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="disk is full"):
        failing_save(tmp_path, SYNC)


def leave_the_block_after_a_failing_save(folder: Path, error: BaseException | None) -> None:
    failing = Failing("append", StorageError("the disk is full"))
    with hooked(failing), swapckpt.Checkpointer(folder, Job.build().states, ASYNC) as checkpointer:
        failing.arm()
        checkpointer.save(1)
        if error is not None:
            raise error


def test_leaving_the_block_raises_the_failure_of_the_last_save(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="disk is full"):
        leave_the_block_after_a_failing_save(tmp_path, None)


def test_an_error_inside_the_block_is_the_one_that_is_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ZeroDivisionError):
        leave_the_block_after_a_failing_save(tmp_path, ZeroDivisionError())
    assert "the disk is full" in caplog.text


def test_a_closed_checkpointer_refuses_and_lets_go_of_the_optimizer(tmp_path: Path) -> None:
    job = Job.build()
    hooks = (job.optimizer._optimizer_step_pre_hooks, job.optimizer._optimizer_step_post_hooks)
    before = [len(each) for each in hooks]
    checkpointer = swapckpt.Checkpointer(tmp_path, job.states, ASYNC)
    checkpointer.save(1)
    checkpointer.close()
    checkpointer.close()
    assert checkpointer.steps() == [1]
    for call in (lambda: checkpointer.save(2), checkpointer.load):
        with pytest.raises(ConfigError, match="closed"):
            call()
    assert [len(each) for each in hooks] == before
    job.step(1)


# ------------------------------------------------------------------------------------------ wrong arguments


@pytest.mark.parametrize("step", [-1, 1.0, "1", None, True])
def test_a_wrong_step(tmp_path: Path, step: Any) -> None:
    with swapckpt.Checkpointer(tmp_path, Job.build().states, ASYNC) as checkpointer:
        with pytest.raises(ConfigError, match="step must be an integer >= 0"):
            checkpointer.save(step)
        with pytest.raises(ConfigError, match="overwrite must be True or False"):
            checkpointer.save(1, overwrite=1)  # type: ignore[arg-type]
        if step is not None:
            with pytest.raises(ConfigError, match="step must be an integer >= 0"):
                checkpointer.load(step)
        assert checkpointer.steps() == []


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([1], "states must be a"),
        ({"": 1}, "without dots"),
        ({"a.b": 1}, "without dots"),
        ({7: 1}, "without dots"),
        ({"opt": torch.optim.SGD([torch.ones(1, requires_grad=True)])}, "StateManager"),
        (types.MappingProxyType({"epoch": 1}), "cannot be written back"),
    ],
    ids=["list", "empty", "dot", "number", "optimizer", "read-only"],
)
def test_states_that_cannot_be_saved_are_refused_at_once(tmp_path: Path, states: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        swapckpt.Checkpointer(tmp_path, states)


def test_a_read_only_mapping_of_what_loads_by_itself_is_fine(tmp_path: Path) -> None:
    states = types.MappingProxyType({"model": nn.Linear(2, 2), "progress": {"n": 1}})
    with swapckpt.Checkpointer(tmp_path, states, SYNC) as checkpointer:
        checkpointer.save(1)
        states["progress"]["n"] = 2  # type: ignore[index]
        checkpointer.load()
    assert states["progress"] == {"n": 1}


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    saved(tmp_path, 1, 3)
    with swapckpt.Checkpointer(tmp_path, Job.build().states) as checkpointer:
        with pytest.raises(CheckpointNotFoundError, match="it has steps 1, 3"):
            checkpointer.load(2)
        with pytest.raises(CheckpointExistsError, match="overwrite=True"):
            checkpointer.save(3).wait()
        assert checkpointer.load(1) == 1
    with (
        swapckpt.Checkpointer(tmp_path / "none", Job.build().states) as checkpointer,
        pytest.raises(CheckpointNotFoundError, match="no checkpoint"),
    ):
        checkpointer.load(2)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    job = Job.build()
    with swapckpt.Checkpointer(tmp_path / "file" / "run", job.states, ASYNC) as checkpointer:
        handle = checkpointer.save(1)
        with pytest.raises(StorageError, match=r"file is a file \(Not a directory\)"):
            handle.result()
        job.step(1)  # nothing is leased any more
    assert not differing(job.contents(), history()[1])


# ------------------------------------------------------------------------------------------ failed steps


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_failed_step_is_not_saved_and_a_load_with_the_model_clears_it(
    tmp_path: Path, mode: swapckpt.CheckpointConfig
) -> None:
    device = FailingDevice("thread")
    job = Job.build(None)
    swapckpt.swap_optimizer(job.optimizer, SWAP, device=device)
    with swapckpt.Checkpointer(tmp_path, job.states, mode) as checkpointer:
        job.step(1)
        checkpointer.save(1).wait()
        device.offload.copies_left = 1
        with pytest.raises(StepError):
            job.step(2)
        for step in (2, 3):
            with pytest.raises(StateFailedError):
                checkpointer.save(step)
        assert checkpointer.steps() == [1]
        assert checkpointer.load() == 1
        assert not differing(job.contents(), history()[1])
        job.step(2)
        checkpointer.save(2).wait()
    assert not differing(job.contents(), history()[2])


def test_a_load_without_the_model_does_not_clear_a_failed_step(tmp_path: Path) -> None:
    device = FailingDevice("thread")
    job = Job.build(None)
    swapckpt.swap_optimizer(job.optimizer, SWAP, device=device)
    with swapckpt.Checkpointer(tmp_path, {"optimizer": job.manager}, ASYNC) as checkpointer:
        job.step(1)
        checkpointer.save(1).wait()
        device.offload.copies_left = 1
        with pytest.raises(StepError):
            job.step(2)
        with pytest.raises(StateFailedError):
            checkpointer.load()
        with pytest.raises(StateFailedError):
            checkpointer.save(2)


def test_a_load_that_fails_leaves_failed_until_another_succeeds(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    flip(tmp_path / "step-2")  # found out when it has been read
    job = Job.build()
    with swapckpt.Checkpointer(tmp_path, job.states, ASYNC) as checkpointer:
        with pytest.raises(CorruptCheckpointError):
            checkpointer.load()
        with pytest.raises(StateFailedError):
            checkpointer.save(3)
        with pytest.raises(StateFailedError):
            job.optimizer.step()
        assert checkpointer.load(1) == 1
        assert not differing(job.contents(), history()[1])


# ------------------------------------------------------------------------------------------ captures, staging


def test_a_capture_that_fails_leaves_no_copies_behind(tmp_path: Path) -> None:
    job = Job.build(None)
    states: dict[str, Any] = {**job.states, "zz": 1}
    with swapckpt.Checkpointer(tmp_path, states, ASYNC) as checkpointer:
        job.step(1)
        checkpointer.save(1).wait()
        held = checkpointer._staging.nbytes
        assert held > 0
        states["zz"] = (tmp_path / "open").open("w")
        for _ in range(3):
            with pytest.raises(CheckpointError, match="TypeError"):
                checkpointer.save(2)
        states["zz"].close()
        states["zz"] = 2
        for step in (2, 3):
            checkpointer.save(step).wait()
        assert checkpointer._staging.nbytes == held
    assert not differing(loaded_with(tmp_path, zz=0).contents(), history()[1])


def loaded_with(folder: Path, **values: object) -> Job:
    job = Job.build()
    with swapckpt.Checkpointer(folder, {**job.states, **values}, ASYNC) as checkpointer:
        checkpointer.load()
    return job


def test_a_copy_that_fails_fails_this_save_and_neither_the_next_nor_the_step(tmp_path: Path) -> None:
    job = Job.build()
    with swapckpt.Checkpointer(tmp_path, job.states, ASYNC) as checkpointer:
        checkpointer.save(0).wait()
        (lane,) = checkpointer._staging._lanes.values()
        device = lane._device = FailingDevice("thread")
        job.step(1)
        device.offload.copies_left = 0
        handle = checkpointer.save(1)
        job.step(2)
        with pytest.raises(TransferError, match="the link is down"):
            handle.result()
        checkpointer.save(2).wait()
        assert checkpointer.steps() == [0, 2]
    assert not differing(loaded(tmp_path)[1].contents(), history()[2])


# ------------------------------------------------------------------------------------------ interrupts


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals")
def test_an_interrupt_while_waiting_leaves_the_save_alone(tmp_path: Path) -> None:
    gate = Gate()
    job = Job.build()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with hooked(gate), swapckpt.Checkpointer(tmp_path, job.states, ASYNC) as checkpointer:
            for call in (checkpointer.wait, lambda: checkpointer.save(2), checkpointer.load):
                with gate.closed():
                    handle = checkpointer.save(len(checkpointer.steps()) + 10)
                    assert gate.arrived.wait(30)
                    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
                    with pytest.raises(KeyboardInterrupt):
                        call()
                    assert not handle.done()
                handle.result()
    finally:
        signal.signal(signal.SIGINT, before)
    assert checkpointer.steps() == [10, 11, 12]


@pytest.mark.parametrize("operation", ["append", "put", "make_folder", "rename"])
def test_an_interrupt_of_a_disabled_save_stays_an_interrupt(tmp_path: Path, operation: str) -> None:
    job, failing = Job.build(), Failing(operation, KeyboardInterrupt())
    with hooked(failing), swapckpt.Checkpointer(tmp_path, job.states, SYNC) as checkpointer:
        failing.arm()
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(1)
        assert checkpointer.steps() == []
        checkpointer.save(1)


# ------------------------------------------------------------------------------------------ damage: C9


def data_file(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda file: file.stat().st_size)


def flip(folder: Path) -> None:
    content = bytearray(data_file(folder).read_bytes())
    content[len(content) // 2] ^= 1
    data_file(folder).write_bytes(content)


def truncate(folder: Path) -> None:
    file = data_file(folder)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def lose(folder: Path) -> None:
    data_file(folder).unlink()


def swap_file(folder: Path) -> None:
    """With that of a run with other values."""
    other = folder.parent / "other"
    job = Job.build()
    job.step(77)
    with swapckpt.Checkpointer(other, job.states, SYNC) as checkpointer:
        checkpointer.save(2, overwrite=True)
    data_file(folder).write_bytes(data_file(other / "step-2").read_bytes())


def lose_metadata_bytes(folder: Path) -> None:
    file = folder / ".metadata"
    file.write_bytes(file.read_bytes()[:-50])


@pytest.mark.parametrize("damage", [flip, truncate, lose, swap_file, lose_metadata_bytes])
def test_c9_damage_is_named_and_fallback_loads_the_next_older_one_whole(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1, 2)
    damage(tmp_path / "step-2")
    with pytest.raises(CorruptCheckpointError) as caught:
        loaded(tmp_path)
    assert "step-2" in str(caught.value)
    if damage in (flip, swap_file):
        assert data_file(tmp_path / "step-2").name in str(caught.value)
        assert "model." in str(caught.value) or "optimizer." in str(caught.value)
    step, job = loaded(tmp_path, fallback=True)
    assert step == 1
    assert "Step 2 is damaged, step 1 is loaded" in caplog.text
    assert not differing(job.contents(), history()[1])
    damage(tmp_path / "step-1")
    with pytest.raises(CorruptCheckpointError):
        loaded(tmp_path, fallback=True)


def test_without_verification_a_flipped_bit_is_loaded(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    flip(tmp_path / "step-1")
    job = Job.build()
    with swapckpt.Checkpointer(tmp_path, job.states, replace(ASYNC, verify_on_load=False)) as checkpointer:
        assert checkpointer.load() == 1
    assert differing(job.contents(), history()[1])


# ------------------------------------------------------------------------------ damaged steps, reached again


def lose_metadata(folder: Path) -> None:
    (folder / ".metadata").unlink()


def metadata_as_folder(folder: Path) -> None:
    lose_metadata(folder)
    (folder / ".metadata").mkdir()


@pytest.mark.parametrize("damage", [flip, truncate, lose_metadata, metadata_as_folder])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_step_that_a_load_found_damaged_is_saved_again(
    tmp_path: Path,
    mode: swapckpt.CheckpointConfig,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved(tmp_path, 1, 2, 3)
    damage(tmp_path / "step-3")
    job = Job.build()
    with swapckpt.Checkpointer(tmp_path, job.states, mode) as checkpointer:
        with pytest.raises(CorruptCheckpointError, match=r"step-3.*(\n.*)*fallback=True.*step 2"):
            checkpointer.load()
        assert checkpointer.load(fallback=True) == 2
        with pytest.raises(CheckpointExistsError):
            checkpointer.save(2).wait()  # a good one never
        job.step(3)
        checkpointer.save(3).wait()
        with pytest.raises(CheckpointExistsError):
            checkpointer.save(3).wait()  # is good now
    assert "Step 3 was found damaged when it was loaded: this save replaces it." in caplog.text
    step, again = loaded(tmp_path)
    assert step == 3
    assert not differing(again.contents(), history()[3])


def test_a_good_step_that_another_job_saved_in_place_of_a_damaged_one_is_not_replaced(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    flip(tmp_path / "step-2")
    job = Job.build()
    with swapckpt.Checkpointer(tmp_path, job.states, ASYNC) as checkpointer:
        assert checkpointer.load(fallback=True) == 1
        with swapckpt.Checkpointer(tmp_path, {"other": 7}, SYNC) as other:
            other.save(2, overwrite=True)
        with pytest.raises(CheckpointExistsError):
            checkpointer.save(2).wait()


def test_c15_two_jobs_that_save_one_step_do_not_both_commit_it(tmp_path: Path) -> None:
    states = [{"who": who, "x": torch.full((100_000,), who)} for who in (0, 1)]
    jobs = [swapckpt.Checkpointer(tmp_path, each, ASYNC) for each in states]
    handles = [job.save(1) for job in jobs]
    committed = []
    for who, handle in enumerate(handles):
        try:
            handle.wait()
        except CheckpointExistsError:
            continue
        committed.append(who)
    assert len(committed) == 1
    there: dict[str, Any] = {"who": -1, "x": torch.zeros(100_000, dtype=torch.int64)}
    with swapckpt.Checkpointer(tmp_path, there, ASYNC) as checkpointer:
        assert checkpointer.load() == 1
    assert [there["who"]] == committed
    assert torch.equal(there["x"], states[committed[0]]["x"])
    for job in jobs:
        job.close()


# ------------------------------------------------------------------------------------------ lost metadata


def test_c9_a_newer_step_without_its_metadata_is_never_passed_over_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1, 2, 3)
    lose_metadata(tmp_path / "step-1")  # older than what is loaded: a removal that was cut short
    lose_metadata(tmp_path / "step-3")
    for asked in (None, 3):
        with pytest.raises(
            CorruptCheckpointError, match=r"step-3 has lost its \.metadata(.|\n)*fallback=True"
        ):
            loaded(tmp_path, step=asked)
    assert loaded(tmp_path, step=2)[0] == 2
    step, job = loaded(tmp_path, fallback=True)
    assert step == 2
    assert "Step 3 is damaged, step 2 is loaded" in caplog.text
    assert not differing(job.contents(), history()[2])
    lose_metadata(tmp_path / "step-2")
    with pytest.raises(CorruptCheckpointError):
        loaded(tmp_path, fallback=True)


def test_a_newer_step_that_was_never_committed_is_passed_over(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "__0_0.distcp").write_bytes(b"as stock torch leaves it")
    (tmp_path / "step-2").rename(tmp_path / aside("step-4", "a" * 32, kind="new"))
    assert loaded(tmp_path)[0] == 1


def test_a_data_file_that_is_cut_while_it_is_read_is_damage(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    cut: list[str] = []

    def before(_: int, operation: str, path: str) -> None:
        if operation == "open" and path.startswith("step-2/__") and not cut:
            cut.append(path)
            truncate(tmp_path / "step-2")

    with hooked(before):
        step, job = loaded(tmp_path, fallback=True)
    assert cut
    assert step == 1
    assert not differing(job.contents(), history()[1])


# ------------------------------------------------------------------------------------------ wrong folders


def test_a_folder_that_is_a_checkpoint_is_refused_with_the_one_above(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with swapckpt.Checkpointer(tmp_path / "step-1", Job.build().states, ASYNC) as checkpointer:
        with pytest.raises(ConfigError, match=rf"folder above it, '{tmp_path}', and load\(1\)"):
            checkpointer.load()
        with pytest.raises(ConfigError, match="is a checkpoint, not a folder of checkpoints"):
            checkpointer.save(2).wait()
    assert not (tmp_path / "step-1" / "step-2").exists()


@pytest.mark.parametrize("folder", [5, None, "", b"runs"])
def test_a_folder_that_is_no_path(folder: Any) -> None:
    with pytest.raises(ConfigError, match=r"folder must be a path or URL, for example 'runs/a', got "):
        swapckpt.Checkpointer(folder, {"n": 1})


@pytest.mark.parametrize("below", ["", "run", "run/a"])
def test_a_file_in_the_way_of_the_folder_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = tmp_path / "file" / below
    with swapckpt.Checkpointer(folder, {"n": 1}, ASYNC) as checkpointer:
        for use in (checkpointer.load, lambda: checkpointer.save(1).wait()):
            with pytest.raises(StorageError, match=rf"{folder} .*{tmp_path}/file is a file.*Name another"):
                use()


def test_a_folder_that_cannot_be_made_is_named() -> None:
    with swapckpt.Checkpointer("/proc/nothing", {"n": 1}, ASYNC) as checkpointer:
        assert checkpointer.load() is None
        with pytest.raises(StorageError, match=r"/proc/nothing cannot be made.*user may write"):
            checkpointer.save(1).wait()


# ------------------------------------------------------------------------------- what does not fit: C10, C16


def test_c10_another_dtype_is_an_error_that_lists_all_unless_casts_are_allowed(tmp_path: Path) -> None:
    states: dict[str, Any] = {"model": nn.Linear(3, 2), "data": {"big": torch.tensor([300, 5])}}
    with swapckpt.Checkpointer(tmp_path, states, SYNC) as checkpointer:
        checkpointer.save(1)
    small: dict[str, Any] = {
        "model": nn.Linear(3, 2).bfloat16(),
        "data": {"big": torch.zeros(2, dtype=torch.int8)},
    }
    before = small["model"].weight.detach().clone()
    with swapckpt.Checkpointer(tmp_path, small) as checkpointer:
        with pytest.raises(SchemaError) as caught:
            checkpointer.load()
        advice, *lines = str(caught.value).splitlines()
        assert "allow_cast=True converts" in advice
        assert "allow_partial" not in advice
        assert [line.split(":")[0] for line in lines] == [
            "  - data.big",
            "  - model.bias",
            "  - model.weight",
        ]
        assert "expected torch.int8 [2], found torch.int64 [2]" in lines[0]
        assert torch.equal(small["model"].weight, before)
        assert checkpointer.load(allow_cast=True) == 1
    assert torch.equal(small["model"].weight, states["model"].weight.bfloat16())


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_c16_everything_that_does_not_fit_is_listed_sorted(tmp_path: Path, flat: bool) -> None:
    saved(tmp_path, 1, flat=flat)
    model = nn.Module()
    model.up = nn.Linear(96, 100)
    model.extra = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    manager = swapckpt.StateManager(model, optimizer, SWAP, flat=flat)
    states = {"model": model, "optimizer": manager}
    with swapckpt.Checkpointer(tmp_path, states) as checkpointer:
        with pytest.raises(SchemaError) as caught:
            checkpointer.load()
        advice, *lines = str(caught.value).splitlines()
        assert "allow_partial=True leaves out" in advice
        assert "allow_cast" not in advice
        assert lines == sorted(lines)
        found = {line.strip(" -").split(": ")[0]: line.split(": ")[1] for line in lines}
        assert found["model.extra.weight"] == "missing"
        assert found["model.head.weight"] == "unexpected"
        assert found["model.up.weight"] == ("expected torch.float32 [100, 96], found torch.float32 [192, 96]")
        assert "found torch.float32 [192, 96]" in found["optimizer.state.up.weight.exp_avg"]
        manager.state_dict()  # nothing was changed, nothing refuses


def test_allow_partial_leaves_what_the_checkpoint_does_not_have(tmp_path: Path) -> None:
    first: dict[str, Any] = {"model": nn.Linear(3, 2), "gone": 1}
    with swapckpt.Checkpointer(tmp_path, first, SYNC) as checkpointer:
        checkpointer.save(1)
    second: dict[str, Any] = {"model": nn.Linear(3, 2), "new": {"n": 5}, "plain": 6}
    with swapckpt.Checkpointer(tmp_path, second) as checkpointer:
        with pytest.raises(SchemaError, match=r"new\.n: missing"):
            checkpointer.load()
        assert checkpointer.load(allow_partial=True) == 1
    assert torch.equal(second["model"].weight, first["model"].weight)
    assert second["new"] == {"n": 5}
    assert second["plain"] == 6


# ------------------------------------------------------------------------------ code in a checkpoint: C11


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("place", ["item", "metadata"])
def test_c11_code_in_a_checkpoint_is_refused_and_not_run(tmp_path: Path, place: str) -> None:
    marker = tmp_path / "ran"
    folder = tmp_path / "run"
    dcp.save({"value": Evil(marker) if place == "item" else 1}, checkpoint_id=folder / "step-1")
    if place == "metadata":
        import pickle

        (folder / "step-1/.metadata").write_bytes(pickle.dumps(Evil(marker)))
    with swapckpt.Checkpointer(folder, {"value": 0}) as checkpointer:
        for fallback in (False, True):
            with pytest.raises(UnsafePickleError):
                checkpointer.load(fallback=fallback)
    assert not marker.exists()
