r"""A checkpoint becomes visible in one step, when all of it is durable, or not at all.

[Note: the protocol where folders can be renamed] (file systems)

1. make ``.swapckpt-<hex>-<attempt>.new`` beside the checkpoints; every rank writes its data files there and
   syncs them;
2. compare their lengths with what the ranks report; write and sync ``.swapckpt.json`` and ``.metadata``, and
   look at their lengths; sync the folder;
3. when ``step-5`` exists, and is no checkpoint or the one seen at the start (``overwrite``): rename it to
   ``.swapckpt-<hex>-<attempt>.old``, and look once more at what was renamed;
4. rename the attempt to ``step-5``, sync the folder above. This is the commit. A folder that is not empty is
   never replaced by a rename: of two jobs that get here, one does;
5. remove what was replaced, its ``.metadata`` first.

``<hex>`` is the checkpoint's name in hexadecimal, so that no trainer's search for ``step-(\d+)`` takes an
attempt for a step (torchtitan's is not anchored). Between 3 and 4 no ``step-5`` exists: **readers then read
``.old``**, and the next writer or prune renames it back. A crash anywhere else leaves the old checkpoint, or
the new one, under its name.

[Note: the protocol of object stores] Data objects are written to their final folder under names that carry
the attempt, then ``.swapckpt-<attempt>.json``. The put of ``.metadata`` is the commit: it succeeds only if
there is none yet or, overwriting, none newer than the one seen at the start. It is read back. Then what the
old metadata referred to is removed. Stores that cannot refuse a put need a single writer, see ``remote.py``.

[Note: removal] A checkpoint is removed ``.metadata`` first: what a crash leaves of it is incomplete, not
corrupt.
"""

from __future__ import annotations

import logging
import re
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapckpt.errors import CheckpointExistsError, StorageError, listing
from swapckpt.storage.files import read_bytes
from swapckpt.storage.manifest import dump_manifest
from swapckpt.storage.metadata import NAME as METADATA

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from swapckpt.storage.files import Files
    from swapckpt.storage.manifest import FileSums

logger = logging.getLogger(__name__)

MANIFEST = ".swapckpt.json"
SAVE_ID = "swapckpt-"
"""Prefix of ``save_id`` in the metadata of checkpoints that have a manifest."""

_PREFIX = ".swapckpt-"
_ASIDE = re.compile(r"\.swapckpt-([0-9a-f]+)-([0-9a-f]{32})\.(new|old)")
_STEP = re.compile(r"step-(\d+)")
_OURS = re.compile(
    r"\.metadata(\.tmp)?|\.swapckpt(-[0-9a-f]{32})?\.json"
    r"|__\d+_\d+(\.[0-9a-f]{32})?\.distcp|__\d+\.metadata(\.tmp)?"
)
"""File names that a checkpoint consists of, ours and stock's."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to save a checkpoint. Travels from the coordinator to every rank.

    Attributes:
        name: The checkpoint's folder, relative to the one that checkpoints are in.
        id: Unique, 32 hexadecimal digits.
        renames: Which protocol is used.
        replaces: A committed checkpoint was there when the attempt began.
        version: What the store called its metadata, where it can tell versions apart. No other one is
            replaced.
    """

    name: str
    id: str
    renames: bool
    replaces: bool = False
    version: str | None = None

    @property
    def folder(self) -> str:
        """Where data files are written."""
        return aside(self.name, self.id, kind="new") if self.renames else self.name

    @property
    def manifest(self) -> str:
        """File name of the manifest."""
        return MANIFEST if self.renames else f".swapckpt-{self.id}.json"

    def data_file(self, rank: int, number: int) -> str:
        """File name of a rank's n-th data file."""
        return f"__{rank}_{number}.distcp" if self.renames else f"__{rank}_{number}.{self.id}.distcp"

    @property
    def step(self) -> int | None:
        """The step, when the checkpoint is named ``step-<n>``."""
        return step_of(self.name)


def step_of(name: str) -> int | None:
    """The step of a checkpoint named ``step-<n>``, None for other names."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def is_checkpoint_file(name: str) -> bool:
    """True for the name of a file that a checkpoint consists of, ours or stock's."""
    return _OURS.fullmatch(name) is not None


def attempt_of(name: str) -> str | None:
    """The attempt in the name of a file (in object stores); None where there is none."""
    found = re.search(r"[.-]([0-9a-f]{32})\.(json|distcp)$", name)
    return found[1] if found else None


def aside(name: str, attempt: str, *, kind: str) -> str:
    """The folder of an attempt (``new``) or of what it replaced (``old``)."""
    return f"{_PREFIX}{name.encode().hex()}-{attempt}.{kind}"


@dataclass(frozen=True, slots=True)
class Aside:
    """A folder beside the checkpoints: an attempt at one, or an old one that an attempt replaced."""

    folder: str
    name: str
    attempt: str
    is_old: bool


