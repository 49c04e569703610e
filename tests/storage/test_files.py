"""The few operations of a store: the same on every kind, direct and durable on a file system."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NoReturn

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from swapckpt.errors import CorruptCheckpointError, StorageError
from swapckpt.storage import posix
from swapckpt.storage.files import Files, is_transient, open_files, read_bytes, retried, split_url
from swapckpt.storage.posix import (
    ALIGNMENT,
    BUFFER_NBYTES,
    MIN_DIRECT_NBYTES,
    PosixFiles,
    address_of,
)
from swapckpt.storage.remote import FsspecFiles


@pytest.fixture
def files(store_url: str, request: pytest.FixtureRequest) -> Files:
    if "buffered" in request.node.name:
        return PosixFiles(store_url, direct=False, drop_page_cache=True)
    return open_files(store_url)


def aligned(nbytes: int, *, shift: int = 0) -> memoryview:
    """Random bytes in memory that is aligned to pages, or ``shift`` bytes off."""
    view = memoryview(mmap.mmap(-1, nbytes + shift + ALIGNMENT))[shift : shift + nbytes]
    view[:] = np.random.default_rng(nbytes).bytes(nbytes)
    return view


def same(found: bytes | memoryview, expected: bytes | memoryview) -> bool:
    """Compared in a call: of two memoryviews that differ pytest would compute the difference for minutes."""
    return found == expected


def write(files: Files, path: str, *pieces: bytes | memoryview) -> bytes:
    writer = files.create(path, nbytes=sum(map(len, pieces)))
    for piece in pieces:
        writer.append(memoryview(piece))
    assert writer.position == sum(map(len, pieces))
    writer.close()
    return b"".join(pieces)


def read_into(files: Files, path: str, view: memoryview) -> None:
    with closing(files.open(path)) as reader:
        reader.read_into(0, view)


# -------------------------------------------------------------------------------------- every store


def test_what_is_written_is_listed_and_read_at_any_position(files: Files) -> None:
    files.make_folder("a")
    data = write(files, "a/x", b"head", aligned(100_000), b"", b"tail" * 3)
    write(files, "a/y", b"other")
    assert [(entry.name, entry.nbytes, entry.is_folder) for entry in files.entries("a")] == [
        ("x", len(data), False),
        ("y", 5, False),
    ]
    assert [(entry.name, entry.is_folder) for entry in files.entries("")] == [("a", True)]
    reader = files.open("a/x")
    assert reader.nbytes == len(data)
    for start, end in ((0, len(data)), (3, 9), (len(data) - 1, len(data)), (4096, 80_000)):
        view = memoryview(bytearray(end - start))
        reader.read_into(start, view)
        assert same(view, data[start:end])
    with pytest.raises(CorruptCheckpointError, match=r"a/x ends at byte .* 1 bytes too early"):
        reader.read_into(len(data) - 3, memoryview(bytearray(4)))
    reader.close()


def test_more_than_one_part_or_buffer(files: Files) -> None:
    files.make_folder("")
    data = write(files, "big", b"x", aligned(BUFFER_NBYTES + 12_345), b"y" * 77, aligned(2 * BUFFER_NBYTES))
    assert same(read_bytes(files, "big"), data)


def test_a_put_never_overwrites(files: Files) -> None:
    files.make_folder("")
    files.put("m", b"first")
    with pytest.raises(FileExistsError):
        files.put("m", b"second")
    assert read_bytes(files, "m") == b"first"


def test_remove_takes_files_and_folders_and_what_is_not_there(files: Files) -> None:
    files.make_folder("step-1")
    files.make_folder("step-10")
    for path in ("step-1/a", "step-1/b", "step-10/a"):
        files.put(path, b"x")
    files.remove("step-1/a")
    files.remove("step-1/a")
    assert [entry.name for entry in files.entries("step-1")] == ["b"]
    files.remove("step-1")
    files.remove("step-1")
    assert [entry.name for entry in files.entries("")] == ["step-10"]
    assert read_bytes(files, "step-10/a") == b"x"


def test_an_aborted_file_is_not_there(files: Files) -> None:
    files.make_folder("")
    writer = files.create("x", nbytes=3 * BUFFER_NBYTES)
    writer.append(aligned(2 * BUFFER_NBYTES))
    writer.abort()
    del writer  # a stream of fsspec publishes what it has when it is collected
    assert files.entries("") == []
    assert files.uploads("") == []


def test_a_missing_file_is_reported_as_such(files: Files) -> None:
    files.make_folder("")
    with pytest.raises(FileNotFoundError):
        files.open("x")
    with pytest.raises(FileNotFoundError):
        read_bytes(files, "folder/x")


def test_no_store_syncs_the_whole_machine(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sync", lambda: pytest.fail("os.sync() stops every process of the machine"))
    files.make_folder("a")
    write(files, "a/x", b"data")
    files.put("a/m", b"m")
    files.sync_folder("a")
    files.sync_folder("")


# -------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("url", "parent", "name"),
    [
        ("/runs/a/step-5", "/runs/a", "step-5"),
        ("/runs/a/step-5/", "/runs/a", "step-5"),
        ("s3://bucket/runs/step-5", "s3://bucket/runs", "step-5"),
        ("s3://bucket/step-5", "s3://bucket", "step-5"),
        ("memory://step-5/x", "memory://step-5", "x"),
    ],
)
def test_a_url_is_split_into_folder_and_name(url: str, parent: str, name: str) -> None:
    assert split_url(url) == (parent, name)


def test_a_relative_path_is_split_below_the_current_folder() -> None:
    assert split_url(Path("runs/step-5")) == (str(Path.cwd() / "runs"), "step-5")


@pytest.mark.parametrize("url", ["s3://bucket", "memory://x", "/", "s3://"])
def test_a_checkpoint_needs_a_folder_above_it(url: str) -> None:
    with pytest.raises(StorageError, match="no folder above it"):
        split_url(url)


def test_local_urls_are_files_of_the_system(tmp_path: Path) -> None:
    for url in (tmp_path, str(tmp_path), f"file://{tmp_path}"):
        files = open_files(url)
        assert isinstance(files, PosixFiles)
        assert files.url == str(tmp_path)


def test_an_unknown_protocol_is_named() -> None:
    with pytest.raises(StorageError, match="nosuch://x"):
        open_files("nosuch://x/y")


# -------------------------------------------------------------------------------------- file systems


def is_cached(path: Path) -> bool:
    """True when the page cache holds the file's first page. Not asked by a read that may not wait: it starts
    read-ahead, and on a quick device finds what it has just brought in."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), ALIGNMENT) as mapped:
        first = np.frombuffer(mapped, dtype=np.uint8)
        resident = ctypes.c_ubyte()
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(first.ctypes.data), ctypes.c_size_t(ALIGNMENT), ctypes.byref(resident)
        )
        del first
    assert not failed, os.strerror(ctypes.get_errno())
    return bool(resident.value & 1)


