"""Listing, verifying and pruning a folder of checkpoints."""

from __future__ import annotations

import os
import pickle
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from swapckpt.errors import CheckpointNotFoundError, UnsafePickleError
from swapckpt.storage import commit
from swapckpt.storage.catalog import CheckpointState, committed_steps, list_checkpoints, prune
from swapckpt.storage.files import Files, open_files
from swapckpt.storage.posix import PosixFiles
from swapckpt.storage.verification import verify
from tests.storage.stores import HookedFiles, save, stock_save

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

HOUR_SECS = 3600.0


def state() -> dict[str, Any]:
    return {"w": torch.arange(50_000.0), "small": torch.ones(3), "h": torch.zeros(0, 2), "lr": {"rate": 0.1}}


@pytest.fixture
def files(tmp_path: Path) -> PosixFiles:
    return PosixFiles(tmp_path)


def make_old(paths: Iterable[Path], *, age_secs: float = 2 * HOUR_SECS) -> None:
    for path in paths:
        then = time.time() - age_secs
        for each in [path, *path.rglob("*")]:
            os.utime(each, (then, then))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


# -------------------------------------------------------------------------------------- listing


def test_every_state_is_listed_with_its_reason(tmp_path: Path, files: PosixFiles) -> None:
    for step in (10, 9, 1, 2):
        save(state(), tmp_path / f"step-{step}")
    stock_save(state(), tmp_path / "step-3")
    save(state(), tmp_path / "last")
    os.truncate(tmp_path / "step-2" / "__0_0.distcp", 100)
    (tmp_path / "step-9" / ".metadata").unlink()
    (tmp_path / "step-10").rename(tmp_path / commit.aside("step-10", "a" * 32, kind="old"))
    (tmp_path / commit.aside("step-4", "b" * 32, kind="new")).mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "run.txt").write_text("other things")
    (tmp_path / "readme.txt").write_text("other things")
    found = [
        (info.name, info.state.value, info.problem.partition(":")[0][:30]) for info in list_checkpoints(files)
    ]
    assert found == [
        ("step-1", "complete", ""),
        ("step-2", "corrupt", f"{tmp_path}/step-2/ has damaged data files"[:30]),
        ("step-3", "complete", ""),
        ("step-4", "incomplete", "a save that did not finish"),
        ("step-9", "incomplete", "has no .metadata"),
        ("step-10", "complete", ""),
        ("last", "complete", ""),
    ]
    by_name = {info.name: info for info in list_checkpoints(files)}
    assert by_name["step-1"].nbytes == sum(path.stat().st_size for path in (tmp_path / "step-1").iterdir())
    assert abs((by_name["step-1"].modified_secs or 0) - time.time()) < HOUR_SECS
    assert (by_name["step-1"].world_size, by_name["step-3"].world_size) == (1, None)
    assert "__0_0.distcp: 100 bytes, " in by_name["step-2"].problem
    assert committed_steps(files) == [1, 2, 3, 10]


def test_what_is_removed_while_it_is_listed_is_not_listed(tmp_path: Path) -> None:
    for step in (1, 2):
        save(state(), tmp_path / f"step-{step}")

    def remove(_: int, operation: str, path: str) -> None:
        if (operation, path) == ("open", "step-1/.metadata"):  # a removal begins with it
            (tmp_path / path).unlink()

    listed = list_checkpoints(HookedFiles(PosixFiles(tmp_path), remove))
    assert [(info.step, info.state) for info in listed] == [(2, CheckpointState.COMPLETE)]


def test_nothing_is_listed_where_nothing_is(tmp_path: Path) -> None:
    assert list_checkpoints(PosixFiles(tmp_path / "none")) == []
    assert committed_steps(PosixFiles(tmp_path / "none")) == []
    assert list_checkpoints(open_files("memory://none")) == []


def test_a_checkpoint_with_code_is_listed_as_corrupt_and_not_run(tmp_path: Path, files: PosixFiles) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "created"),)

    stock_save(state(), tmp_path / "step-1")
    metadata = pickle.loads((tmp_path / "step-1" / ".metadata").read_bytes())
    metadata.planner_data = Evil()
    (tmp_path / "step-1" / ".metadata").write_bytes(pickle.dumps(metadata))
    (info,) = list_checkpoints(files)
    assert info.state is CheckpointState.CORRUPT
    assert "mkdir" in info.problem
    with pytest.raises(UnsafePickleError):
        verify(files, "step-1")
    assert not (tmp_path / "created").exists()


