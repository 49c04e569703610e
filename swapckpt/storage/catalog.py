"""What is in a folder of checkpoints: their state, their verification, and what may be removed."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from swapckpt.errors import CheckpointNotFoundError, ConfigError, SwapCkptError
from swapckpt.storage.commit import (
    asides,
    attempt_of,
    discard,
    has_lost_metadata,
    has_metadata,
    is_checkpoint_file,
    located,
    recover,
    step_of,
)
from swapckpt.storage.metadata import NAME as METADATA
from swapckpt.storage.opened import open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from swapckpt.storage.commit import Aside
    from swapckpt.storage.files import Entry, Files

MIN_AGE_SECS = 3600.0
"""What was changed within this time may belong to a save that is still going on."""

_LOST = f"has no {METADATA}: it was lost, or a removal was cut short"
"""The problem of what was committed once and has no metadata."""

_PROBE = re.compile(r"\.swapckpt-probe-[0-9a-f]{32}")


class CheckpointState(Enum):
    """What can be told of a checkpoint without reading its data."""

    COMPLETE = "complete"
    """Committed; metadata, manifest and lengths of files fit each other."""
    INCOMPLETE = "incomplete"
    """A save that did not finish, or has not yet."""
    CORRUPT = "corrupt"
    """Committed, and damaged since."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint of a folder.

    Attributes:
        name: Its name, for an attempt the name it was to have.
        folder: Where its files are.
        step: Its step, when it is named ``step-<n>``.
        state: See :class:`CheckpointState`.
        nbytes: All its files.
        modified_secs: When its newest file was written, in Unix time; None where the store does not say.
        world_size: Number of ranks that saved it; None where that is not recorded.
        problem: Why it is not complete; empty when it is.
    """

    name: str
    folder: str
    step: int | None
    state: CheckpointState
    nbytes: int
    modified_secs: float | None
    world_size: int | None
    problem: str


def committed_steps(files: Files) -> list[int]:
    """Steps of all committed checkpoints named ``step-<n>``, ascending. Does not look into them."""
    names = {entry.name for entry in _entries(files, "") if entry.is_folder}
    names |= {other.name for other in _asides(files) if other.is_old}
    steps = [step for name in names if (step := step_of(name)) is not None]
    return sorted(step for step in steps if located(files, f"step-{step}") is not None)


def lost_steps(files: Files, committed: Sequence[int]) -> list[int]:
    """Steps that were committed and have lost their metadata since, ascending. What a save left that did not
    finish is none. Object stores do not show it, except of checkpoints that were copied there.

    Args:
        files: The folder that checkpoints are in.
        committed: From :func:`committed_steps`; these are not looked at.
    """
    steps = {step for entry in _entries(files, "") if (step := step_of(entry.name)) is not None}
    return sorted(step for step in steps - {*committed} if has_lost_metadata(files, f"step-{step}"))


def refuse_checkpoint(files: Files) -> None:
    """Raise when a folder that is to hold checkpoints is one itself.

    Raises:
        ConfigError: It is.
    """
    if has_metadata(files, ""):
        above, _, name = files.url.rstrip("/").rpartition("/")
        step = step_of(name)
        then = "" if step is None else f", and load({step}) for this step"
        raise ConfigError(
            f"{files.url} is a checkpoint, not a folder of checkpoints: steps would be saved inside of it. "
            f"Name the folder above it, {above!r}{then}."
        )


def list_checkpoints(files: Files) -> list[CheckpointInfo]:
    """Every checkpoint, attempt and remainder in a folder, by step and name."""
    found = []
    beside = _asides(files)
    for entry in _entries(files, ""):
        if entry.is_folder and not any(other.folder == entry.name for other in beside):
            info = _inspected(files, entry.name, entry.name)
            if info is not None:
                found.append(info)
    for other in beside:
        if other.is_old and located(files, other.name) == other.folder:
            info = _inspected(files, other.name, other.folder)
        else:
            problem = "was replaced, not removed yet" if other.is_old else "a save that did not finish"
            info = _described(files, other.name, other.folder, CheckpointState.INCOMPLETE, problem=problem)
        if info is not None:
            found.append(info)
    return sorted(found, key=lambda info: (info.step is None, info.step, info.name, info.folder))


def _inspected(files: Files, name: str, folder: str) -> CheckpointInfo | None:
    """A folder's state; None when nothing in it is of a checkpoint."""
    entries = _entries(files, folder)
    if not any(is_checkpoint_file(entry.name) for entry in entries):
        return None
    if not has_metadata(files, folder):
        was_committed = has_lost_metadata(files, folder)
        problem = _LOST if was_committed else "a save that did not finish"
        return _described(files, name, folder, CheckpointState.INCOMPLETE, problem=problem)
    try:
        checkpoint = open_checkpoint(files, name)
    except CheckpointNotFoundError:  # removed meanwhile
        return None
    except SwapCkptError as error:
        if not has_metadata(files, folder):  # being removed, which begins with it
            return None
        return _described(files, name, folder, CheckpointState.CORRUPT, problem=str(error))
    world_size = None if checkpoint.manifest is None else checkpoint.manifest.world_size
    return _described(files, name, folder, CheckpointState.COMPLETE, world_size=world_size)


