"""Files of a file system: direct, durable, and ordinary where the system cannot."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from swapckpt.storage import posix
from swapckpt.storage.files import ALIGNMENT, address_of, read_bytes
from swapckpt.storage.posix import MIN_DIRECT_NBYTES, PosixFiles
from tests.storage.content import aligned, read_into, same, write


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


def test_what_the_cache_has_is_read_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Direct I/O would go to the device for it."""
    if not has_direct(tmp_path):
        pytest.skip("this file system keeps its files in memory or has no direct I/O")
    data = aligned(64 * ALIGNMENT + 100)
    write(PosixFiles(tmp_path, direct=False), "x", data)
    directly: list[int] = []
    read_direct = posix.PosixReader._read_direct

    def counted(reader: posix.PosixReader, offset: int, view: memoryview) -> int:
        directly.append(offset)
        return read_direct(reader, offset, view)

    monkeypatch.setattr(posix.PosixReader, "_read_direct", counted)
    reader = PosixFiles(tmp_path).open("x")
    target = memoryview(mmap.mmap(-1, len(data)))
    assert reader.is_cached(0, len(data))
    assert not reader.is_cached(0, len(data) + 1)
    reader.read_into(0, target)
    assert same(target, data)
    assert directly == []
    with (tmp_path / "x").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert not reader.is_cached(0, ALIGNMENT)
    target[:] = bytes(len(data))
    reader.read_into(0, target)
    assert same(target, data)
    assert directly == [0]
    reader.close()


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