def asides(files: Files) -> list[Aside]:
    """All attempts and replaced checkpoints that are there."""
    found = []
    for entry in files.entries(""):
        match = _ASIDE.fullmatch(entry.name)
        if match and entry.is_folder:
            with suppress(ValueError):  # not a name of ours after all
                name = bytes.fromhex(match[1]).decode()
                found.append(Aside(entry.name, name, match[2], match[3] == "old"))
    return found


def has_metadata(files: Files, folder: str) -> bool:
    """True when the folder holds a committed checkpoint."""
    return METADATA in _file_names(files, folder)


def has_lost_metadata(files: Files, folder: str) -> bool:
    """True when a checkpoint was committed by renaming this folder, and its metadata is gone: lost, or a
    removal was cut short. An attempt has its manifest only under another name of folder or file."""
    names = _file_names(files, folder)
    return MANIFEST in names and METADATA not in names


def _file_names(files: Files, folder: str) -> set[str]:
    try:
        return {entry.name for entry in files.entries(folder) if not entry.is_folder}
    except FileNotFoundError:
        return set()


def located(files: Files, name: str) -> str | None:
    """The folder to read checkpoint ``name`` from: its own, or ``.old`` when a crash came between the two
    renames of an overwrite (see the note at the top). None when it was never committed."""
    if has_metadata(files, name):
        return name
    old = [other.folder for other in _asides_of(files, name) if other.is_old]
    return next((folder for folder in old if has_metadata(files, folder)), None)


def _asides_of(files: Files, name: str) -> list[Aside]:
    if not files.renames:
        return []
    with suppress(FileNotFoundError):
        return [other for other in asides(files) if other.name == name]
    return []


def _exists(files: Files, folder: str) -> bool:
    try:
        files.entries(folder)
    except FileNotFoundError:
        return False
    return True


# -------------------------------------------------------------------------------------------------- saving


def begin(files: Files, name: str, *, overwrite: bool) -> Attempt:
    """Start to save checkpoint ``name``. Called by the coordinator; nothing committed changes.

    Raises:
        CheckpointExistsError: It is committed and ``overwrite`` is False, or its folder holds other files.
    """
    files.make_folder("")
    recover(files, name)
    replaces, version = _committed(files, name)
    if replaces and not overwrite:
        raise CheckpointExistsError(
            f"{files.url}/{name} is a committed checkpoint. Save another step, or pass overwrite=True."
        )
    _refuse_foreign(files, name)
    attempt = Attempt(name, uuid.uuid4().hex, files.renames, replaces, version)
    files.make_folder(attempt.folder)
    try:
        files.sync_folder("")
    except BaseException:
        abandon(files, attempt)
        raise
    return attempt


def _committed(files: Files, name: str) -> tuple[bool, str | None]:
    """Whether a checkpoint is committed in a folder, and which one, as far as the store can tell."""
    folder = located(files, name)
    return (False, None) if folder is None else (True, files.version(f"{folder}/{METADATA}"))


def version_of(files: Files, name: str) -> str | None:
    """Tells what is committed under a name from what is committed there later. None when nothing is, or the
    store cannot tell."""
    return _committed(files, name)[1]


def _refuse_foreign(files: Files, name: str) -> None:
    """A folder is replaced whole: it must not hold what no checkpoint consists of."""
    try:
        foreign = [entry.name for entry in files.entries(name) if not is_checkpoint_file(entry.name)]
    except FileNotFoundError:
        return
    if foreign:
        raise CheckpointExistsError(
            f"{files.url}/{name} holds files that are not of a checkpoint; save under another name or move "
            f"them:{listing(foreign)}"
        )


def commit(
    files: Files, attempt: Attempt, metadata: bytes, *, data: Sequence[FileSums], world_size: int
) -> None:
    """Make the attempt visible (see the notes at the top). The coordinator calls it when all ranks are done.

    Args:
        files: The folder that checkpoints are in.
        attempt: From :func:`begin`.
        metadata: DCP's metadata, as it will stand in the file.
        data: All data files, as the ranks report them.
        world_size: Number of ranks that saved.

    Raises:
        StorageError: A data file is not there as reported, or the store failed. Nothing is visible, and what
            the attempt left is removed where that is possible. Only when an object store fails *at* the
            commit, it may have come about all the same, and nothing is removed.
        CheckpointExistsError: Another job committed the same checkpoint in the meantime. That one stays.
    """
    try:
        replaced = _check_lengths(files, attempt, {file.name: file.nbytes for file in data})
        manifest = dump_manifest(data, metadata, attempt=attempt.id, step=attempt.step, world_size=world_size)
        files.put(f"{attempt.folder}/{attempt.manifest}", manifest)
        if attempt.renames:
            files.put(f"{attempt.folder}/{METADATA}", metadata)
            # A disk may lose bytes and say nothing. Once the name is taken that is a damaged checkpoint.
            _check_lengths(files, attempt, {attempt.manifest: len(manifest), METADATA: len(metadata)})
            _commit_by_rename(files, attempt)
    except BaseException:
        abandon(files, attempt)
        raise
    if not attempt.renames:
        _commit_by_put(files, attempt, metadata, replaced=replaced)


