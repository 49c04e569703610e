"""A run loses a rank by SIGKILL; what it has saved goes on, bit for bit, on any number of ranks."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from integration.torchrun import torchrun

if TYPE_CHECKING:
    from pathlib import Path


def fsdp2_resume(
    checkpoints: Path, *arguments: str, ranks: int, last: int = 4, fails: bool = False
) -> list[str]:
    options = ["--checkpoints", str(checkpoints), "--last", str(last), *arguments]
    return torchrun("fsdp2_resume.py", *options, ranks=ranks, fails=fails).splitlines()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    lines = fsdp2_resume(tmp_path_factory.mktemp("whole"), ranks=2)
    assert [line.split()[:2] for line in lines] == [["saved", str(step)] for step in range(1, 5)]
    return lines


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, uninterrupted: list[str]) -> Path:
    """Checkpoints of two steps, by a run that died in the third."""
    checkpoints = tmp_path_factory.mktemp("killed")
    assert fsdp2_resume(checkpoints, "--kill-in", "3", ranks=2, fails=True) == uninterrupted[:2]
    return checkpoints


def test_the_same_ranks_go_on_bit_for_bit(killed: Path, uninterrupted: list[str], tmp_path: Path) -> None:
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    loaded, *rest = fsdp2_resume(tmp_path, ranks=2)
    assert loaded == uninterrupted[1].replace("saved", "loaded")
    assert rest == uninterrupted[2:]


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_loads_the_same_bits(
    killed: Path, uninterrupted: list[str], tmp_path: Path, ranks: int
) -> None:
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    loaded, saved = fsdp2_resume(tmp_path, ranks=ranks, last=3)
    assert loaded == uninterrupted[1].replace("saved", "loaded")
    assert saved.startswith("saved 3 ")
