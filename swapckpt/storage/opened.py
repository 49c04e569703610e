"""A committed checkpoint, opened: metadata read safely, compared with the manifest and the files' lengths."""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from swapckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError, listing
from swapckpt.storage.commit import MANIFEST, SAVE_ID, asides, has_lost_metadata, located
from swapckpt.storage.files import read_bytes
from swapckpt.storage.manifest import Manifest, load_manifest
from swapckpt.storage.metadata import ALLOWED, load_metadata
from swapckpt.storage.metadata import NAME as METADATA

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

    from swapckpt._torch import StorageInfo
    from swapckpt.storage.files import FileReader, Files
    from swapckpt.storage.manifest import ItemSums
    from swapckpt.storage.safe_pickle import AllowList

_MANIFEST = re.compile(r"\.swapckpt(-[0-9a-f]{32})?\.json")
_RANK_METADATA = re.compile(r"__(\d+)\.metadata")


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """A checkpoint whose metadata, manifest and file lengths fit each other.

    Attributes:
        files: The folder that checkpoints are in.
        folder: Where this one is read from, relative to it.
        metadata: DCP's.
        manifest: Ours; None for a checkpoint of stock torch.
        nbytes: Length of every file, by name.
    """

    files: Files
    folder: str
    metadata: Metadata
    manifest: Manifest | None
    nbytes: Mapping[str, int]

    def where(self, name: str) -> str:
        """A file of this checkpoint, for messages."""
        return f"{self.files.url}/{self.folder}/{name}"

    def open(self, name: str) -> FileReader:
        """A data file, to be read.

        Raises:
            CorruptCheckpointError: It is gone, or the device does not give it back.
            StorageError: The store failed.
        """
        with _losing_files(self.files, self.folder):
            return self.files.open(f"{self.folder}/{name}")

    def where_item(self, index: MetadataIndex, place: StorageInfo) -> str:
        """An item and its file, for messages."""
        at = "" if index.offset is None else f" at {tuple(index.offset)}"
        return f"{self.where(place.relative_path)}, item {index.fqn!r}{at}"

    def sums(self, index: MetadataIndex, place: StorageInfo) -> ItemSums | None:
        """Checksums of an item; None in a checkpoint of stock torch.

        Raises:
            CorruptCheckpointError: The manifest places it differently, or says of it what no writer says.
        """
        if self.manifest is None:
            return None
        entry = self.manifest.files.get(place.relative_path)
        try:
            sums = None if entry is None else entry.item(place.offset)
        except (TypeError, ValueError) as error:
            raise CorruptCheckpointError(
                f"{self.where_item(index, place)}: the manifest's row is damaged: {error}."
            ) from error
        if sums is None or sums.nbytes != place.length:
            raise CorruptCheckpointError(
                f"{self.where_item(index, place)}: metadata and manifest place it differently."
            )
        return sums


def open_checkpoint(
    files: Files, name: str, *, allowed: AllowList = ALLOWED, check_lengths: bool = True
) -> OpenCheckpoint:
    """Open checkpoint ``name``. One that stock torch wrote with ``use_collectives=False`` has metadata for
    each rank: this rank's is read then.

    Args:
        files: The folder that checkpoints are in.
        name: The checkpoint's name in it.
        allowed: What its metadata may name.
        check_lengths: False leaves data files of a wrong length to the caller (:func:`wrong_lengths`).

    Raises:
        CheckpointNotFoundError: It was never committed.
        CorruptCheckpointError: Files are missing (its metadata, too, when it was committed by renaming its
            folder), of the wrong length, or contradict each other.
        UnsafePickleError: Its metadata asks for code.
        StorageError: It has metadata for another number of ranks, or the store failed.
    """
    folder, metadata_name = located(files, name), METADATA
    if folder is None:
        if has_lost_metadata(files, name):
            raise CorruptCheckpointError(
                f"{files.url}/{name} has lost its {METADATA}: its manifest, {MANIFEST}, shows that it was "
                "committed. Its data is of no use without."
            )
        folder, metadata_name = name, _rank_metadata(files, name)
    with _losing_files(files, folder):
        nbytes = {entry.name: entry.nbytes for entry in files.entries(folder)}
        data = read_bytes(files, f"{folder}/{metadata_name}")
        manifest = _find_manifest(files, folder, nbytes, data)
    origin = f"{files.url}/{folder}/{metadata_name}"
    metadata = load_metadata(data, origin=origin, allowed=allowed)
    meta = metadata.storage_meta
    if manifest is None and meta is not None and (meta.save_id or "").startswith(SAVE_ID):
        raise CorruptCheckpointError(f"{files.url}/{folder} has lost its manifest, {MANIFEST}.")
    checkpoint = OpenCheckpoint(files, folder, metadata, manifest, nbytes)
    wrong = wrong_lengths(checkpoint) if check_lengths else {}
    if wrong:
        listed = listing(f"{file}: {what}" for file, what in wrong.items())
        raise CorruptCheckpointError(f"{checkpoint.where('')} has damaged data files:{listed}")
    return checkpoint