# -------------------------------------------------------------------------------------- verification


@pytest.mark.parametrize("saver", [save, stock_save])
def test_a_sound_checkpoint_has_no_problems(tmp_path: Path, files: PosixFiles, saver: Any) -> None:
    saver(state(), tmp_path / "step-1")
    read: list[int] = []
    assert verify(files, "step-1", on_progress=read.append) == []
    metadata = pickle.loads((tmp_path / "step-1" / ".metadata").read_bytes())
    assert sum(read) == sum(place.length for place in metadata.storage_data.values())


def test_every_flipped_byte_of_a_data_file_is_found(tmp_path: Path, files: PosixFiles) -> None:
    save({"w": torch.ones(20), "lr": {"rate": 0.1}}, tmp_path / "step-1")
    file = tmp_path / "step-1" / "__0_0.distcp"
    metadata = pickle.loads((tmp_path / "step-1" / ".metadata").read_bytes())
    items = {
        (place.offset, place.offset + place.length): index.fqn
        for index, place in metadata.storage_data.items()
    }
    original = file.read_bytes()
    for at in range(0, len(original), 7):
        flip(file, at)
        problems = verify(files, "step-1")
        hit = [fqn for (start, end), fqn in items.items() if start <= at < end]  # else padding
        assert [(problem.file, problem.fqn) for problem in problems] == [("__0_0.distcp", fqn) for fqn in hit]
        file.write_bytes(original)


@pytest.mark.parametrize("fqn", ["w", "small", "lr.rate"])
def test_damaged_elements_of_stock_s_checkpoints_are_found(
    tmp_path: Path, files: PosixFiles, fqn: str
) -> None:
    stock_save(state(), tmp_path / "step-1")
    metadata = pickle.loads((tmp_path / "step-1" / ".metadata").read_bytes())
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == fqn)
    flip(tmp_path / "step-1" / "__0_0.distcp", place.offset + (66 if fqn == "lr.rate" else 705))
    assert [(problem.file, problem.fqn) for problem in verify(files, "step-1")] == [("__0_0.distcp", fqn)]


