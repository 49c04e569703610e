"""A store in memory that forgets, when the power fails, what was not synced.

What a file system may lose: of a file that was not closed (synced), any part of its end; of a folder, any of
the changes since it was last synced. Losing less than allowed is as legal as losing all, so a crash is drawn
at random.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swapckpt.errors import CorruptCheckpointError, StorageError
from swapckpt.storage.files import Entry

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapckpt.storage.files import FileReader, FileWriter
    from tests.storage.stores import HookedFiles


@dataclass
class File:
    live: bytearray = field(default_factory=bytearray)
    durable: bytes | None = None


@dataclass
class Folder:
    live: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)
    changes: list[dict[str, File | Folder | None]] = field(default_factory=list)  # since it was synced

    def apply(self, change: dict[str, File | Folder | None]) -> None:
        self.changes.append(change)
        update(self.live, change)

    def sync(self) -> None:
        self.durable = dict(self.live)
        self.changes.clear()


def update(entries: dict[str, File | Folder], change: dict[str, File | Folder | None]) -> None:
    for name, node in change.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class VolatileFiles:
    """See the module. ``survivors(seed)`` is what is left after the power failed now."""

    url = "volatile"
    renames = True

    def __init__(self, root: Folder | None = None) -> None:
        self.root = root or Folder()

    def survivors(self, seed: int) -> VolatileFiles:
        chance = random.Random(seed)
        loses_all = seed == 0

        def node_after(node: File | Folder) -> File | Folder:
            if isinstance(node, File):
                if node.durable is not None:
                    return File(bytearray(node.durable), node.durable)
                kept = 0 if loses_all else chance.randrange(len(node.live) + 1)
                content = bytes(node.live[:kept])
                return File(bytearray(content), content)
            entries = dict(node.durable)
            for change in node.changes:
                if not loses_all and chance.random() < 0.5:
                    update(entries, change)
            left = {name: node_after(child) for name, child in entries.items()}
            return Folder(left, dict(left))

        root = node_after(self.root)
        assert isinstance(root, Folder)
        return VolatileFiles(root)

    def _folder(self, path: str) -> Folder:
        node: File | Folder = self.root
        for part in filter(None, path.split("/")):
            if not isinstance(node, Folder) or part not in node.live:
                raise FileNotFoundError(path)
            node = node.live[part]
        if not isinstance(node, Folder):
            raise StorageError(f"{path} is a file")
        return node

    def _parent(self, path: str) -> tuple[Folder, str]:
        folder, _, name = path.rpartition("/")
        return self._folder(folder), name

    def make_folder(self, path: str) -> None:
        if path:
            folder, name = self._parent(path)
            if name not in folder.live:
                folder.apply({name: Folder()})

    def entries(self, path: str) -> list[Entry]:
        return [
            Entry(name, len(node.live) if isinstance(node, File) else 0, isinstance(node, Folder), 0.0)
            for name, node in sorted(self._folder(path).live.items())
        ]

    def create(self, path: str, *, nbytes: int) -> FileWriter:
        folder, name = self._parent(path)
        if name in folder.live:
            raise FileExistsError(path)
        file = File()
        folder.apply({name: file})
        return _Writer(self, path, file)

    def open(self, path: str) -> FileReader:
        folder, name = self._parent(path)
        node = folder.live.get(name)
        if not isinstance(node, File):
            raise FileNotFoundError(path)
        return _Reader(path, bytes(node.live))

    def put(self, path: str, data: bytes) -> None:
        writer = self.create(path, nbytes=len(data))
        writer.append(memoryview(data))
        writer.close()

    def version(self, path: str) -> str | None:
        return None

    def swap(self, path: str, data: bytes, *, version: str | None) -> None:
        raise NotImplementedError

    def rename(self, source: str, target: str) -> None:
        folder, name = self._parent(source)
        other, new_name = self._parent(target)
        assert folder is other  # a change of one folder, so that it is lost or kept as a whole
        present = folder.live.get(new_name)
        if isinstance(present, Folder) and present.live:
            raise FileExistsError(f"{target} is not empty")
        folder.apply({name: None, new_name: folder.live[name]})

    def sync_folder(self, path: str) -> None:
        self._folder(path).sync()

    def remove(self, path: str) -> None:
        try:
            folder, name = self._parent(path)
        except FileNotFoundError:
            return
        folder.apply({name: None})

    def uploads(self, path: str) -> list[Entry]:
        return []

    def abort_uploads(self, path: str) -> None: ...


class _Writer:
    def __init__(self, files: VolatileFiles, path: str, file: File) -> None:
        self._files = files
        self._path = path
        self._file = file

    @property
    def position(self) -> int:
        return len(self._file.live)

    def append(self, data: memoryview) -> None:
        self._file.live += data

    def close(self) -> None:
        self._file.durable = bytes(self._file.live)

    def abort(self) -> None:
        self._files.remove(self._path)


class _Reader:
    def __init__(self, path: str, data: bytes) -> None:
        self._path = path
        self._data = data
        self.nbytes = len(data)

    def read_into(self, offset: int, view: memoryview) -> None:
        if offset + len(view) > self.nbytes:
            raise CorruptCheckpointError(f"{self._path} ends too early")
        view[:] = self._data[offset : offset + len(view)]

    def is_cached(self, offset: int, nbytes: int) -> bool:
        return True

    def close(self) -> None: ...


class PowerFailedError(BaseException):
    pass


class Frozen:
    """Passes calls on until one fails; after that, nothing has any effect."""

    def __init__(self, files: HookedFiles) -> None:
        self._files = files
        self._dead = False
        self.url = files.url
        self.renames = files.renames

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._dead:
                raise PowerFailedError
            try:
                result = getattr(self._files, name)(*args, **kwargs)
            except PowerFailedError:
                self._dead = True
                raise
            return FrozenWriter(self, result) if name == "create" else result

        return call


class FrozenWriter:
    def __init__(self, files: Frozen, writer: Any) -> None:
        self._files = files
        self._writer = writer

    @property
    def position(self) -> int:
        return int(self._writer.position)

    def _guarded(self, name: str, *args: Any) -> None:
        if self._files._dead:
            raise PowerFailedError
        try:
            getattr(self._writer, name)(*args)
        except PowerFailedError:
            self._files._dead = True
            raise

    def append(self, data: memoryview) -> None:
        self._guarded("append", data)

    def close(self) -> None:
        self._guarded("close")

    def abort(self) -> None:
        self._guarded("abort")
