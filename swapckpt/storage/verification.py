"""Reads all of a checkpoint and compares it with its checksums. Runs no code of it and loads nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from zlib_ng.zlib_ng import crc32

from swapckpt.errors import CorruptCheckpointError, StorageError
from swapckpt.storage.fetch import TORN, SavedItem, check_stock_item, read_blocks
from swapckpt.storage.opened import open_checkpoint, wrong_lengths

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.checkpoint.metadata import MetadataIndex

    from swapckpt._torch import StorageInfo
    from swapckpt.storage.files import FileReader, Files
    from swapckpt.storage.opened import OpenCheckpoint


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a checkpoint: what, and where (``file`` and ``fqn`` may be empty)."""

    file: str
    fqn: str
    message: str


def verify(
    files: Files, name: str, *, threads: int = 4, on_progress: Callable[[int], None] | None = None
) -> list[Problem]:
    """Everything that is wrong with checkpoint ``name``; empty when nothing is.

    Args:
        files: The folder that checkpoints are in.
        name: The checkpoint's name in it.
        threads: Files read at a time.
        on_progress: Called with the length of each item that was read, from any of the threads.

    Raises:
        CheckpointNotFoundError: It was never committed.
        UnsafePickleError: Its metadata asks for code.
        StorageError: The store failed.
    """
    try:
        checkpoint = open_checkpoint(files, name, check_lengths=False)
    except CorruptCheckpointError as error:
        return [Problem("", "", str(error))]
    wrong = wrong_lengths(checkpoint)
    problems = [Problem(file, "", what) for file, what in sorted(wrong.items())] + _unplaced(checkpoint)
    by_file: dict[str, list[tuple[MetadataIndex, StorageInfo]]] = {}
    for index, place in checkpoint.metadata.storage_data.items():
        by_file.setdefault(place.relative_path, []).append((index, place))
    with ThreadPoolExecutor(threads, thread_name_prefix="swapckpt-verify") as pool:
        check = partial(_check_file, checkpoint, on_progress=on_progress)
        found = list(pool.map(lambda entry: check(entry[0], entry[1]), sorted(by_file.items())))
    return problems + [problem for of_file in found for problem in of_file]


def _unplaced(checkpoint: OpenCheckpoint) -> list[Problem]:
    """Entries of the metadata of which no bytes, or not all elements, are saved."""
    problems = []
    placed = {(index.fqn, index.offset) for index in checkpoint.metadata.storage_data}
    for fqn, entry in checkpoint.metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            if (fqn, None) not in placed:
                problems.append(Problem("", fqn, "is placed in no file"))
            continue
        if any((fqn, chunk.offsets) not in placed and (fqn, None) not in placed for chunk in entry.chunks):
            problems.append(Problem("", fqn, "has chunks that are placed in no file"))
        numel = sum(chunk.sizes.numel() for chunk in entry.chunks)
        if numel != entry.size.numel():
            problems.append(
                Problem("", fqn, f"has chunks of {numel} elements, its size has {entry.size.numel()}")
            )
    return problems


def _check_file(
    checkpoint: OpenCheckpoint,
    name: str,
    placed: Sequence[tuple[MetadataIndex, StorageInfo]],
    *,
    on_progress: Callable[[int], None] | None,
) -> list[Problem]:
    problems = []
    if name not in checkpoint.nbytes:
        return [Problem(name, index.fqn, "is in a file that is missing") for index, _ in placed]
    try:
        source = checkpoint.open(name)
    except CorruptCheckpointError as error:
        return [Problem(name, "", str(error))]
    with closing(source):
        for index, place in sorted(placed, key=lambda entry: entry[1].offset):
            try:
                _check_item(checkpoint, source, index, place)
            except (CorruptCheckpointError, StorageError) as error:
                problems.append(Problem(name, index.fqn, str(error).removesuffix(TORN)))
            if on_progress is not None:
                on_progress(place.length)
    return problems


def _check_item(
    checkpoint: OpenCheckpoint, source: FileReader, index: MetadataIndex, place: StorageInfo
) -> None:
    name = checkpoint.where_item(index, place)
    item = SavedItem(source, place.offset, place.length, torch.uint8, (), None, name)
    sums = checkpoint.sums(index, place)
    if sums is None:
        check_stock_item(item)
        return
    read_blocks(item, sums)
    header = bytearray(sums.payload_at)
    source.read_into(sums.start, memoryview(header))
    payload_end = sums.payload_at + sums.payload_nbytes
    footer = bytearray(sums.nbytes - payload_end)
    source.read_into(sums.start + payload_end, memoryview(footer))
    if crc32(footer, crc32(header)) != sums.envelope:
        raise CorruptCheckpointError(f"{name}: what surrounds its elements contradicts its checksum.")
