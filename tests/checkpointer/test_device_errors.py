"""A device that fails: below a mounted file system whose calls end with EIO, in the trainer and in the
process that writes. Saves fail as a whole, loads name the file, and both go on afterwards."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import swapckpt
from swapckpt.errors import CorruptCheckpointError, StorageError
from swapckpt.storage import open_files
from swapckpt.storage.verification import verify
from tests.checkpointer.jobs import ASYNC, Job, differing, history, loaded, saved
from tests.storage.faultfs import SHORT, MountError, mounted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.storage.faultfs import FaultFolder

WRITES = [
    ("mkdir", ".new"),
    ("fsync", "/"),  # before anything is written
    ("create", ".distcp"),
    ("write", ".distcp"),
    ("fsync", ".distcp"),
    ("write", ".swapckpt.json"),
    ("fsync", ".swapckpt.json"),
    ("write", ".metadata"),
    ("fsync", ".metadata"),
    ("fsync", ".new"),
    ("rename", "/step-2"),
]
OF_PROCESS = [each for each in WRITES if each[1] == ".distcp"]
PINNED = replace(ASYNC, async_mode="async_with_pinned_mem")
READS = [
    ("open", "__0_0.distcp"),
    *(("read", name) for name in ("__0_0.distcp", ".metadata", ".swapckpt.json")),
]


@pytest.fixture
def device(tmp_path: Path) -> Iterator[FaultFolder]:
    try:
        with mounted(tmp_path) as folder:
            yield folder
    except MountError as error:
        pytest.skip(f"a file system of our own needs privileges: {error}")


@pytest.mark.parametrize(
    ("mode", "writes"), [(ASYNC, WRITES), (PINNED, OF_PROCESS)], ids=["thread", "process"]
)
def test_a_save_that_meets_eio_leaves_what_was_there_and_the_next_succeeds(
    device: FaultFolder, mode: swapckpt.CheckpointConfig, writes: list[tuple[str, str]]
) -> None:
    job, reference = Job.build(), history()
    with swapckpt.Checkpointer(device.path, job.states, mode) as checkpointer:
        job.step(1)
        checkpointer.save(1).wait()
        job.step(2)
        for operation, suffix in writes:
            with device.failing(operation, suffix), pytest.raises(StorageError) as caught:
                checkpointer.save(2).wait()
            assert "Input/output error" in str(caught.value)
            assert str(device.path) in str(caught.value)
            assert [path.name for path in device.path.iterdir()] == ["step-1"], (operation, suffix)
        with device.failing("write", ".distcp", errno.ENOSPC), pytest.raises(StorageError, match="No space"):
            checkpointer.save(2).wait()
        assert not differing(loaded(device.path)[1].contents(), reference[1])
        with device.failing("write", ".distcp", SHORT):  # which is no error
            checkpointer.save(2).wait()
    step, again = loaded(device.path)
    assert step == 2
    assert not differing(again.contents(), reference[2])


def test_what_cannot_be_removed_fails_no_save(device: FaultFolder, caplog: pytest.LogCaptureFixture) -> None:
    job = Job.build()
    with swapckpt.Checkpointer(device.path, job.states, replace(ASYNC, keep_latest=1)) as checkpointer:
        checkpointer.save(1).wait()
        with device.failing("remove", "/step-1/.metadata"):
            checkpointer.save(2).wait()
        assert "step-1" in caplog.text
        assert checkpointer.steps() == [1, 2]
        checkpointer.save(3).wait()
        assert checkpointer.steps() == [3]


def test_what_the_device_does_not_give_back_is_damage(
    device: FaultFolder, caplog: pytest.LogCaptureFixture
) -> None:
    saved(device.path, 1, 2)
    job, reference = Job.build(), history()
    with swapckpt.Checkpointer(device.path, job.states, ASYNC) as checkpointer:
        for operation, name in READS:
            caplog.clear()
            with device.failing(operation, f"/step-2/{name}"):
                with pytest.raises(
                    CorruptCheckpointError, match=f"step-2/{name} cannot be read: Input/output"
                ):
                    checkpointer.load()
                assert [each for each in verify(open_files(device.path), "step-2") if name in str(each)]
                assert checkpointer.load(fallback=True) == 1
            assert "Step 2 is damaged, step 1 is loaded" in caplog.text
            assert not differing(job.contents(), reference[1])
            job.step(2)
            with device.failing(operation, name):  # under whatever name its folder gets
                checkpointer.save(2).wait()  # in place of the one that is lost
            assert checkpointer.load() == 2
            assert not differing(job.contents(), reference[2])


def test_other_errors_of_reads_are_of_the_store(device: FaultFolder) -> None:
    """Not the checkpoint is damaged: the next older one would not be better."""
    saved(device.path, 1, 2)
    with (
        device.failing("read", "/step-2/.metadata", errno.EACCES),
        pytest.raises(StorageError, match="denied"),
    ):
        loaded(device.path, fallback=True)
