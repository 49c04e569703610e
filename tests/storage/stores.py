"""Stores that count, fail or die at a chosen call, and short ways to save and load through DCP."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from swapckpt.storage.reader import SwapStorageReader
from swapckpt.storage.writer import SwapStorageWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from swapckpt.storage.files import Entry, FileReader, Files, FileWriter


@contextmanager
def unwrapped() -> Iterator[None]:
    """Raise the first rank's own error instead of DCP's, which is a BaseException."""
    try:
        yield
    except CheckpointException as error:
        first = min(error.failures)
        raise error.failures[first][0] from None


def save(state: dict[str, Any], path: str | os.PathLike[str], **options: Any) -> None:
    with unwrapped():
        dcp_save(state, storage_writer=SwapStorageWriter(path, **options))


def load(state: dict[str, Any], path: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
    reader = SwapStorageReader(path, **options)
    reader.read_metadata()  # raises its own errors; DCP would only quote them
    with unwrapped():
        dcp_load(state, storage_reader=reader)
    return state


def stock_save(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    with unwrapped():
        dcp_save(state, checkpoint_id=path)


def stock_load(state: dict[str, Any], path: str | os.PathLike[str]) -> dict[str, Any]:
    with unwrapped():
        dcp_load(state, checkpoint_id=path)
    return state


def uniform(value: float) -> dict[str, Any]:
    """A state in which every number is ``value``, so that a mixture of two saves shows."""
    return {"a": torch.full((30_000,), value), "b": torch.full((3,), value), "settings": {"value": value}}


def value_of(path: str | os.PathLike[str], *, loader: Callable[..., Any] = load, **options: Any) -> float:
    """The value that a checkpoint of :func:`uniform` was saved with. Fails on a mixture."""
    loaded = loader(uniform(-1.0), path, **options)
    found = {*loaded["a"].unique().tolist(), *loaded["b"].tolist(), loaded["settings"]["value"]}
    assert len(found) == 1, found
    return float(found.pop())


def zeroed(state: Any) -> Any:
    """The same structure, to be loaded into."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: zeroed(value) for key, value in state.items()}
    if isinstance(state, list):
        return [zeroed(value) for value in state]
    return None


def equal(a: Any, b: Any) -> bool:
    """Same structure, dtypes and bits."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class HookedFiles:
    """A store that announces every call before it is made: ``before(number, operation, path)``.

    What the hook raises, the call raises. Numbers count from 0, over all threads.
    """

    def __init__(self, files: Files, before: Callable[[int, str, str], None]) -> None:
        self._files = files
        self._before = before
        self._lock = threading.Lock()
        self._count = 0
        self.calls: list[tuple[str, str]] = []
        self.url = files.url

    def announce(self, operation: str, path: str) -> None:
        with self._lock:
            number, self._count = self._count, self._count + 1
            self.calls.append((operation, path))
        self._before(number, operation, path)

    @property
    def renames(self) -> bool:
        return self._files.renames

    def make_folder(self, path: str) -> None:
        self.announce("make_folder", path)
        self._files.make_folder(path)

    def entries(self, path: str) -> list[Entry]:
        self.announce("entries", path)
        return self._files.entries(path)

    def create(self, path: str, *, nbytes: int) -> FileWriter:
        self.announce("create", path)
        return HookedWriter(self, path, self._files.create(path, nbytes=nbytes))

    def open(self, path: str) -> FileReader:
        self.announce("open", path)
        return HookedReader(self, path, self._files.open(path))

    def put(self, path: str, data: bytes) -> None:
        self.announce("put", path)
        self._files.put(path, data)

    def version(self, path: str) -> str | None:
        self.announce("version", path)
        return self._files.version(path)

    def swap(self, path: str, data: bytes, *, version: str | None) -> None:
        self.announce("swap", path)
        self._files.swap(path, data, version=version)

    def rename(self, source: str, target: str) -> None:
        self.announce("rename", f"{source} -> {target}")
        self._files.rename(source, target)

    def sync_folder(self, path: str) -> None:
        self.announce("sync_folder", path)
        self._files.sync_folder(path)

    def remove(self, path: str) -> None:
        self.announce("remove", path)
        self._files.remove(path)

    def uploads(self, path: str) -> list[Entry]:
        self.announce("uploads", path)
        return self._files.uploads(path)

    def abort_uploads(self, path: str) -> None:
        self.announce("abort_uploads", path)
        self._files.abort_uploads(path)


class HookedWriter:
    def __init__(self, files: HookedFiles, path: str, writer: FileWriter) -> None:
        self._files = files
        self._path = path
        self._writer = writer

    @property
    def position(self) -> int:
        return self._writer.position

    def append(self, data: memoryview) -> None:
        self._files.announce("append", self._path)
        self._writer.append(data)

    def close(self) -> None:
        self._files.announce("close", self._path)
        self._writer.close()

    def abort(self) -> None:
        self._files.announce("abort", self._path)
        self._writer.abort()


class HookedReader:
    def __init__(self, files: HookedFiles, path: str, reader: FileReader) -> None:
        self._files = files
        self._path = path
        self._reader = reader
        self.nbytes = reader.nbytes

    def read_into(self, offset: int, view: memoryview) -> None:
        self._files.announce(f"read {len(view)}", self._path)
        self._reader.read_into(offset, view)

    def is_cached(self, offset: int, nbytes: int) -> bool:
        return self._reader.is_cached(offset, nbytes)

    def close(self) -> None:
        self._reader.close()


def dying_at(number: int) -> Callable[[int, str, str], None]:
    """A hook that ends the process without any warning before a call."""

    def before(current: int, _operation: str, _path: str) -> None:
        if current == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return before