def _check_lengths(files: Files, attempt: Attempt, written: Mapping[str, int]) -> list[str]:
    """Compare the attempt's files with the bytes that were written. Returns the names of the others."""
    found = {entry.name: entry.nbytes for entry in files.entries(attempt.folder)}
    wrong = []
    for name, expected in written.items():
        nbytes = found.pop(name, None)
        if nbytes != expected:
            wrong.append(f"{name}: {expected} bytes written, {nbytes or 'none'} found")
    if wrong:
        raise StorageError(
            f"{files.url}/{attempt.folder} is not what the ranks wrote. Do all ranks see the same folder?"
            f"{listing(wrong)}"
        )
    return sorted(found)


def _commit_by_rename(files: Files, attempt: Attempt) -> None:
    files.sync_folder(attempt.folder)
    old = aside(attempt.name, attempt.id, kind="old")
    is_aside = False
    if _exists(files, attempt.name):
        with suppress(FileNotFoundError):  # another job took it away: the last rename says who is first
            _require_as_begun(files, attempt, attempt.name)
            files.rename(attempt.name, old)
            is_aside = True
    try:
        if is_aside:
            with suppress(FileNotFoundError):  # another job gave it its name back
                _require_as_begun(files, attempt, old)  # or committed between the look above and the rename
        _take_name(files, attempt)
    except BaseException:
        if is_aside:
            with suppress(StorageError, OSError):  # else the readers' rule and the next writer do it
                files.rename(old, attempt.name)
        raise
    _sync_name(files, attempt)
    if is_aside:
        with _cleaning(files, old):
            discard(files, old)


def _sync_name(files: Files, attempt: Attempt) -> None:
    try:
        files.sync_folder("")
    except StorageError as error:
        raise StorageError(
            f"{files.url}/{attempt.name} is complete and visible, but its name could not be made durable "
            f"({error}): a failure of power may take it away. Save it again, with overwrite=True."
        ) from error


def _require_as_begun(files: Files, attempt: Attempt, folder: str) -> None:
    """Raise when a folder holds another checkpoint than :func:`begin` saw: only that one may be replaced."""
    if has_metadata(files, folder):
        version = files.version(f"{folder}/{METADATA}")
        if (attempt.replaces, attempt.version) != (True, version):
            raise _taken(files, attempt)


def _take_name(files: Files, attempt: Attempt) -> None:
    try:
        files.rename(attempt.folder, attempt.name)
    except FileExistsError as error:
        raise _taken(files, attempt) from error


def _taken(files: Files, attempt: Attempt) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{files.url}/{attempt.name}: another job saved it during this save, and its checkpoint stays. Let "
        "one job at a time save into a folder."
    )


def _commit_by_put(files: Files, attempt: Attempt, metadata: bytes, *, replaced: Sequence[str]) -> None:
    path = f"{attempt.folder}/{METADATA}"
    try:
        if attempt.replaces:
            files.swap(path, metadata, version=attempt.version)
        else:
            files.put(path, metadata)
    except FileExistsError as error:
        abandon(files, attempt)
        raise _taken(files, attempt) from error
    if read_bytes(files, path) != metadata:
        raise StorageError(f"{files.url}/{path} does not hold what was just written to it.")
    with _cleaning(files, attempt.folder):
        for name in replaced:
            if name != METADATA and is_checkpoint_file(name):
                files.remove(f"{attempt.folder}/{name}")


@contextmanager
def _cleaning(files: Files, what: str) -> Iterator[None]:
    """Behind the commit: a failure is no failure of the save, and is left to prune."""
    try:
        yield
    except (StorageError, OSError) as error:
        logger.warning("%s: the old content of %s was not removed (%s).", files.url, what, error)


def abandon(files: Files, attempt: Attempt) -> None:
    """Remove what a failed attempt left. Nothing committed changes; a failure to remove is left to prune."""
    with suppress(StorageError, OSError):
        if attempt.renames:
            files.remove(attempt.folder)
            return
        for entry in files.entries(attempt.folder):
            if attempt.id in entry.name:
                files.remove(f"{attempt.folder}/{entry.name}")


def recover(files: Files, name: str) -> None:
    """Give an old checkpoint its name back, after a crash between the two renames of an overwrite.

    Called by writers before they look at what exists. Readers read it where it is.
    """
    if not files.renames:
        return
    folder = located(files, name)
    if folder is None:
        return
    if folder != name:
        if _exists(files, name):  # begun again since, by a writer that knows nothing of this
            return
        files.rename(folder, name)
        files.sync_folder("")
    for other in _asides_of(files, name):
        if other.is_old:
            discard(files, other.folder)


def discard(files: Files, folder: str) -> None:
    """Remove a checkpoint, its metadata first (see the note on removal)."""
    files.remove(f"{folder}/{METADATA}")
    with suppress(FileNotFoundError):
        files.sync_folder(folder)
    files.remove(folder)
