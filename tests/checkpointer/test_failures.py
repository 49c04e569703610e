"""Saves and loads that fail, on one process: what is raised and where, what is left, and what works next."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

import swapckpt
from swapckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    PhaseError,
    StateFailedError,
    StepError,
    StorageError,
    TransferError,
)
from tests.checkpointer.damages import flip
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
    saved,
)
from tests.core.devices import FailingDevice

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


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


class Unrestorable:
    """Is restored behind the optimizer, and cannot be."""

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        msg = "no"
        raise ValueError(msg)


def test_a_load_whose_last_part_fails_leaves_failed_what_had_been_restored(tmp_path: Path) -> None:
    job = Job.build()
    with swapckpt.Checkpointer(tmp_path, {**job.states, "zz": Unrestorable()}, ASYNC) as checkpointer:
        checkpointer.save(1).wait()
        with pytest.raises(CheckpointError, match=r"states\['zz'\] failed: ValueError: no"):
            checkpointer.load()
        with pytest.raises(StateFailedError):
            job.optimizer.step()


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


@pytest.mark.parametrize("mode", ["async", "disabled"])
def test_a_second_thread_is_refused_while_one_is_inside(tmp_path: Path, mode: str) -> None:
    """It would take the plan of the first, and fail in ways that nobody understands."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow:
        def state_dict(self) -> dict[str, object]:
            inside.set()
            assert go_on.wait(20)
            return {"n": 1}

        def load_state_dict(self, state_dict: dict[str, object]) -> None:
            assert state_dict == {"n": 1}

    config = swapckpt.CheckpointConfig(async_mode=mode)
    with swapckpt.Checkpointer(tmp_path, {"slow": Slow()}, config) as checkpointer:
        first = threading.Thread(target=lambda: checkpointer.save(1))
        first.start()
        assert inside.wait(20)
        for call in (lambda: checkpointer.save(2), checkpointer.load):
            with pytest.raises(PhaseError, match=r"another thread is inside save\(\) or load\(\)"):
                call()
        go_on.set()
        first.join()
        checkpointer.save(3).result()
        assert checkpointer.steps() == [1, 3]
        assert checkpointer.load() == 3


def test_a_handle_says_how_far_its_save_is(tmp_path: Path) -> None:
    gate = Gate("append")
    with hooked(gate), swapckpt.Checkpointer(tmp_path, Job.build().states, ASYNC) as checkpointer:
        with gate.closed():
            handle = checkpointer.save(1)
            assert repr(handle) == "SaveHandle(step=1, under way)"
        handle.result()
        assert repr(handle) == "SaveHandle(step=1, committed)"
    checkpointer, handle = failing_save(tmp_path / "full")
    with pytest.raises(StorageError), checkpointer:
        handle.wait()
    assert repr(handle) == "SaveHandle(step=1, failed: StorageError)"
