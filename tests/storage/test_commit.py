"""A checkpoint is visible if and only if it is complete and durable: C15. Crashes: test_crashes.py."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import torch

from swapckpt.errors import CheckpointExistsError, CheckpointNotFoundError, StorageError
from swapckpt.storage import commit
from swapckpt.storage.catalog import CheckpointState, committed_steps, list_checkpoints, prune
from swapckpt.storage.files import Files, open_files, read_bytes
from swapckpt.storage.manifest import FileSums
from swapckpt.storage.posix import PosixFiles
from tests.storage.stores import HookedFiles, save, stock_load, uniform, value_of

if TYPE_CHECKING:
    from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")


def stock_value_of(path: Path) -> float:
    return value_of(path, loader=stock_load)


# -------------------------------------------------------------------------------------- names


def test_no_search_for_steps_finds_an_attempt_or_what_it_replaced() -> None:
    for name in ("step-100", "step100", "step_7", "checkpoint-3", "global_step5", "iter_0000010"):
        for kind in ("new", "old"):
            folder = commit.aside(name, "0" * 32, kind=kind)
            assert not re.search(r"(step|checkpoint|iter|epoch)", folder)
            assert not re.search(r"\d+$", folder)


@pytest.mark.parametrize(
    ("name", "step"), [("step-5", 5), ("step-0", 0), ("last", None), ("my-step-5", None)]
)
def test_steps_are_known_by_their_name(name: str, step: int | None) -> None:
    assert commit.step_of(name) == step


# -------------------------------------------------------------------------------------- overwriting


def test_a_reader_finds_the_old_checkpoint_between_the_two_renames(tmp_path: Path) -> None:
    save(uniform(1.0), tmp_path / "step-1")
    renames = 0

    def before(_number: int, operation: str, _path: str) -> None:
        nonlocal renames
        renames += operation == "rename"
        if renames == 2:
            assert not (tmp_path / "step-1").exists()
            assert value_of(tmp_path / "step-1") == 1.0
            assert committed_steps(PosixFiles(tmp_path)) == [1]
            (info,) = [info for info in list_checkpoints(PosixFiles(tmp_path)) if not info.problem]
            assert (info.name, info.state) == ("step-1", CheckpointState.COMPLETE)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(
            uniform(2.0), tmp_path / "step-1", overwrite=True, files=HookedFiles(PosixFiles(tmp_path), before)
        )
    assert renames == 3  # and it was renamed back
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert value_of(tmp_path / "step-1") == 1.0


def test_a_writer_gives_the_old_checkpoint_its_name_back(tmp_path: Path) -> None:
    save(uniform(1.0), tmp_path / "step-1")
    (tmp_path / "step-1").rename(tmp_path / commit.aside("step-1", "a" * 32, kind="old"))
    with pytest.raises(CheckpointExistsError):
        save(uniform(2.0), tmp_path / "step-1")
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert stock_value_of(tmp_path / "step-1") == 1.0


def test_a_folder_that_stock_began_meanwhile_does_not_hide_the_old_checkpoint(tmp_path: Path) -> None:
    save(uniform(1.0), tmp_path / "step-1")
    (tmp_path / "step-1").rename(tmp_path / commit.aside("step-1", "a" * 32, kind="old"))
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "__0_0.distcp").write_bytes(b"begun")
    assert value_of(tmp_path / "step-1") == 1.0
    save(uniform(2.0), tmp_path / "step-1", overwrite=True)
    assert value_of(tmp_path / "step-1") == 2.0


def test_a_removal_that_is_cut_short_leaves_an_incomplete_checkpoint_not_a_corrupt_one(
    tmp_path: Path,
) -> None:
    save(uniform(1.0), tmp_path / "step-1")
    removals = 0

    def before(_number: int, operation: str, _path: str) -> None:
        nonlocal removals
        removals += operation == "remove"
        if removals == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        commit.discard(HookedFiles(PosixFiles(tmp_path), before), "step-1")
    (info,) = list_checkpoints(PosixFiles(tmp_path))
    assert info.state is CheckpointState.INCOMPLETE


# -------------------------------------------------------------------------------------- every store: C15


@pytest.fixture
def files(store_url: str) -> Files:
    return open_files(store_url)


def test_a_checkpoint_is_committed_replaced_and_listed_on_every_store(
    store_url: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sync", lambda: pytest.fail("os.sync() stops every process of the machine"))
    save(uniform(1.0), f"{store_url}/step-1")
    save(uniform(2.0), f"{store_url}/step-2")
    assert [value_of(f"{store_url}/step-{step}") for step in (1, 2)] == [1.0, 2.0]
    with pytest.raises(CheckpointExistsError):
        save(uniform(9.0), f"{store_url}/step-2")
    save(uniform(3.0), f"{store_url}/step-2", overwrite=True)
    assert value_of(f"{store_url}/step-2") == 3.0
    assert committed_steps(files) == [1, 2]
    assert [(info.name, info.state, info.world_size) for info in list_checkpoints(files)] == [
        ("step-1", CheckpointState.COMPLETE, 1),
        ("step-2", CheckpointState.COMPLETE, 1),
    ]
    assert len(files.entries("step-2")) == 3  # what was replaced is gone


@pytest.mark.parametrize("overwrite", [False, True], ids=["new step", "same step"])
def test_a_failure_at_any_call_leaves_nothing_visible_and_nothing_after_prune(
    store_url: str, files: Files, overwrite: bool
) -> None:
    save(uniform(1.0), f"{store_url}/step-1")
    name = "step-1" if overwrite else "step-2"
    committed, number = False, 0
    while not committed:

        def before(current: int, _operation: str, _path: str, number: int = number) -> None:
            if current == number:
                raise StorageError("the network is down")

        hooked = HookedFiles(files, before)
        try:
            save(uniform(2.0), f"{store_url}/{name}", files=hooked, overwrite=overwrite)
        except StorageError as error:
            said = str(error)
        else:
            break
        try:
            found = value_of(f"{store_url}/{name}")
        except CheckpointNotFoundError:
            assert not overwrite
            found = 0.0
        committed = found == 2.0  # it failed behind the commit: while that was read back, or synced
        assert found in {0.0, 1.0, 2.0}
        assert not files.renames or committed == ("complete and visible" in said)
        number += 1
    assert number > 10
    assert value_of(f"{store_url}/step-1") == (2.0 if overwrite else 1.0)
    prune(files, min_age_secs=-1, dry_run=False)
    assert {entry.name for entry in files.entries("")} == {"step-1", name}
    assert len(files.entries(name)) == 3
    assert files.uploads("") == []


def test_folders_with_other_files_are_not_replaced(store_url: str, files: Files) -> None:
    files.make_folder("step-1")
    files.put("step-1/notes.txt", b"mine")
    with pytest.raises(CheckpointExistsError, match=r"not of a checkpoint.*\n  - notes\.txt"):
        save(uniform(1.0), f"{store_url}/step-1", overwrite=True)
    assert read_bytes(files, "step-1/notes.txt") == b"mine"
    prune(files, min_age_secs=-1, dry_run=False)
    assert read_bytes(files, "step-1/notes.txt") == b"mine"


def test_what_an_unfinished_save_of_stock_left_is_replaced(store_url: str, files: Files) -> None:
    files.make_folder("step-1")
    files.put("step-1/__0_0.distcp", b"half")
    files.put("step-1/.metadata.tmp", b"half")
    (info,) = list_checkpoints(files)
    assert (info.state, info.problem) == (CheckpointState.INCOMPLETE, "a save that did not finish")
    save(uniform(1.0), f"{store_url}/step-1")
    assert value_of(f"{store_url}/step-1") == 1.0
    assert len(files.entries("step-1")) == 3


# -------------------------------------------------------------------------------------- two jobs


def both(files: Files, *, overwrite: bool) -> list[CheckpointExistsError | StorageError | None]:
    """Two jobs begin the same checkpoint, and commit one after the other."""
    attempts = [commit.begin(files, "step-1", overwrite=overwrite) for _ in range(2)]
    outcomes: list[CheckpointExistsError | StorageError | None] = []
    for attempt in attempts:
        name = attempt.data_file(0, 0)
        files.put(f"{attempt.folder}/{name}", b"data")
        try:
            data = [FileSums(name, 4, "")]
            commit.commit(files, attempt, attempt.id.encode(), data=data, world_size=1)
        except StorageError as error:
            outcomes.append(error)
        else:
            outcomes.append(None)
    assert read_bytes(files, "step-1/.metadata") in {attempt.id.encode() for attempt in attempts}
    return outcomes


def test_of_two_jobs_on_s3_the_first_commit_wins(s3_bucket: str) -> None:
    files = open_files(f"{s3_bucket}/two-jobs")
    first, second = both(files, overwrite=False)
    assert first is None
    assert isinstance(second, CheckpointExistsError)
    assert "another job" in str(second)
    assert len(files.entries("step-1")) == 3
    first, second = both(files, overwrite=True)
    assert first is None
    assert isinstance(second, StorageError)
    assert len(files.entries("step-1")) == 3


def put_in_place(what: str, root: Path) -> None:
    """What a job finds under the name that it saves to."""
    if what == "a checkpoint":
        save(uniform(1.0), root / "step-1")
    elif what == "a remainder":
        (root / "step-1").mkdir(parents=True)
        (root / "step-1/__0_0.distcp").write_bytes(b"half")


@pytest.mark.parametrize("what", ["nothing", "a remainder", "a checkpoint"])
def test_of_two_jobs_in_a_file_system_the_first_commit_wins(tmp_path: Path, what: str) -> None:
    """Also where both replace the same, which only the first has seen."""
    files = PosixFiles(tmp_path)
    put_in_place(what, tmp_path)
    first, second = both(files, overwrite=what == "a checkpoint")
    assert first is None
    assert isinstance(second, CheckpointExistsError)
    assert "another job" in str(second)
    assert [entry.name for entry in files.entries("")] == ["step-1"]
    assert len(files.entries("step-1")) == 3


def test_a_job_replaces_what_another_committed_before_it_began(tmp_path: Path) -> None:
    save(uniform(1.0), tmp_path / "step-1", overwrite=True)
    save(uniform(2.0), tmp_path / "step-1", overwrite=True)
    assert value_of(tmp_path / "step-1") == 2.0


@pytest.mark.parametrize("what", ["nothing", "a remainder", "a checkpoint"])
def test_another_job_may_commit_at_any_call_of_a_commit(tmp_path: Path, what: str) -> None:
    """Exactly one of the two believes that it did, and that one's values are there."""
    outcomes, number, overwrite = [], 0, what == "a checkpoint"
    while True:
        root = tmp_path / str(number)
        files = PosixFiles(root)
        put_in_place(what, root)
        others: list[bool] = []

        def before(
            current: int,
            _operation: str,
            _path: str,
            number: int = number,
            root: Path = root,
            others: list[bool] = others,
        ) -> None:
            if current == number:
                others.append(False)
                with suppress(CheckpointExistsError):
                    save(uniform(2.0), root / "step-1", overwrite=overwrite)
                    others[0] = True

        hooked = HookedFiles(files, before)
        try:
            save(uniform(3.0), root / "step-1", files=hooked, overwrite=overwrite)
        except CheckpointExistsError:
            is_first = False
        else:
            is_first = True
        if not others:
            break
        outcomes.append((is_first, others[0]))
        assert value_of(root / "step-1") in ({3.0} if is_first else {2.0}) | ({2.0} if others[0] else set())
        save(uniform(4.0), root / "step-1", overwrite=True)
        prune(files, min_age_secs=-1, dry_run=False)
        assert [entry.name for entry in files.entries("")] == ["step-1"]
        number += 1
    assert number > 10
    # Another one that comes before the begin or after the commit is refused, unless it may overwrite.
    assert {*outcomes} == {(False, True), (True, overwrite)}
    first = outcomes.index((False, True))  # from here on ours has begun, and until it has committed it loses
    lost = outcomes.count((False, True))
    assert outcomes[first : first + lost] == [(False, True)] * lost


