"""Checkpoint folders as stock DCP writes them: data files first, ``.metadata`` last."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_STEP_NAME = re.compile(r"step-(\d+)")


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` lies."""
    return root / f"step-{step}"


def is_complete(folder: Path) -> bool:
    """Whether DCP finished this checkpoint: it renames ``.metadata`` into place after all data."""
    return (folder / ".metadata").exists()


def data_nbytes(folder: Path) -> int:
    """Bytes in the data files so far; 0 while the folder does not exist."""
    return sum(file.stat().st_size for file in folder.glob("*.distcp"))


def complete_steps(root: Path) -> list[int]:
    """Steps with a complete checkpoint under ``root``, oldest first."""
    found = ((_STEP_NAME.fullmatch(folder.name), folder) for folder in root.glob("step-*"))
    return sorted(int(match[1]) for match, folder in found if match and is_complete(folder))
