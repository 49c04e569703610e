"""Checkpoints on disk and in object stores: stock DCP format, checksums, and commits that cannot lie.

For DCP: :class:`SwapStorageWriter`, :class:`SwapStorageReader`, :class:`SwapSavePlanner`. For a folder of
checkpoints: :func:`open_files` and what takes its result.
"""

from swapckpt.storage.catalog import (
    CheckpointInfo,
    CheckpointState,
    Removal,
    committed_steps,
    list_checkpoints,
    lost_steps,
    prune,
    refuse_checkpoint,
)
from swapckpt.storage.files import Files, open_files, split_url
from swapckpt.storage.opened import OpenCheckpoint, open_checkpoint
from swapckpt.storage.planner import SwapSavePlanner
from swapckpt.storage.reader import SwapStorageReader
from swapckpt.storage.verification import Problem, verify
from swapckpt.storage.writer import SwapStorageWriter

__all__ = [
    "CheckpointInfo",
    "CheckpointState",
    "Files",
    "OpenCheckpoint",
    "Problem",
    "Removal",
    "SwapSavePlanner",
    "SwapStorageReader",
    "SwapStorageWriter",
    "committed_steps",
    "list_checkpoints",
    "lost_steps",
    "open_checkpoint",
    "open_files",
    "prune",
    "refuse_checkpoint",
    "split_url",
    "verify",
]