def test_a_put_that_does_not_arrive_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    files = open_files("memory://lossy")
    put = files.put
    monkeypatch.setattr(
        files, "put", lambda path, data: put(path, data[: -1 if ".metadata" in path else None])
    )
    with pytest.raises(StorageError, match="does not hold what was just written"):
        save(uniform(1.0), "memory://lossy/step-1", files=files)


def upload_and_die(url: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)  # the fork server was started before the store

    def before(_number: int, operation: str, _path: str) -> None:
        if operation == "close":
            os.kill(os.getpid(), signal.SIGKILL)

    tensors = {"w": torch.ones(5 << 20)}  # 20 MB, in parts
    parent = url.rpartition("/")[0]
    save(tensors, url, files=HookedFiles(open_files(parent), before))


def test_a_killed_upload_is_found_and_aborted(s3_bucket: str) -> None:
    root = f"{s3_bucket}/killed"
    save(uniform(1.0), f"{root}/step-1")
    process = _CONTEXT.Process(target=upload_and_die, args=(f"{root}/step-2", dict(os.environ)))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    files = open_files(root)
    (upload,) = files.uploads("")
    assert upload.name.startswith("step-2/__0_0.")
    assert committed_steps(files) == [1]
    planned = prune(files, min_age_secs=-1)
    assert [removal.path for removal in planned if removal.is_upload] == [upload.name]
    assert files.uploads("")
    prune(files, min_age_secs=-1, dry_run=False)
    assert files.uploads("") == []
    assert value_of(f"{root}/step-1") == 1.0
