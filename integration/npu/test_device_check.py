"""The script for a real accelerator finds nothing wrong on the real torch_npu."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from integration import device_check

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format:UserWarning")
def test_it_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = device_check.main(["--scale", "0.0005", "--json", str(tmp_path / "result.json")])
    assert code == 0, capsys.readouterr().out
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["device"] == "npu:0"
    assert all(check["passed"] for check in found["checks"])
    assert len(found["steps"]) == 3