def test_what_is_missing_is_found(tmp_path: Path, files: PosixFiles) -> None:
    stock_save(state(), tmp_path / "step-1")
    metadata = pickle.loads((tmp_path / "step-1" / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].size = torch.Size([60_000])
    gone = [index for index in metadata.storage_data if index.fqn in {"small", "lr.rate"}]
    for index in gone:
        del metadata.storage_data[index]
    (tmp_path / "step-1" / ".metadata").write_bytes(pickle.dumps(metadata))
    assert {(problem.fqn, problem.message) for problem in verify(files, "step-1")} == {
        ("w", "has chunks of 50000 elements, its size has 60000"),
        ("small", "has chunks that are placed in no file"),
        ("lr.rate", "is placed in no file"),
    }
    with pytest.raises(CheckpointNotFoundError):
        verify(files, "step-2")


def test_a_file_that_is_removed_while_it_is_verified_is_a_problem(tmp_path: Path) -> None:
    save(state(), tmp_path / "step-1")

    def remove(_: int, operation: str, path: str) -> None:
        if (operation, path) == ("open", "step-1/__0_0.distcp"):
            (tmp_path / path).unlink()

    (problem,) = verify(HookedFiles(PosixFiles(tmp_path), remove), "step-1")
    assert problem.file == "__0_0.distcp"
    assert "has lost a file while it was read" in problem.message


@pytest.mark.parametrize("saver", [save, stock_save])
def test_every_item_that_a_truncated_file_has_lost_is_found(
    tmp_path: Path, files: PosixFiles, saver: Any
) -> None:
    saver(state(), tmp_path / "step-1")
    metadata = pickle.loads((tmp_path / "step-1" / ".metadata").read_bytes())
    ends = {index.fqn: place.offset + place.length for index, place in metadata.storage_data.items()}
    keep = min(ends.values())
    os.truncate(tmp_path / "step-1" / "__0_0.distcp", keep)
    of_file, *of_items = verify(files, "step-1")
    assert (of_file.file, of_file.fqn) == ("__0_0.distcp", "")
    assert of_file.message.startswith(f"{keep} bytes, ")
    assert {problem.fqn for problem in of_items} == {fqn for fqn, end in ends.items() if end > keep}
    assert {problem.file for problem in of_items} == {"__0_0.distcp"}
    (tmp_path / "step-1" / "__0_0.distcp").unlink()
    of_file, *of_items = verify(files, "step-1")
    assert of_file.message == "missing"
    assert {(problem.file, problem.fqn) for problem in of_items} == {("__0_0.distcp", fqn) for fqn in ends}


# -------------------------------------------------------------------------------------- retention: C14


def names(files: Files) -> list[str]:
    return [entry.name for entry in files.entries("")]


def test_old_steps_are_removed_and_the_newest_stay(tmp_path: Path, files: PosixFiles) -> None:
    for step in (1, 2, 5, 10, 11):
        save(state(), tmp_path / f"step-{step}")
    save(state(), tmp_path / "last")
    planned = prune(files, keep_latest=2, keep_every=5)
    assert [removal.path for removal in planned] == ["step-1", "step-2"]
    assert len(names(files)) == 6  # a dry run by default
    assert prune(files, keep_latest=2, keep_every=5, dry_run=False) == planned
    assert names(files) == ["last", "step-10", "step-11", "step-5"]
    prune(files, keep_latest=1, dry_run=False)
    assert names(files) == ["last", "step-11"]
    for wrong in ({"keep_latest": 0}, {"keep_every": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            prune(files, **wrong)


def test_only_complete_checkpoints_count_as_kept(tmp_path: Path, files: PosixFiles) -> None:
    for step in (1, 2, 3, 4):
        save(state(), tmp_path / f"step-{step}")
    os.truncate(tmp_path / "step-4" / "__0_0.distcp", 100)
    (tmp_path / "step-3" / ".metadata").unlink()
    prune(files, keep_latest=1, dry_run=False)
    assert names(files) == ["step-2", "step-3", "step-4"]  # not step-4 alone, which cannot be loaded


def test_a_save_that_may_be_going_on_is_left_alone(tmp_path: Path, files: PosixFiles) -> None:
    attempt = commit.begin(files, "step-1", overwrite=False)
    files.put(f"{attempt.folder}/__0_0.distcp", b"data")
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "__0_0.distcp").write_bytes(b"data")
    empty = commit.begin(files, "step-3", overwrite=False)
    assert prune(files, dry_run=False) == []
    make_old(tmp_path / name for name in names(files))
    assert {removal.path for removal in prune(files, dry_run=False)} == {
        attempt.folder,
        "step-2",
        empty.folder,
    }
    assert names(files) == []


def test_what_was_replaced_is_removed_or_gets_its_name_back(tmp_path: Path, files: PosixFiles) -> None:
    save(state(), tmp_path / "step-1")
    save(state(), tmp_path / "step-2")
    old = commit.aside("step-2", "a" * 32, kind="old")
    (tmp_path / "step-2").rename(tmp_path / old)
    save(state(), tmp_path / "step-3")
    (tmp_path / commit.aside("step-3", "b" * 32, kind="old")).mkdir()
    make_old(tmp_path / name for name in names(files))
    prune(files, dry_run=False)
    assert names(files) == ["step-1", "step-2", "step-3"]


def test_objects_of_other_attempts_are_removed_from_a_store(s3_bucket: str) -> None:
    url = f"{s3_bucket}/attempts"
    files = open_files(url)
    save(state(), f"{url}/step-1")
    dead = f"__0_0.{'c' * 32}.distcp"
    files.put(f"step-1/{dead}", b"dead")
    files.put(f"step-2/{dead}", b"dead")
    probe = f".swapckpt-probe-{'d' * 32}"
    files.put(probe, b"1")
    assert prune(files) == []
    planned = prune(files, min_age_secs=-1, dry_run=False)
    assert {removal.path for removal in planned} == {f"step-1/{dead}", "step-2", probe}
    assert names(files) == ["step-1"]
    assert len(files.entries("step-1")) == 3
