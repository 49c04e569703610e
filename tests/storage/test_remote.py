"""Files of an object store: conditions, unfinished uploads, and which errors are tried again."""

from __future__ import annotations

import errno
import time
from contextlib import ExitStack
from typing import Any, NoReturn

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from swapckpt.errors import StorageError
from swapckpt.storage.files import is_transient, open_files, read_bytes, retried
from swapckpt.storage.posix import BUFFER_NBYTES
from swapckpt.storage.remote import FsspecFiles
from tests.storage.content import aligned

# -------------------------------------------------------------------------------------- object stores


def remote(url: str) -> FsspecFiles:
    files = open_files(url)
    assert isinstance(files, FsspecFiles)
    return files


def test_s3_refuses_a_second_commit_by_itself(s3_bucket: str) -> None:
    files = remote(f"{s3_bucket}/conditional")
    assert files.is_conditional()
    assert files.entries("") == []  # the probe is gone
    files.put("m", b"1")
    version = files.version("m")
    assert version is not None
    files.swap("m", b"2", version=version)
    with pytest.raises(FileExistsError):
        files.swap("m", b"3", version=version)
    assert read_bytes(files, "m") == b"2"


def test_a_folder_does_not_list_itself(s3_bucket: str) -> None:
    files = remote(f"{s3_bucket}/marked")
    fsspec.filesystem("s3").touch("checkpoints/marked/")  # consoles make such an object for "a folder"
    files.put("m", b"1")
    assert [entry.name for entry in files.entries("")] == ["m"]
    assert files.entries("m") == []


def test_a_store_without_conditions_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    files = remote("memory://weak")
    files.put("m", b"1")
    files.put("n", b"1")
    files.swap("m", b"2", version=files.version("m"))
    assert read_bytes(files, "m") == b"2"
    assert [record.message for record in caplog.records].count(
        "memory://weak cannot refuse to overwrite an object: let only one job at a time save there."
    ) == 1


def test_a_store_that_knows_no_modes_gets_none() -> None:
    class Plain(MemoryFileSystem):
        def pipe_file(self, path: str, value: bytes) -> None:
            super().pipe_file(path, value)

    files = FsspecFiles(Plain(), "/plain", url="plain://plain")
    files.put("x", b"1")
    with pytest.raises(FileExistsError):
        files.put("x", b"2")
    assert read_bytes(files, "x") == b"1"


def test_a_condition_that_fails_without_a_message_is_one(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As s3fs translates the answer of Ceph, which also wants versions without their quotes."""
    files = remote(f"{s3_bucket}/silent")
    call, pipe = files._fs.call_s3, files._fs.pipe_file

    def refuse() -> NoReturn:
        cause = RuntimeError("An error occurred (PreconditionFailed) when calling PutObject: None")
        raise OSError(errno.EINVAL, None) from cause

    def calling(method: str, **kwargs: Any) -> Any:
        if '"' in kwargs["IfMatch"]:
            refuse()
        try:
            return call(method, **{**kwargs, "IfMatch": f'"{kwargs["IfMatch"]}"'})
        except OSError:
            refuse()

    def piping(path: str, data: bytes, **kwargs: Any) -> None:
        try:
            pipe(path, data, **kwargs)
        except FileExistsError:
            refuse()

    monkeypatch.setattr(files._fs, "call_s3", calling)
    monkeypatch.setattr(files._fs, "pipe_file", piping)
    assert files.is_conditional()
    files.put("x", b"1")
    with pytest.raises(FileExistsError):
        files.put("x", b"2")
    version = files.version("x")
    files.swap("x", b"3", version=version)
    with pytest.raises(FileExistsError):
        files.swap("x", b"4", version=version)
    assert read_bytes(files, "x") == b"3"


def test_a_lost_answer_to_a_put_is_not_a_conflict(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = remote(f"{s3_bucket}/lost")
    files.is_conditional()
    pipe_file, lost = files._fs.pipe_file, list[str]()

    def lose_first_answer(path: str, data: bytes, **kwargs: object) -> None:
        pipe_file(path, data, **kwargs)
        if not lost:
            lost.append(path)
            raise ConnectionResetError

    monkeypatch.setattr(files._fs, "pipe_file", lose_first_answer)
    files.put("m", b"mine")
    assert lost
    assert read_bytes(files, "m") == b"mine"
    monkeypatch.undo()
    with pytest.raises(FileExistsError):
        files.put("m", b"another's")


def test_unfinished_uploads_are_found_and_aborted(s3_bucket: str) -> None:
    files = remote(f"{s3_bucket}/uploads")

    def names(path: str) -> list[str]:
        return [upload.name for upload in files.uploads(path)]

    with ExitStack() as stack:
        for path in ("a/x", "a/y", "b/x"):
            writer = files.create(path, nbytes=1)
            stack.callback(writer.abort)
            writer.append(aligned(2 * BUFFER_NBYTES))
        assert names("") == ["a/x", "a/y", "b/x"]
        assert names("a") == ["a/x", "a/y"]
        assert all(upload.modified_secs for upload in files.uploads(""))  # moto says 2010, always
        assert remote(f"{s3_bucket}/other").uploads("") == []
        files.abort_uploads("a/x")
        assert names("") == ["a/y", "b/x"]
    assert names("") == []


# -------------------------------------------------------------------------------------- retries


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (OSError(errno.EAGAIN, ""), True),
        (OSError(errno.EIO, ""), False),
        (OSError(errno.ENOSPC, ""), False),
        (FileNotFoundError(), False),
        (PermissionError(), False),
        (ValueError(), False),
    ],
)
def test_only_errors_of_the_network_are_transient(error: Exception, transient: bool) -> None:
    assert is_transient(error) is transient


def test_a_transient_error_is_retried_and_another_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    failures: list[BaseException] = [ConnectionResetError(), TimeoutError()]

    def flaky() -> str:
        if failures:
            raise failures.pop()
        return "done"

    assert retried(flaky) == "done"
    failures.extend([PermissionError("no"), ConnectionResetError()])
    with pytest.raises(PermissionError):
        retried(flaky)
    failures.extend(ConnectionResetError(str(n)) for n in range(20))
    with pytest.raises(ConnectionResetError):
        retried(flaky)
    assert len(failures) == 15


def test_a_failed_remote_read_is_retried_and_a_wrong_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    files = remote("memory://retry")
    files.put("x", b"0123456789")
    memory = fsspec.filesystem("memory")
    cat_file, failures = memory.cat_file, [OSError(errno.EIO, "500 Internal Error")]

    def flaky(path: str, **kwargs: int) -> bytes:
        if failures:
            raise failures.pop()
        return cat_file(path, **kwargs)

    monkeypatch.setattr(memory, "cat_file", flaky)
    assert read_bytes(files, "x") == b"0123456789"
    failures.append(OSError(errno.EACCES, "forbidden"))
    with pytest.raises(StorageError, match=r"memory://retry/x failed.*forbidden"):
        read_bytes(files, "x")