def _described(
    files: Files,
    name: str,
    folder: str,
    state: CheckpointState,
    *,
    problem: str = "",
    world_size: int | None = None,
) -> CheckpointInfo:
    entries = _entries(files, folder)
    dated = entries or [entry for entry in _entries(files, "") if entry.name == folder]
    return CheckpointInfo(
        name=name,
        folder=folder,
        step=step_of(name),
        state=state,
        nbytes=sum(entry.nbytes for entry in entries),
        modified_secs=_newest(dated),
        world_size=world_size,
        problem=problem,
    )


def _newest(entries: Iterable[Entry]) -> float | None:
    return max((entry.modified_secs for entry in entries if entry.modified_secs is not None), default=None)


def _entries(files: Files, folder: str) -> list[Entry]:
    try:
        return files.entries(folder)
    except FileNotFoundError:
        return []


def _asides(files: Files) -> list[Aside]:
    try:
        return asides(files) if files.renames else []
    except FileNotFoundError:
        return []


# -------------------------------------------------------------------------------------------------- removal


@dataclass(frozen=True, slots=True)
class Removal:
    """Something that :func:`prune` removes: a checkpoint, what is left of one, a file or an upload."""

    path: str
    nbytes: int
    reason: str
    is_upload: bool = False


def prune(
    files: Files,
    *,
    keep_latest: int | None = None,
    keep_every: int | None = None,
    min_age_secs: float = MIN_AGE_SECS,
    dry_run: bool = True,
) -> list[Removal]:
    """Remove old checkpoints, and what saves left that did not finish.

    Args:
        files: The folder that checkpoints are in.
        keep_latest: Keep this many complete checkpoints named ``step-<n>``, the newest (>= 1); None keeps
            all. Corrupt ones do not count and stay: they may hold what a user wants to rescue.
        keep_every: Keep those whose step is a multiple of this too.
        min_age_secs: Leave what was changed within this time: it may be a save that is still going on.
        dry_run: Only say what would be removed.

    Returns:
        What was, or would be, removed, in this order.

    Raises:
        ValueError: ``keep_latest`` or ``keep_every`` is below 1.
        StorageError: The store failed.
    """
    for name, value in (("keep_latest", keep_latest), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise ValueError(
                f"{name} must be at least 1, got {value}: the newest checkpoint is never removed."
            )
    before_secs = time.time() - min_age_secs
    if not dry_run:
        for name in _replaced(files, before_secs=before_secs):
            recover(files, name)
    checkpoints = list_checkpoints(files)
    removals = [
        *_retired(checkpoints, keep_latest=keep_latest, keep_every=keep_every),
        *leftovers(files, checkpoints, before_secs=before_secs),
    ]
    if not dry_run:
        for removal in removals:
            if removal.is_upload:
                files.abort_uploads(removal.path)
            elif has_metadata(files, removal.path):
                discard(files, removal.path)
            else:
                files.remove(removal.path)
    return removals


def _replaced(files: Files, *, before_secs: float) -> set[str]:
    """Checkpoints of which an old one was set aside, except by a save that may be between its two renames:
    that one finds its place taken if the old one gets its name back now."""
    beside = _asides(files)
    going_on = {
        other.attempt
        for other in beside
        if not other.is_old and (_newest(_entries(files, other.folder)) or before_secs) >= before_secs
    }
    return {other.name for other in beside if other.is_old and other.attempt not in going_on}


def _retired(
    checkpoints: Sequence[CheckpointInfo], *, keep_latest: int | None, keep_every: int | None
) -> list[Removal]:
    if keep_latest is None:
        return []
    steps = [info for info in checkpoints if info.step is not None]
    reason = "older than the newest" if keep_latest == 1 else f"older than the {keep_latest} newest"
    complete = [info for info in steps if info.state is CheckpointState.COMPLETE]
    return [
        Removal(info.folder, info.nbytes, reason)
        for info in complete[:-keep_latest]
        if keep_every is None or info.step is None or info.step % keep_every
    ]


def leftovers(files: Files, checkpoints: Sequence[CheckpointInfo], *, before_secs: float) -> list[Removal]:
    """What no checkpoint consists of, last changed before the given time; no folder with files of others.

    Args:
        files: The folder that checkpoints are in.
        checkpoints: All of :func:`list_checkpoints`.
        before_secs: In Unix time.
    """

    def is_old(modified_secs: float | None) -> bool:
        return modified_secs is not None and modified_secs < before_secs

    removals = [
        Removal(info.folder, info.nbytes, info.problem)
        for info in checkpoints
        if info.state is CheckpointState.INCOMPLETE
        and is_old(info.modified_secs)
        and all(is_checkpoint_file(entry.name) for entry in _entries(files, info.folder))
    ]
    for info in checkpoints:
        if info.state is CheckpointState.COMPLETE and not files.renames:
            used = _used(files, info)
            removals += [
                Removal(f"{info.folder}/{entry.name}", entry.nbytes, "belongs to a save that did not finish")
                for entry in _entries(files, info.folder)
                if attempt_of(entry.name) not in {None, used} and is_old(entry.modified_secs)
            ]
    removals += [
        Removal(entry.name, entry.nbytes, "a probe of what the store can do")
        for entry in _entries(files, "")
        if _PROBE.fullmatch(entry.name) and is_old(entry.modified_secs)
    ]
    removals += [
        Removal(upload.name, 0, "an upload that did not finish", is_upload=True)
        for upload in files.uploads("")
        if is_old(upload.modified_secs)
    ]
    return removals


def _used(files: Files, info: CheckpointInfo) -> str | None:
    """The attempt that a committed checkpoint consists of."""
    manifest = open_checkpoint(files, info.name).manifest
    return None if manifest is None else manifest.attempt
