"""Verification of one checkpoint or of all in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapckpt.errors import CorruptCheckpointError, UnsafePickleError
from swapckpt.storage import CheckpointState, Problem, list_checkpoints, open_checkpoint, verify
from swapckpt.tools.location import Kind, Location, checkpoint_at, folder_at, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Task:
    """A checkpoint to verify. ``nbytes`` is the length of its items, 0 where its metadata does not tell."""

    location: Location
    nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What is at a path: checkpoints to verify, and names of those that are not finished."""

    tasks: list[Task]
    unfinished: list[str]


def plan_at(url: str) -> Plan:
    """What there is to verify at ``url``, a checkpoint or a folder of them.

    Raises:
        CheckpointNotFoundError: There is nothing.
        ConfigError: It is a file.
    """
    if kind_of(url) is not Kind.FOLDER:
        return Plan([_task(checkpoint_at(url))], [])
    files = folder_at(url)
    found = list_checkpoints(files)
    if not found:
        return Plan([_task(checkpoint_at(url))], [])  # or the error that says what is there instead
    unfinished = [info.name for info in found if info.state is CheckpointState.INCOMPLETE]
    committed = [info for info in found if info.state is not CheckpointState.INCOMPLETE]
    return Plan([_task(Location(files, info.name)) for info in committed], unfinished)


def check(task: Task, *, on_progress: Callable[[int], None]) -> list[Problem]:
    """Everything that is wrong with a checkpoint. One that asks for code has that problem.

    Raises:
        CheckpointNotFoundError: It was removed meanwhile.
        StorageError: The store failed.
    """
    try:
        return verify(task.location.files, task.location.name, on_progress=on_progress)
    except UnsafePickleError as error:
        return [Problem("", "", str(error))]


def _task(location: Location) -> Task:
    try:
        checkpoint = open_checkpoint(location.files, location.name, check_lengths=False)
    except (CorruptCheckpointError, UnsafePickleError):
        return Task(location, 0)
    return Task(location, sum(place.length for place in checkpoint.metadata.storage_data.values()))
