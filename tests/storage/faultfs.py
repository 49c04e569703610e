"""A real file system that fails: what is below its mount point is kept in another folder, and calls that it
is told to fail end with an error of the device, in whichever process they are made.

This file, run as a script, serves the kernel's FUSE protocol without a library. In a process of its own: one
that served itself would wait for itself. It imports nothing that takes time.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHORT = 0
"""In place of an error's number: a write takes half of its bytes, and says so."""

ROOT = 1  # the kernel's number of the mount point
WRITE_NBYTES = 1 << 20
BUFFER_NBYTES = WRITE_NBYTES + 4096
_HEADER = struct.Struct("<IIQQIIIHH")
_BIG_WRITES, _MAX_PAGES = 1 << 5, 1 << 22
_SIZE_IS_VALID = 1 << 3
_UNANSWERED = {2, 36, 42}  # FORGET, INTERRUPT, BATCH_FORGET


class MountError(Exception):
    """The kernel or the user's rights do not allow it."""


class FaultFolder:
    """A mounted folder, and which of its calls fail.

    Args:
        mounted: Where it is seen.
        rules: The file that the serving process looks into.
    """

    def __init__(self, mounted: Path, rules: Path) -> None:
        self.path = mounted
        self._rules = rules

    @contextmanager
    def failing(self, operation: str, suffix: str, number: int = errno.EIO) -> Iterator[None]:
        """Inside, an operation on all files and folders whose path ends like this has this error.

        Args:
            operation: create, mkdir, open, read, write, fsync, rename or remove.
            suffix: Of the path below the mount point, which is "/" itself; of a rename the new one.
            number: Of the error, or SHORT.
        """
        self._rules.write_text(f"{operation} {number} {suffix}")
        try:
            yield
        finally:
            self._rules.write_text("")


@contextmanager
def mounted(folder: Path) -> Iterator[FaultFolder]:
    """Mount one at ``folder/mounted``, for as long as this lasts.

    Raises:
        MountError: There is no FUSE here, or mounting needs privileges.
    """
    place, kept, rules = (folder / name for name in ("mounted", "kept", "rules"))
    place.mkdir()
    kept.mkdir()
    rules.touch()
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        raise MountError(f"/dev/fuse: {error.strerror}") from error
    try:
        options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
        command = ["mount", "-i", "-t", "fuse", "-o", options, "faultfs", str(place)]
        done = subprocess.run(command, capture_output=True, check=False, pass_fds=[device])
        if done.returncode != 0:
            raise MountError(done.stderr.decode().strip())
        server = subprocess.Popen(
            [sys.executable, "-S", __file__, str(device), str(kept), str(rules)], pass_fds=[device]
        )
    finally:
        os.close(device)
    try:
        yield FaultFolder(place, rules)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
        server.kill()  # also where a call still waits for an answer: it ends with an error
        server.wait()


# ------------------------------------------------------------------------------------------------- the server