@contextmanager
def _losing_files(files: Files, folder: str) -> Iterator[None]:
    """Around reads of files that were there a moment ago: without one it is no whole checkpoint any more."""
    try:
        yield
    except FileNotFoundError as error:
        raise CorruptCheckpointError(
            f"{files.url}/{folder} was committed, and has lost a file while it was read ({error}). Does "
            "something remove checkpoints meanwhile?"
        ) from error


def _find_manifest(files: Files, folder: str, nbytes: Mapping[str, int], metadata: bytes) -> Manifest | None:
    """The manifest that was written with this metadata; None when there is none at all."""
    names = sorted(name for name in nbytes if _MANIFEST.fullmatch(name))
    for name in names:
        path = f"{folder}/{name}"
        manifest = load_manifest(read_bytes(files, path), origin=f"{files.url}/{path}")
        if manifest.describes(metadata):
            return manifest
    if names:
        raise CorruptCheckpointError(
            f"{files.url}/{folder}/{METADATA} is not what {' or '.join(names)} describes: it is damaged, or "
            "another checkpoint's."
        )
    return None


def wrong_lengths(checkpoint: OpenCheckpoint) -> dict[str, str]:
    """What is wrong with each data file that is not there, not as long as the manifest says, or not as long
    as the metadata needs it to be."""
    expected: dict[str, int] = {}
    if checkpoint.manifest is not None:
        expected = {name: file.nbytes for name, file in checkpoint.manifest.files.items()}
    needed: dict[str, int] = {}
    for place in checkpoint.metadata.storage_data.values():
        end = place.offset + place.length
        needed[place.relative_path] = max(end, needed.get(place.relative_path, 0))
    wrong = {}
    for name, end in needed.items():
        found = checkpoint.nbytes.get(name)
        if found is None:
            wrong[name] = "missing"
        elif name in expected and found != expected[name]:
            wrong[name] = f"{found} bytes, {expected[name]} expected"
        elif found < end:
            wrong[name] = f"{found} bytes, at least {end} expected"
    return wrong


def _rank_metadata(files: Files, name: str) -> str:
    """File name of this rank's own metadata.

    It knows nothing of the other ranks' parts: with another number of ranks, wrong values would be read
    without an error.
    """
    try:
        names = [entry.name for entry in files.entries(name)]
    except FileNotFoundError:
        names = []
    saved = sum(1 for name in names if _RANK_METADATA.fullmatch(name))
    if not saved:
        instead = _instead(files, name)
        raise CheckpointNotFoundError(f"{files.url}/{name} is no committed checkpoint: {instead}.")
    is_distributed = dist.is_available() and dist.is_initialized()
    world_size = dist.get_world_size() if is_distributed else 1
    if saved != world_size:
        raise StorageError(
            f"{files.url}/{name} was saved by {saved} ranks with use_collectives=False, which only {saved} "
            f"ranks can load; there are {world_size}."
        )
    return f"__{dist.get_rank() if is_distributed else 0}{METADATA}"


def _instead(files: Files, name: str) -> str:
    """What is there in place of a checkpoint."""
    try:
        found = [entry.name for entry in files.entries(name)]
    except FileNotFoundError:
        found = []
    if found:
        return f"its folder has {len(found)} files and no {METADATA}, as a save leaves it that did not finish"
    try:
        begun = [other for other in asides(files) if other.name == name]
    except FileNotFoundError:
        return f"there is no folder {files.url}"
    return "a save of it was begun and did not finish" if begun else "nothing has this name"