def has_direct(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return not str(folder).startswith("/dev/shm")


@pytest.mark.parametrize("shift", [0, 64, 512])
def test_direct_writes_and_reads_leave_the_page_cache_alone(tmp_path: Path, shift: int) -> None:
    if not has_direct(tmp_path):
        pytest.skip("this file system keeps its files in memory or has no direct I/O")
    data = aligned(32 * ALIGNMENT, shift=shift)
    for name in ("written", "read", "read oddly"):
        write(PosixFiles(tmp_path), name, data)
    assert not is_cached(tmp_path / "written")
    write(PosixFiles(tmp_path), "odd length", data[: 5 * ALIGNMENT], b"end")
    assert not is_cached(tmp_path / "odd length")
    write(PosixFiles(tmp_path), "odd start", b"abc", data)
    assert not is_cached(tmp_path / "odd start")
    target = memoryview(mmap.mmap(-1, len(data)))
    read_into(PosixFiles(tmp_path), "read", target)
    assert same(target, data)
    assert not is_cached(tmp_path / "read")
    odd = memoryview(mmap.mmap(-1, len(data) + 64))[64:]  # through memory that direct I/O can fill
    read_into(PosixFiles(tmp_path), "read oddly", odd)
    assert same(odd, data)
    assert not is_cached(tmp_path / "read oddly")
    part = memoryview(bytearray(len(data) - 1))
    read_into(PosixFiles(tmp_path), "read oddly", part[: MIN_DIRECT_NBYTES - 1])
    assert same(part[: MIN_DIRECT_NBYTES - 1], data[: MIN_DIRECT_NBYTES - 1])
    assert is_cached(tmp_path / "read oddly")


def test_cached_pages_are_dropped_on_request(tmp_path: Path) -> None:
    if not has_direct(tmp_path):
        pytest.skip("this file system keeps its files in memory")
    data = aligned(32 * ALIGNMENT)
    write(PosixFiles(tmp_path, direct=False), "kept", data)
    assert is_cached(tmp_path / "kept")
    files = PosixFiles(tmp_path, direct=False, drop_page_cache=True)
    write(files, "dropped", data)
    assert not is_cached(tmp_path / "dropped")
    reader = files.open("kept")
    reader.read_into(0, memoryview(bytearray(10)))
    reader.close()
    assert not is_cached(tmp_path / "kept")


@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 3 * MIN_DIRECT_NBYTES), st.sampled_from([0, 64, 512, 4095])), max_size=8
    ),
    direct=st.booleans(),
)
@example(pieces=[(ALIGNMENT, 0), (MIN_DIRECT_NBYTES, 0)], direct=True)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sequence_of_pieces_makes_the_same_file(
    tmp_path: Path, pieces: list[tuple[int, int]], direct: bool
) -> None:
    files = PosixFiles(tmp_path, direct=direct)
    files.remove("x")
    # Rounded up, some of them: so that positions are aligned often enough for direct writes.
    lengths = [n if shift else -(-n // ALIGNMENT) * ALIGNMENT for n, shift in pieces]
    parts = [aligned(n, shift=shift) for n, (_, shift) in zip(lengths, pieces, strict=True)]
    data = write(files, "x", *parts)
    assert same(read_bytes(files, "x"), data)


def test_files_are_synced_with_all_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, int]] = []
    fsync = os.fsync

    def spy(descriptor: int) -> None:
        fsync(descriptor)
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        synced.append((name, os.fstat(descriptor).st_size))

    monkeypatch.setattr(os, "fsync", spy)
    files = PosixFiles(tmp_path / "root")
    files.make_folder("")
    files.put("small", b"12345")
    write(files, "large", aligned(10 * ALIGNMENT), b"end")
    files.sync_folder("")
    assert synced[:2] == [("small", 5), ("large", 10 * ALIGNMENT + 3)]
    assert synced[2][0] == "root"
    PosixFiles(tmp_path / "root", sync=False).put("unsynced", b"x")
    PosixFiles(tmp_path / "root", sync=False).sync_folder("")
    assert len(synced) == 3


