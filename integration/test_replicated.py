"""DDP and HSDP under torchrun: swapped equals unswapped, resumed equals uninterrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from integration.torchrun import torchrun

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("layout", "ranks"), [("ddp", 2), ("hsdp", 4)])
def test_replicas_train_and_resume_with_the_same_bits(tmp_path: Path, layout: str, ranks: int) -> None:
    arguments = ["--layout", layout, "--checkpoint", str(tmp_path / "checkpoint")]
    assert torchrun("replicated.py", *arguments, ranks=ranks).splitlines() == [
        "swapped equals unswapped after 3 steps, 0 bytes on the device",
        "resumed equals uninterrupted after 5 steps",
    ]
