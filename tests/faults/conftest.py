"""One healthy run for the whole folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.ranks import prepare
from tests.multirank import RankRunner

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="package")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds whole checkpoints of two steps, and what plain torch has after each step."""
    folder = tmp_path_factory.mktemp("faults")
    RankRunner(folder)(2, prepare, folder)
    return folder