def refusing(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make ``os.open`` or ``os.pwritev`` behave as on a file system without direct I/O."""
    refused: list[str] = []
    os_open, os_pwritev = os.open, os.pwritev

    def refuse(path: Path) -> None:
        refused.append(str(path))
        raise OSError(errno.EINVAL, "Invalid argument")

    def open_(path: Path, flags: int, mode: int = 0o777) -> int:
        descriptor = os_open(path, flags, mode)
        if flags & os.O_DIRECT:  # the kernel makes the file first and refuses then
            os.close(descriptor)
            refuse(path)
        return descriptor

    def pwritev(descriptor: int, parts: list[memoryview], offset: int) -> int:
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refuse(Path(f"descriptor {descriptor}"))
        return os_pwritev(descriptor, parts, offset)

    monkeypatch.setattr(os, name, {"open": open_, "pwritev": pwritev}[name])
    return refused


@pytest.mark.parametrize("where", ["open", "pwritev"])
def test_a_file_system_without_direct_writes_gets_ordinary_ones(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = refusing(where, monkeypatch)
    data = write(PosixFiles(tmp_path), "x", b"head", aligned(200_000), aligned(300_000), b"tail")
    assert refused
    assert same(read_bytes(PosixFiles(tmp_path), "x"), data)


def test_a_device_that_wants_memory_at_pages_gets_it_from_the_buffer_and_stays_direct(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_direct(tmp_path):
        pytest.skip("this file system keeps its files in memory or has no direct I/O")
    refused: list[int] = []
    os_pwritev = os.pwritev

    def pwritev(descriptor: int, parts: list[memoryview], offset: int) -> int:
        import fcntl

        is_odd = any(address_of(part) % ALIGNMENT for part in parts)
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT and is_odd:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return os_pwritev(descriptor, parts, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    pieces = [aligned(64 * ALIGNMENT, shift=512) for _ in range(3)]
    # The first piece comes with what the buffer holds, which must not be lost when it is refused.
    data = write(PosixFiles(tmp_path), "x", b"h" * ALIGNMENT, *pieces)
    assert len(refused) == 1  # asked once per file
    assert not is_cached(tmp_path / "x")
    assert same(read_bytes(PosixFiles(tmp_path), "x"), data)


def test_a_header_and_its_elements_are_one_system_call_and_a_short_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[int]] = []
    os_pwritev = os.pwritev

    def pwritev(descriptor: int, parts: list[memoryview], offset: int) -> int:
        calls.append([len(part) for part in parts])
        if len(calls) == 1:  # in the middle of the second part
            parts = [parts[0], parts[1][: 8 * ALIGNMENT]]
        return os_pwritev(descriptor, parts, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    data = write(PosixFiles(tmp_path), "x", b"h" * ALIGNMENT, aligned(64 * ALIGNMENT))
    assert calls == [[ALIGNMENT, 64 * ALIGNMENT], [56 * ALIGNMENT]]
    assert same(read_bytes(PosixFiles(tmp_path), "x"), data)


FILL = """
import errno, resource, signal, sys
from swapckpt.errors import StorageError
from swapckpt.storage.posix import BUFFER_NBYTES, PosixFiles
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4 * BUFFER_NBYTES, 4 * BUFFER_NBYTES))
writer = PosixFiles(sys.argv[1]).create("x", nbytes=6 * BUFFER_NBYTES)
try:
    writer.append(memoryview(bytes(6 * BUFFER_NBYTES)))
except StorageError as error:
    print(error.__cause__.errno == errno.EFBIG, error)
"""


def test_a_full_device_is_an_error_with_the_path(tmp_path: Path) -> None:
    # A limit of the process stands for the end of the device: the kernel refuses the write all the same.
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(tmp_path)], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.startswith(f"True writing {tmp_path / 'x'} failed")


def test_a_read_that_direct_io_refuses_goes_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(PosixFiles(tmp_path), "x", aligned(64 * ALIGNMENT))
    reader, preadv = PosixFiles(tmp_path).open("x"), os.preadv
    assert isinstance(reader, posix.PosixReader)

    def refuse_direct(descriptor: int, views: list[memoryview], offset: int) -> int:
        if descriptor == reader._direct_descriptor:
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", refuse_direct)
    target = aligned(len(data))
    target[:] = bytes(len(target))
    reader.read_into(0, target)
    reader.close()
    assert same(target, data)


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
