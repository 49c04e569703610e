"""A load that began to read and did not finish, in one process: who knows, who refuses, what ends it."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException

import swapckpt
from swapckpt.errors import SchemaError, StateFailedError, StepError, TransferTimeoutError
from tests.core.devices import FailingDevice
from tests.faults.matrix import NEW, OLD
from tests.faults.ranks import Training
from tests.manager.training import CONFIG

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def training(root: Path) -> Training:
    training = Training.build()
    training.load(root / f"step-{OLD}")
    return training


@pytest.fixture
def truncated(root: Path, tmp_path: Path) -> Path:
    """The newer checkpoint; a file of it has lost its second half."""
    for file in (root / f"step-{NEW}").iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(
            content[: len(content) // 2] if file.name == "__1_0.distcp" else content
        )
    return tmp_path


def refuses(training: Training) -> bool:
    try:
        training.manager.state_dict()
    except StateFailedError as error:
        return "did not finish" in str(error)
    return False


def test_without_the_manager_named_nobody_knows(root: Path, training: Training, truncated: Path) -> None:
    """As docs/checkpoints.md says of a plain ``dcp.load``: it reads in place, and nothing refuses."""
    for planner in (DefaultLoadPlanner(), swapckpt.StrictLoadPlanner()):
        with pytest.raises(CheckpointException):
            dcp.load({"optimizer": training.manager}, checkpoint_id=truncated, planner=planner)
        assert not refuses(training)
        assert not any(training.is_at(root, step) for step in (OLD, NEW))


def test_with_the_manager_named_everything_refuses(root: Path, training: Training, truncated: Path) -> None:
    with pytest.raises(CheckpointException):
        training.load(truncated)
    with pytest.raises(StateFailedError, match="Cannot step"):
        training.step(NEW)
    with pytest.raises(StateFailedError, match="Cannot export state"):
        training.load(root / f"step-{OLD}")  # not outside of recovery(): parameters may be torn too
    with pytest.raises(StateFailedError, match="Cannot load a state dict"):
        training.manager.load_state_dict({})
    with training.manager.recovery():
        training.load(root / f"step-{OLD}")
    assert training.is_at(root, OLD)
    training.step(NEW)


def test_a_recovery_that_fails_too_stays_failed(root: Path, training: Training, truncated: Path) -> None:
    with pytest.raises(CheckpointException):
        training.load(truncated)
    with pytest.raises(CheckpointException), training.manager.recovery():
        training.load(truncated)
    assert refuses(training)
    with training.manager.recovery():
        training.load(root / f"step-{NEW}")
    assert training.is_at(root, NEW)


def test_leaving_recovery_after_half_a_load_stays_failed(training: Training, truncated: Path) -> None:
    """The error is caught inside the block: the block ends normally, and nothing was loaded."""
    with training.manager.recovery(), pytest.raises(CheckpointException):
        training.load(truncated)
    assert refuses(training)


def test_what_was_read_and_does_not_fit_stays_failed(root: Path, training: Training) -> None:
    """The reader is done, ``load_state_dict`` refuses: the mirrors hold another state than before."""
    exported = training.manager.state_dict()
    dcp.load(
        {"optimizer": exported},
        checkpoint_id=root / f"step-{NEW}",
        planner=swapckpt.StrictLoadPlanner(training.manager),
    )
    with pytest.raises(SchemaError):
        training.manager.load_state_dict({**exported, "state": {}})
    assert refuses(training)


def test_a_failed_state_is_not_read_into(root: Path, training: Training, truncated: Path) -> None:
    """Neither by a load whose destinations were handed out before the failure."""
    exported = training.manager.state_dict()
    with pytest.raises(CheckpointException):
        training.load(truncated)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(
            {"optimizer": exported},
            checkpoint_id=root / f"step-{NEW}",
            planner=swapckpt.StrictLoadPlanner(training.manager),
        )
    assert isinstance(caught.value.failures[0][0], StateFailedError)


def test_a_plan_that_fails_leaves_the_state_ready(root: Path, training: Training, tmp_path: Path) -> None:
    dcp.save({"optimizer": {"state": {}}}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointException):
        training.load(tmp_path)
    assert training.is_at(root, OLD)
    assert not refuses(training)


def test_several_managers_are_told_each(root: Path, training: Training, truncated: Path) -> None:
    other = Training.build()
    planner = swapckpt.StrictLoadPlanner(training.manager, other.manager)
    with pytest.raises(CheckpointException):
        dcp.load({"optimizer": training.manager}, checkpoint_id=truncated, planner=planner)
    assert refuses(training)
    assert refuses(other)


def test_an_optimizer_that_is_not_swapped_has_no_phase(root: Path, truncated: Path) -> None:
    """As docs/checkpoints.md says: nothing stands between its step and its state."""
    plain = Training.build(None)
    plain.load(root / f"step-{OLD}")
    with pytest.raises(CheckpointException):
        plain.load(truncated)
    assert not refuses(plain)


def test_recovery_begins_when_no_copy_runs_any_more(root: Path) -> None:
    """DCP reads before it calls ``load_state_dict``: a late copy of the failed step must be over by then."""
    secs = 0.5  # enough for every copy that does not hang
    device = FailingDevice("thread", timeout_secs=secs)
    training = Training.build(replace(CONFIG, timeout_secs=secs), device=device)
    training.load(root / f"step-{OLD}")
    device.offload.copies_left, device.offload.resume = 1, threading.Event()
    with pytest.raises(StepError):
        training.step(NEW)
    entered = False
    with pytest.raises(TransferTimeoutError), training.manager.recovery():
        entered = True
    assert not entered
    device.offload.resume.set()
    with training.manager.recovery():
        training.load(root / f"step-{NEW}")
    assert training.is_at(root, NEW)
