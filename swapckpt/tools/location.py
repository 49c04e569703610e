"""What a path or URL given by a user is: one checkpoint, a folder of them, a file, or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from swapckpt.errors import CheckpointNotFoundError, ConfigError, StorageError, listing
from swapckpt.storage import list_checkpoints, open_files, split_url
from swapckpt.storage.commit import is_checkpoint_file, located
from swapckpt.storage.metadata import NAME as METADATA

if TYPE_CHECKING:
    from swapckpt.storage import Files
    from swapckpt.storage.files import Entry

_NAMED = 5
"""Checkpoints that a message names."""


class Kind(Enum):
    """What is at a path or URL."""

    CHECKPOINT = "a checkpoint"
    FOLDER = "a folder"
    FILE = "a file"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Location:
    """One checkpoint: the folder that it is in, and its name there."""

    files: Files
    name: str

    @property
    def url(self) -> str:
        """For messages."""
        return f"{self.files.url}/{self.name}"


def kind_of(url: str) -> Kind:
    """What is at ``url``. A checkpoint is one also between the two renames of an overwrite."""
    inside = _entries(open_files(url))
    if any(entry.name == METADATA for entry in inside):
        return Kind.CHECKPOINT
    try:
        parent, name = split_url(url)
    except StorageError:  # a bucket, or the root
        return Kind.FOLDER
    above = open_files(parent)
    # Stores list nothing for a file, and for what does not exist.
    beside = [] if inside else _entries(above)
    entry = next((each for each in beside if each.name == name), None)
    if entry is not None and not entry.is_folder:
        return Kind.FILE
    if (inside or beside) and located(above, name) is not None:
        return Kind.CHECKPOINT
    return Kind.FOLDER if inside or entry is not None else Kind.NOTHING


def _entries(files: Files) -> list[Entry]:
    """What is in a folder; nothing where it is none."""
    try:
        return files.entries("")
    except FileNotFoundError:
        return []
    except StorageError as error:
        if isinstance(error.__cause__, NotADirectoryError):
            return []
        raise


def folder_at(url: str) -> Files:
    """The folder of checkpoints at ``url``.

    Raises:
        ConfigError: It is a checkpoint itself, or a file.
        CheckpointNotFoundError: There is nothing.
    """
    kind = kind_of(url)
    if kind is Kind.CHECKPOINT:
        raise ConfigError(
            f"{url} is a checkpoint, not a folder of checkpoints. Name the folder above it, or look into it "
            f"with: swapckpt inspect {url}"
        )
    if kind is Kind.FILE:
        raise ConfigError(f"{url} is a file, not a folder of checkpoints.")
    if kind is Kind.NOTHING:
        raise CheckpointNotFoundError(f"There is nothing at {url}.")
    return open_files(url)


def checkpoint_at(url: str) -> Location:
    """The checkpoint at ``url``.

    Raises:
        ConfigError: It is a folder of checkpoints (which are named), or a file.
        CheckpointNotFoundError: There is nothing, or what a save left that did not finish.
    """
    kind = kind_of(url)
    if kind is Kind.FILE:
        raise ConfigError(f"{url} is a file, not a checkpoint.")
    if kind is Kind.NOTHING:
        raise CheckpointNotFoundError(f"There is nothing at {url}.")
    if kind is Kind.FOLDER:
        files = open_files(url)
        found = [info.name for info in list_checkpoints(files)]
        if found:
            more = f" (and {len(found) - _NAMED} more)" if len(found) > _NAMED else ""
            raise ConfigError(
                f"{url} is a folder of checkpoints, not a checkpoint. Name one of them{more}:"
                f"{listing(found[-_NAMED:])}"
            )
        names = [entry.name for entry in files.entries("")]
        if not any(map(is_checkpoint_file, names)):
            raise CheckpointNotFoundError(f"{url} has {len(names)} entries, and none is of a checkpoint.")
    return Location(*_split(url))


def _split(url: str) -> tuple[Files, str]:
    parent, name = split_url(url)
    return open_files(parent), name
