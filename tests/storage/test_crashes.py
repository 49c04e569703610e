"""Whatever a save is doing when it ends, what was committed is there with its own values: C7, C8, C14.

The points at which it ends are not listed by hand: they are all calls that change the file system or the
store, counted while it runs.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
import uuid
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from swapckpt.errors import CheckpointNotFoundError, StorageError
from swapckpt.storage import datafile
from swapckpt.storage.catalog import CheckpointState, committed_steps, list_checkpoints, prune
from swapckpt.storage.files import Files, open_files
from swapckpt.storage.posix import PosixFiles
from tests.storage.powerloss import Frozen, PowerFailedError, VolatileFiles
from tests.storage.stores import HookedFiles, dying_at, save, stock_load, uniform, value_of
from tests.storage.victims import die_at_system_call, victims

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

OVERWRITE = pytest.mark.parametrize("overwrite", [False, True], ids=["new step", "same step"])


def check_what_is_left(files: Files, url: str, name: str, *, overwrite: bool) -> float:
    """Nothing but whole checkpoints and known remainders. Returns the value of ``name``, or 0."""
    if not overwrite:
        assert value_of(f"{url}/step-1", files=files) == 1.0
    try:
        found = value_of(f"{url}/{name}", files=files)
    except CheckpointNotFoundError:
        assert not overwrite  # what was committed stays readable
        found = 0.0
    listed = list_checkpoints(files)
    assert CheckpointState.CORRUPT not in {info.state for info in listed}
    complete = {info.name for info in listed if info.state is CheckpointState.COMPLETE}
    assert complete == ({"step-1", name} if found else {"step-1"})
    assert committed_steps(files) == sorted(int(each.removeprefix("step-")) for each in complete)
    if files.renames:  # a store shows no folder before its first object
        assert {info.folder for info in listed} == {entry.name for entry in files.entries("")}
    return found


def check_next_save_and_prune(files: Files, url: str, name: str) -> None:
    """The next save succeeds, and after a prune nothing is left of the broken one."""
    save(uniform(3.0), f"{url}/{name}", overwrite=True, files=files)
    prune(files, min_age_secs=-1, dry_run=False)
    assert {entry.name for entry in files.entries("")} == {"step-1", name}
    assert [len(files.entries(each)) for each in {"step-1", name}] == [3] * len({"step-1", name})
    assert files.uploads("") == []
    assert value_of(f"{url}/{name}", files=files) == 3.0


# -------------------------------------------------------------------------------------- SIGKILL: C8


def seen_by_trainers(root: Path) -> list[str]:
    """Folders that torchtitan takes for steps: an unanchored search, and metadata inside."""
    return [
        path.name
        for path in root.iterdir()
        if re.search(r"step-(\d+)", path.name) and (path / ".metadata").exists()
    ]


def save_and_die(root: str, name: str, overwrite: bool, number: int) -> None:
    die_at_system_call(number)
    save(uniform(2.0), f"{root}/{name}", overwrite=overwrite, files=PosixFiles(root, direct=False))


@OVERWRITE
def test_sigkill_at_every_change_of_the_file_system(tmp_path: Path, overwrite: bool) -> None:
    name, was_killed = ("step-1" if overwrite else "step-2"), True
    outcomes: list[float] = []
    with victims("swapckpt.storage") as run:
        while was_killed:
            root = tmp_path / str(len(outcomes))
            files = PosixFiles(root)
            save(uniform(1.0), root / "step-1")
            was_killed = run(save_and_die, str(root), name, overwrite, len(outcomes))
            outcomes.append(check_what_is_left(files, str(root), name, overwrite=overwrite))
            for folder in seen_by_trainers(root):
                expected = 1.0 if folder != name else outcomes[-1]
                assert value_of(root / folder, loader=stock_load) == expected
            check_next_save_and_prune(files, str(root), name)
    assert outcomes == sorted(outcomes)  # once visible, it stays
    assert {*outcomes} == {1.0 if overwrite else 0.0, 2.0}
    assert len(outcomes) > (20 if overwrite else 14)


def save_to_store_and_die(url: str, name: str, overwrite: bool, number: int) -> None:
    files = HookedFiles(open_files(url), dying_at(number))
    save(uniform(2.0), f"{url}/{name}", files=files, overwrite=overwrite)


@pytest.mark.slow
@OVERWRITE
def test_sigkill_at_every_call_to_an_object_store(s3_bucket: str, overwrite: bool) -> None:
    name, was_killed = ("step-1" if overwrite else "step-2"), True
    outcomes: list[float] = []
    with victims("swapckpt.storage", "s3fs") as run:
        while was_killed:
            url = f"{s3_bucket}/{uuid.uuid4().hex}"
            files = open_files(url)
            save(uniform(1.0), f"{url}/step-1", files=files)
            was_killed = run(save_to_store_and_die, url, name, overwrite, len(outcomes))
            outcomes.append(check_what_is_left(files, url, name, overwrite=overwrite))
            check_next_save_and_prune(files, url, name)
    assert outcomes == sorted(outcomes)
    assert {*outcomes} == {1.0 if overwrite else 0.0, 2.0}
    assert len(outcomes) > 12


# -------------------------------------------------------------------------------------- power failure: C8


def power_fails_in(volatile: VolatileFiles, number: int, job: Callable[[Any], object]) -> bool:
    """Run ``job`` on a store that stops at its n-th call; True when it did. What is done about the failure is
    done without power: only the state before counts."""

    def before(current: int, _operation: str, _path: str) -> None:
        if current == number:
            raise PowerFailedError

    try:
        job(Frozen(HookedFiles(volatile, before)))
    except PowerFailedError:
        return True
    return False


@OVERWRITE
def test_power_failure_at_every_call_of_a_save(overwrite: bool) -> None:
    name, number, outcomes, failed = ("step-1" if overwrite else "step-2"), 0, set(), True
    while failed:
        volatile = VolatileFiles()
        save(uniform(1.0), "/x/step-1", files=volatile)
        failed = power_fails_in(
            volatile,
            number,
            lambda files: save(uniform(2.0), f"/x/{name}", files=files, overwrite=overwrite),
        )
        for seed in range(6):
            left = volatile.survivors(seed)
            found = check_what_is_left(left, "/x", name, overwrite=overwrite)
            outcomes.add(found)
            assert failed or found == 2.0  # the save had returned: nothing may be lost
            check_next_save_and_prune(left, "/x", name)
        number += 1
    assert outcomes == ({1.0, 2.0} if overwrite else {0.0, 2.0})


def test_power_failure_at_every_call_of_a_prune() -> None:
    """The newest stays, and an older one is whole or gone."""
    number, outcomes, failed = 0, set(), True
    while failed:
        volatile = VolatileFiles()
        for step in (1, 2):
            save(uniform(float(step)), f"/x/step-{step}", files=volatile)
        failed = power_fails_in(volatile, number, lambda files: prune(files, keep_latest=1, dry_run=False))
        for seed in range(6):
            left = volatile.survivors(seed)
            assert value_of("/x/step-2", files=left) == 2.0
            outcomes |= {(info.name, info.state) for info in list_checkpoints(left)}
            assert all(
                value_of("/x/step-1", files=left) == 1.0 for step in committed_steps(left) if step == 1
            )
        number += 1
    assert {state for name, state in outcomes if name == "step-2"} == {CheckpointState.COMPLETE}
    assert {state for name, state in outcomes if name == "step-1"} == {
        CheckpointState.COMPLETE,
        CheckpointState.INCOMPLETE,
    }


# -------------------------------------------------------------------------------------- a full device: C7


@pytest.fixture
def small_device(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 4 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting needs privileges: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_device_that_fills_up_fails_the_save(
    small_device: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datafile, "FILE_NBYTES", 1 << 10)
    save(uniform(1.0), small_device / "step-1")
    tensors = {f"w{n}": torch.ones(100_000) for n in range(16)}  # 6.4 MB
    with pytest.raises(StorageError, match="No space left on device"):
        save(tensors, small_device / "step-2", threads=threads)
    assert value_of(small_device / "step-1") == 1.0
    assert [path.name for path in small_device.rglob("*") if path.is_file()] == [
        path.name for path in (small_device / "step-1").iterdir()
    ]
    save(uniform(2.0), small_device / "step-2", threads=threads)  # the space is free again
    assert value_of(small_device / "step-2") == 2.0


def fill_up_on_ranks(folder: str, threads: int) -> str:
    datafile.FILE_NBYTES = 1 << 10
    rank = dist.get_rank()
    # Rank 1 has more than there is room for, rank 0 next to nothing.
    tensors = {f"rank{rank}.w{n}": torch.ones(100_000 if rank else 10) for n in range(16)}
    with pytest.raises(StorageError) as caught:
        save(tensors, f"{folder}/step-2", threads=threads)
    return str(caught.value)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_device_that_fills_up_under_one_rank_is_an_error_on_all(
    run_ranks: Callable[..., list[Any]], small_device: Path, threads: int
) -> None:
    save(uniform(1.0), small_device / "step-1")
    errors = run_ranks(2, fill_up_on_ranks, str(small_device), threads)
    assert all("No space left on device" in error for error in errors)
    assert committed_steps(PosixFiles(small_device)) == [1]
    assert value_of(small_device / "step-1") == 1.0


# -------------------------------------------------------------------------------------- pruning: C14


@OVERWRITE
def test_pruning_while_a_save_goes_on_never_removes_the_newest(store_url: str, overwrite: bool) -> None:
    """At each call of a save, another process prunes. The save does not notice."""
    files = open_files(store_url)
    for step in (1, 2, 3):
        save(uniform(float(step)), f"{store_url}/step-{step}", files=files)
    name, operations = ("step-3" if overwrite else "step-4"), []

    def before(_number: int, operation: str, _path: str) -> None:
        operations.append(operation)
        prune(files, keep_latest=2, dry_run=False)
        assert value_of(f"{store_url}/step-3", files=files) in {3.0, 4.0}

    save(uniform(4.0), f"{store_url}/{name}", files=HookedFiles(files, before), overwrite=overwrite)
    assert value_of(f"{store_url}/{name}", files=files) == 4.0
    prune(files, keep_latest=2, dry_run=False)
    assert committed_steps(files) == ([2, 3] if overwrite else [3, 4])
    assert len(operations) > 10


def test_what_a_dead_overwrite_left_gets_its_name_back_in_time(tmp_path: Path) -> None:
    """Between the two renames a prune cannot tell a live save from a dead one, except by its age."""
    save(uniform(1.0), tmp_path / "step-1")
    renames = 0

    def before(_number: int, operation: str, _path: str) -> None:
        nonlocal renames
        renames += operation == "rename"
        if renames >= 2:
            raise PowerFailedError

    files = PosixFiles(tmp_path)
    with pytest.raises(PowerFailedError):
        save(uniform(2.0), tmp_path / "step-1", files=Frozen(HookedFiles(files, before)), overwrite=True)
    assert not (tmp_path / "step-1").exists()
    prune(files, dry_run=False)
    assert not (tmp_path / "step-1").exists()
    then = time.time() - 7200
    for path in tmp_path.rglob("*"):
        os.utime(path, (then, then))
    prune(files, dry_run=False)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert value_of(tmp_path / "step-1") == 1.0