class _Server:
    def __init__(self, device: int, kept: Path, rules: Path) -> None:
        self._device = device
        self._rules = rules
        self._paths = {ROOT: kept}  # by the kernel's number
        self._numbers: dict[int, int] = {}  # by inode
        self._next = ROOT + 1
        self._answers: dict[int, Callable[[int, bytes], bytes]] = {
            1: self._lookup,
            3: self._attributes,
            4: self._set_attributes,
            9: self._make_folder,
            10: self._remove,
            11: self._remove,
            12: lambda node, data: self._rename(node, data, skip=8),
            14: self._open,
            15: self._read,
            16: self._write,
            17: lambda _node, _data: struct.pack("<5Q4I24x", *[1 << 20] * 5, 4096, 255, 4096, 0),
            18: self._release,
            20: self._sync,
            25: lambda _node, _data: b"",
            26: self._begin,
            27: self._open,
            28: self._list,
            29: self._release,
            30: self._sync,
            35: self._create,
            45: lambda node, data: self._rename(node, data, skip=16),
        }

    def serve(self) -> None:
        """Until it is unmounted."""
        while True:
            try:
                request = os.read(self._device, BUFFER_NBYTES)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.ENOENT, errno.EINTR):  # the caller has gone
                    continue
                raise
            _, operation, unique, node, *_ = _HEADER.unpack_from(request)
            if operation in _UNANSWERED:
                continue
            number, answer = 0, b""
            try:
                answer = self._answers[operation](node, request[_HEADER.size :])
            except KeyError:
                number = errno.ENOSYS
            except OSError as error:
                number = error.errno or errno.EIO
            with suppress(FileNotFoundError):  # the caller has gone
                os.write(self._device, struct.pack("<IiQ", 16 + len(answer), -number, unique) + answer)

    def _is_short(self, operation: str, path: Path) -> bool:
        """What the rules say of this call, unless it is an error."""
        rule = self._rules.read_text().split(" ")
        inside = str(path).removeprefix(str(self._paths[ROOT])) or "/"
        if rule[0] != operation or not inside.endswith(rule[2]):
            return False
        if int(rule[1]) != SHORT:
            raise OSError(int(rule[1]), "")
        return True

    # ------------------------------------------------------------------------------------ names

    def _at(self, node: int, data: bytes) -> Path:
        return self._paths[node] / data.split(bytes(1))[0].decode()

    def _entry(self, path: Path) -> bytes:
        status = path.lstat()
        number = self._numbers.get(status.st_ino)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._numbers[status.st_ino] = number
        self._paths[number] = path
        return struct.pack("<5Q", number, 0, 0, 0, 0) + _packed(status)

    def _lookup(self, node: int, data: bytes) -> bytes:
        return self._entry(self._at(node, data))

    def _attributes(self, node: int, _data: bytes) -> bytes:
        return bytes(16) + _packed(self._paths[node].lstat())

    def _set_attributes(self, node: int, data: bytes) -> bytes:
        valid, _, _, nbytes = struct.unpack_from("<IIQQ", data)
        if valid & _SIZE_IS_VALID:
            os.truncate(self._paths[node], nbytes)
        return self._attributes(node, data)

    def _make_folder(self, node: int, data: bytes) -> bytes:
        path = self._at(node, data[8:])
        self._is_short("mkdir", path)
        path.mkdir()
        return self._entry(path)

    def _remove(self, node: int, data: bytes) -> bytes:
        path = self._at(node, data)
        self._is_short("remove", path)
        status = path.lstat()
        (path.rmdir if stat.S_ISDIR(status.st_mode) else path.unlink)()
        self._numbers.pop(status.st_ino, None)
        return b""

    def _rename(self, node: int, data: bytes, *, skip: int) -> bytes:
        (folder,) = struct.unpack_from("<Q", data)
        old, new, _ = data[skip:].split(bytes(1))
        target = self._at(folder, new)
        self._is_short("rename", target)
        self._at(node, old).rename(target)
        self._entry(target)
        return b""

    # ------------------------------------------------------------------------------------ content

    def _open(self, node: int, data: bytes) -> bytes:
        (flags,) = struct.unpack_from("<I", data)
        self._is_short("open", self._paths[node])
        return struct.pack("<QII", os.open(self._paths[node], flags & ~os.O_DIRECT), 0, 0)

    def _create(self, node: int, data: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", data)
        path = self._at(node, data[16:])
        self._is_short("create", path)
        descriptor = os.open(path, flags & ~os.O_DIRECT | os.O_CREAT, mode)
        return self._entry(path) + struct.pack("<QII", descriptor, 0, 0)

    def _read(self, node: int, data: bytes) -> bytes:
        descriptor, offset, nbytes = struct.unpack_from("<QQI", data)
        self._is_short("read", self._paths[node])
        return os.pread(descriptor, nbytes, offset)

    def _write(self, node: int, data: bytes) -> bytes:
        descriptor, offset, nbytes = struct.unpack_from("<QQI", data)
        if self._is_short("write", self._paths[node]):
            nbytes = (nbytes + 1) // 2
        return struct.pack("<II", os.pwrite(descriptor, data[40 : 40 + nbytes], offset), 0)

    def _sync(self, node: int, data: bytes) -> bytes:
        del data  # memory of this machine is as durable as a test needs it
        self._is_short("fsync", self._paths[node])
        return b""

    def _release(self, _node: int, data: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", data)[0])
        return b""

    def _list(self, node: int, data: bytes) -> bytes:
        _, offset, nbytes = struct.unpack_from("<QQI", data)
        listed = b""
        names = sorted(path.name.encode() for path in self._paths[node].iterdir())
        for number, name in enumerate(names[offset:], offset + 1):
            entry = struct.pack("<QQII", number, number, len(name), 0) + name
            entry += bytes(-len(entry) % 8)
            if len(listed) + len(entry) > nbytes:
                break
            listed += entry
        return listed

    def _begin(self, _node: int, data: bytes) -> bytes:
        (major,) = struct.unpack_from("<I", data)
        flags, pages = _BIG_WRITES | _MAX_PAGES, WRITE_NBYTES // 4096
        return struct.pack("<4I2H2I2H32x", major, 31, 1 << 20, flags, 16, 12, WRITE_NBYTES, 1, pages, 0)


def _packed(status: os.stat_result) -> bytes:
    times = (int(status.st_atime), int(status.st_mtime), int(status.st_ctime))
    fractions = tuple(ns % 10**9 for ns in (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns))
    return struct.pack(
        "<6Q10I",
        *(status.st_ino, status.st_size, status.st_blocks),
        *times,
        *fractions,
        *(status.st_mode, status.st_nlink, status.st_uid, status.st_gid, 0, 4096, 0),
    )


if __name__ == "__main__":
    _Server(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])).serve()
