"""``SwapStorageReader``: a DCP storage reader that verifies, runs no code and reads into the destinations.

It reads checkpoints of :class:`~swapckpt.storage.writer.SwapStorageWriter` and of stock torch.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
import uuid
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from swapckpt.collector import collector_paused
from swapckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, PlanError, SchemaError, listing
from swapckpt.storage.fetch import Box, SavedItem, fetch, whole_item
from swapckpt.storage.files import (
    ALIGNMENT,
    ThreadMemory,
    address_of,
    copy_bytes,
    open_files,
    private_memory,
    split_url,
)
from swapckpt.storage.items import is_in_order
from swapckpt.storage.metadata import ALLOWED as METADATA
from swapckpt.storage.opened import open_checkpoint
from swapckpt.storage.values import ALLOWED as VALUES
from swapckpt.storage.values import ByteItems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import BuiltinFunctionType, FunctionType

    from torch import Tensor
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from swapckpt._torch import StorageInfo
    from swapckpt.storage.files import FileReader, Files
    from swapckpt.storage.opened import OpenCheckpoint

DEFAULT_THREADS = 4
SMALL_NBYTES = 64 << 10
"""Items up to this size are read together with their neighbours, whatever part of them is wanted."""
MEDIUM_NBYTES = 2 << 20
"""Items up to this size as well, when all of them is wanted and comes from a device: a copy takes less than a
read of its own."""
WINDOW_NBYTES = 4 << 20
PART_NBYTES = 64 << 20
"""Larger tensors are read by several threads."""


class SwapStorageReader(StorageReader):
    """Reads checkpoints of our own and of stock torch, for ``dcp.load``.

    Bytes go from the file to the destination's memory and are verified there: by the manifest's checksums
    in our checkpoints, whatever part is read; by the zip entry's in stock's, where all of an item is read. A
    byte item is opened with an allow list and handed to the planner as an archive of our own making. Use one
    instance for one load.

    Args:
        path: Path or URL of the checkpoint. May be given as ``checkpoint_id`` instead.
        threads: Threads per rank, at most.
        verify: False does not compute checksums.
        allow_cast: Let values be converted where the destination has another dtype.
        allow_partial: Read tensors of which the checkpoint does not have all parts.
        allowed_globals: Classes and functions that byte items and the metadata may name, beyond the values of
            Python and torch that run no code.
        drop_page_cache: Forget cached pages of what was read. Direct I/O leaves none.
        files: The folder that checkpoints are in, for a store of your own; ``path`` then only names one.

    Raises:
        CheckpointNotFoundError: The checkpoint was never committed.
        CorruptCheckpointError: Lengths, checksums or formats do not fit. Destinations may have been
            overwritten in part.
        UnsafePickleError: Something asks for a global that is not allowed. No code was run.
        SchemaError: Destinations of another dtype or with elements that share memory, or incomplete tensors;
            all are listed, nothing was read.
        StorageError: The store failed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        threads: int = DEFAULT_THREADS,
        verify: bool = True,
        allow_cast: bool = False,
        allow_partial: bool = False,
        allowed_globals: Sequence[type | FunctionType | BuiltinFunctionType] = (),
        drop_page_cache: bool = False,
        files: Files | None = None,
    ) -> None:
        super().__init__()
        self._path: str | None = None if path is None else os.fspath(path)
        self._threads = threads
        self._verify = verify
        self._allow_cast = allow_cast
        self._allow_partial = allow_partial
        self._metadata_list = METADATA.extended(*allowed_globals)
        self._byte_items = ByteItems(VALUES.extended(*allowed_globals))
        self._drop = drop_page_cache
        self._given_files = files
        self._load_id = ""
        self._checkpoint: OpenCheckpoint | None = None
        self.reset()

    # ---------------------------------------------------------------------------- DCP's call sequence

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load. (all ranks)"""
        if checkpoint_id is not None:
            self._path = os.fspath(checkpoint_id)
            self._checkpoint = None
        self._load_id = str(uuid.uuid4())

    def read_metadata(self, *_args: object, **_kwargs: object) -> Metadata:
        """Open the checkpoint, unless this reader has done so already. (all ranks)

        Raises the errors listed for the class. DCP turns them into an AssertionError that quotes them: who
        wants the error itself calls this first.
        """
        if self._path is None:
            raise CheckpointNotFoundError("Pass a path to SwapStorageReader or checkpoint_id to dcp.load.")
        if self._checkpoint is None:
            parent, name = split_url(self._path)
            files = self._given_files or open_files(parent, drop_page_cache=self._drop)
            self._checkpoint = open_checkpoint(files, name, allowed=self._metadata_list)
        metadata = self._checkpoint.metadata
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self._load_id
        return metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: FBT001 - the signature is DCP's
        *args: object,
        **kwargs: object,
    ) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items. (all ranks)"""
        if self._checkpoint is None:
            raise PlanError("read_data() was called without read_metadata() on this reader.")
        with collector_paused():
            requests = [_request(self._checkpoint, planner, item) for item in plan.items]
        self._check(requests)
        by_file: dict[str, list[_Request]] = defaultdict(list)
        for request in requests:
            by_file[request.place.relative_path].append(request)
        with ExitStack() as stack:
            jobs: list[Callable[[], None]] = []
            threads = min(self._threads, _num_cores())
            for name, wanted in sorted(by_file.items()):
                source = self._checkpoint.open(name)
                stack.enter_context(closing(source))
                jobs.extend(self._jobs(source, wanted))
                if not source.is_cached(0, min(source.nbytes, PART_NBYTES)):
                    threads = self._threads  # most of them wait for a device; else they would only take turns
            _run(jobs, threads=threads)
        # Planners expect calls from one thread.
        for request in requests:
            if request.target is None:
                planner.load_bytes(request.item, self._byte_items.safe(request.data, origin=request.name))
            else:
                planner.commit_tensor(request.item, request.target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True for every path and URL; whether there is a checkpoint is found out by reading it."""
        return bool(os.fspath(checkpoint_id))

    @property
    def checkpoint_id(self) -> str:
        """The path or URL that is being loaded from."""
        return self._path or ""

    # ---------------------------------------------------------------------------- details

    def _check(self, requests: Sequence[_Request]) -> None:
        """Everything that can be known to be wrong before a byte is read."""
        tensors = [request for request in requests if request.target is not None]
        casts = {
            f"{request.item.dest_index.fqn}: {request.dtype} in the checkpoint, {request.target.dtype} wanted"
            for request in tensors
            if request.target is not None and request.target.dtype != request.dtype
        }
        if casts and not self._allow_cast:
            raise SchemaError(f"Values would be converted; allow_cast=True allows it:{listing(casts)}")
        folded = {
            request.item.dest_index.fqn
            for request in tensors
            if request.target is not None and _is_folded(request.target)
        }
        if folded:
            raise SchemaError(
                "Elements of these tensors share memory (they were expanded): nothing can be read into them, "
                f"and nothing was read. Make copies of them first, by contiguous():{listing(folded)}"
            )
        assert self._checkpoint is not None
        entries = self._checkpoint.metadata.state_dict_metadata
        incomplete = set()
        for fqn in {request.item.storage_index.fqn for request in tensors}:
            entry = entries[fqn]
            assert isinstance(entry, TensorStorageMetadata)
            found = sum(chunk.sizes.numel() for chunk in entry.chunks)
            if found != entry.size.numel():
                incomplete.add(f"{fqn}: {found} of {entry.size.numel()} elements")
        if incomplete and not self._allow_partial:
            raise SchemaError(
                "The checkpoint has only parts of these tensors (or some twice); allow_partial=True reads "
                f"them:{listing(incomplete)}"
            )

    def _saved(self, request: _Request, source: FileReader) -> SavedItem:
        assert self._checkpoint is not None
        return SavedItem(
            source,
            start=request.place.offset,
            nbytes=request.place.length,
            dtype=request.dtype,
            shape=request.shape,
            sums=self._checkpoint.sums(request.item.storage_index, request.place),
            name=request.name,
        )

    def _jobs(self, source: FileReader, wanted: Sequence[_Request]) -> Iterator[Callable[[], None]]:
        """What threads do for one file: windows of small items, and parts of large ones."""
        small, large = _by_size(source, wanted)
        for window in _windows(sorted(small, key=lambda request: request.place.offset)):
            yield partial(self._read_window, source, window)
        for request in large:
            yield from self._parts(source, request)

    def _read_window(self, source: FileReader, requests: Sequence[_Request]) -> None:
        window = _Window(source, requests[0].place.offset, max(map(_end, requests)))
        for request in requests:
            if not self._take(window, request):
                self._read(window, request, request.box, request.target)

    def _take(self, window: _Window, request: _Request) -> bool:
        """Copy what a window has of a tensor that is wanted whole, where nothing is wrong or out of the
        ordinary: for tens of thousands of small ones ``fetch`` would take several times as long."""
        target = request.target
        if target is None or target.dtype != request.dtype or not is_in_order(target):
            return False
        assert self._checkpoint is not None
        sums = self._checkpoint.sums(request.item.storage_index, request.place)
        if sums is None or not sums.payload_at or sums.payload_nbytes != target.nbytes:
            return False
        start = request.place.offset + sums.payload_at
        if self._verify and not sums.describes(window.view(start, target.nbytes)):
            return False
        ctypes.memmove(target.data_ptr(), window.address + start, target.nbytes)
        return True

    def _parts(self, source: FileReader, request: _Request) -> Iterator[Callable[[], None]]:
        box, target = request.box, request.target
        assert self._checkpoint is not None
        nbytes = math.prod(box.lengths) * request.dtype.itemsize
        # An item of stock torch has one checksum for all of it: whoever checks it must read all of it.
        if target is None or nbytes <= PART_NBYTES or self._checkpoint.manifest is None:
            yield partial(self._read, source, request, box, target)
            return
        rows = max(1, PART_NBYTES * box.lengths[0] // nbytes)
        for first in range(0, box.lengths[0], rows):
            count = min(rows, box.lengths[0] - first)
            part = Box((box.offsets[0] + first, *box.offsets[1:]), (count, *box.lengths[1:]))
            yield partial(self._read, source, request, part, target[first : first + count])

    def _read(self, source: FileReader, request: _Request, box: Box, target: Tensor | None) -> None:
        item = self._saved(request, source)
        if target is None:
            request.data = whole_item(item, verify=self._verify)
        else:
            fetch(item, box, target, verify=self._verify)


class _Request:
    """One item of the plan, and where it comes from and goes to."""

    __slots__ = ("box", "checkpoint", "data", "dtype", "item", "place", "shape", "target")

    def __init__(self, item: ReadItem, place: StorageInfo, checkpoint: OpenCheckpoint) -> None:
        self.item = item
        self.place = place
        self.checkpoint = checkpoint
        self.box = Box((), ())
        self.dtype = torch.uint8
        self.shape: tuple[int, ...] = ()
        self.target: Tensor | None = None  # None for a byte item
        self.data = b""  # of a byte item

    @property
    def name(self) -> str:
        """The item and its file, for messages: made when there is one."""
        return self.checkpoint.where_item(self.item.storage_index, self.place)


def _request(checkpoint: OpenCheckpoint, planner: LoadPlanner, item: ReadItem) -> _Request:
    index = item.storage_index
    place = checkpoint.metadata.storage_data.get(index)
    if place is None:
        raise CorruptCheckpointError(f"{checkpoint.where('')}: the metadata places {index.fqn!r} nowhere.")
    request = _Request(item, place, checkpoint)
    if place.transform_descriptors:
        raise CorruptCheckpointError(
            f"{request.name} went through stream extensions ({', '.join(place.transform_descriptors)}); only "
            "stock torch with these extensions reads it."
        )
    if item.type == LoadItemType.BYTE_IO:
        return request
    entry = checkpoint.metadata.state_dict_metadata.get(index.fqn)
    if not isinstance(entry, TensorStorageMetadata):
        raise CorruptCheckpointError(f"{request.name} is no tensor in the metadata.")
    request.dtype = entry.properties.dtype
    request.shape = _chunk_shape(request, entry)
    request.box = Box(tuple(item.storage_offsets), tuple(item.lengths))
    request.target = planner.resolve_tensor(item).detach()
    if tuple(request.target.shape) != request.box.lengths:
        raise PlanError(
            f"{request.name}: the planner asks for {request.box.lengths} and resolves "
            f"{tuple(request.target.shape)}."
        )
    return request


def _chunk_shape(request: _Request, entry: TensorStorageMetadata) -> tuple[int, ...]:
    """Shape of the chunk that an item is read from (plain tensors have one, and need not say where)."""
    index = request.item.storage_index
    hint = index.index
    if hint is not None and hint < len(entry.chunks) and entry.chunks[hint].offsets == index.offset:
        return tuple(entry.chunks[hint].sizes)
    for chunk in entry.chunks:
        if index.offset is None or chunk.offsets == index.offset:
            return tuple(chunk.sizes)
    raise CorruptCheckpointError(f"{request.name}: the metadata has no such chunk.")


def _is_folded(target: Tensor) -> bool:
    """True when several elements lie in one place, as ``expand`` makes them."""
    return not target.is_contiguous() and any(
        size > 1 and stride == 0 for size, stride in zip(target.shape, target.stride(), strict=True)
    )


def _by_size(source: FileReader, requests: Sequence[_Request]) -> tuple[list[_Request], list[_Request]]:
    """Those that are read together with their neighbours, and those that are read by themselves."""
    small: list[_Request] = []
    large: list[_Request] = []
    for request in requests:
        nbytes = request.place.length
        is_together = nbytes <= SMALL_NBYTES or (
            nbytes <= MEDIUM_NBYTES
            and request.box.lengths == request.shape
            and not source.is_cached(request.place.offset, nbytes)
        )
        (small if is_together else large).append(request)
    return small, large


def _end(request: _Request) -> int:
    return request.place.offset + request.place.length


def _windows(requests: Sequence[_Request]) -> Iterator[list[_Request]]:
    """Neighbours in a file, in runs that are read at once. ``requests`` are sorted by their offset."""
    window: list[_Request] = []
    for request in requests:
        start = request.place.offset
        if window:
            near = start <= _end(window[-1]) + SMALL_NBYTES
            if not near or start > window[0].place.offset + WINDOW_NBYTES:
                yield window
                window = []
        window.append(request)
    if window:
        yield window


_kept = ThreadMemory(WINDOW_NBYTES + MEDIUM_NBYTES + 2 * ALIGNMENT)  # for one window after the other


class _Window:
    """A part of a file, read at once; the same to those who read from it as the file. One per thread."""

    def __init__(self, source: FileReader, start: int, end: int) -> None:
        self._start = start - start % ALIGNMENT
        self.nbytes = max(end, min(end + -end % ALIGNMENT, source.nbytes))
        nbytes = self.nbytes - self._start
        fits = nbytes <= len(_kept.view)
        self._data = _kept.view[:nbytes] if fits else private_memory(nbytes)
        self.address = address_of(self._data) - self._start  # of what would be the first byte of the file
        source.read_into(self._start, self._data)

    def view(self, offset: int, nbytes: int) -> memoryview:
        at = offset - self._start
        return self._data[at : at + nbytes]

    def is_cached(self, offset: int, nbytes: int) -> bool:  # noqa: ARG002 - all of it is in memory
        return True

    def read_into(self, offset: int, view: memoryview) -> None:
        copy_bytes(self.view(offset, len(view)), view)

    def close(self) -> None: ...


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _run(jobs: Sequence[Callable[[], None]], *, threads: int) -> None:
    """Run all jobs; after the first failure no other one is begun, and it is raised."""
    left = deque(jobs)
    failed = threading.Event()

    def work() -> None:
        while not failed.is_set():
            try:
                job = left.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                job()
            except BaseException:
                failed.set()
                raise

    count = min(len(jobs), threads)
    if count <= 1:
        work()
        return
    with ThreadPoolExecutor(count, thread_name_prefix="swapckpt-read") as pool:
        futures = [pool.submit(work) for _ in range(count)]
    for future in futures:
        future.result()
