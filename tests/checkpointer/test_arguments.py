"""Steps, states and folders that are wrong are refused, with what to do."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import swapckpt
from swapckpt.errors import CheckpointExistsError, CheckpointNotFoundError, ConfigError, StorageError
from tests.checkpointer.jobs import ASYNC, SYNC, Job, differing, history, saved

if TYPE_CHECKING:
    from pathlib import Path

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
