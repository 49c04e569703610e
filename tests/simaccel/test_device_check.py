"""The script for a real accelerator runs here, finds nothing wrong, and finds what is wrong."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import TYPE_CHECKING

from integration import device_check
from integration.device_check import Check, LinkRow, Result, StepRow
from swapckpt import pipeline
from swapckpt.device.accelerator import AcceleratorStream
from swapckpt.memory import StagingRing
from swapckpt.plan import StepPlan
from tests import simaccel as sim

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from swapckpt.device import Device

TINY = ("--scale", "0.002")
CHECKS = [
    *("equal as bits: fused", "equal as bits: foreach"),
    *("equal as bits: fused, amsgrad", "equal as bits: foreach, amsgrad"),
    *("idle, fused", "idle, foreach", "peak of a step by the formula"),
]


def run(folder: Path, *arguments: str) -> tuple[int, dict[str, bool | None]]:
    """Exit code, and the checks with their outcome."""
    code = device_check.main([*TINY, "--json", str(folder / "result.json"), *arguments])
    found = json.loads((folder / "result.json").read_text())
    assert found["passed"] == (code == 0)
    return code, {check["name"]: check["passed"] for check in found["checks"]}


def test_it_passes_and_measures_copies_and_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, checks = run(tmp_path)
    assert (code, checks) == (0, dict.fromkeys(CHECKS, True)), capsys.readouterr().out
    found = json.loads((tmp_path / "result.json").read_text())
    assert [row["memory"] for row in found["link"]] == ["pinned by torch", "mirrors"]
    assert [row["state_nbytes"] for row in found["steps"]] == [200_000, 2_000_000, 8_000_000]
    figures = [value for row in found["link"] + found["steps"] for value in row.values()]
    assert all(value > 0 for value in figures if not isinstance(value, str))
    printed = capsys.readouterr().out
    assert all(name in printed for name in CHECKS)


def test_buffers_that_stay_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = dataclasses.replace(device_check.CONFIG, release_staging=False)
    monkeypatch.setattr(device_check, "CONFIG", kept)
    code, checks = run(tmp_path, "--limit-secs", "0")
    assert code == 1
    assert (checks["idle, fused"], checks["idle, foreach"]) == (False, False)


def test_more_buffers_than_the_formula_has_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Larger(StagingRing):
        def __init__(self, device: Device, num_slots: int, *, timeout_secs: float) -> None:
            super().__init__(device, num_slots + 1, timeout_secs=timeout_secs)

    monkeypatch.setattr(pipeline, "StagingRing", Larger)
    monkeypatch.setattr(pipeline, "StepPlan", lambda batches, buffers: StepPlan(batches, buffers + 1))
    code, checks = run(tmp_path, "--limit-secs", "0")
    assert (code, checks["peak of a step by the formula"]) == (1, False)


def test_a_missing_wait_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sim.use(sim.LAZY)
    monkeypatch.setattr(AcceleratorStream, "wait", lambda self, event: None)
    code, checks = run(tmp_path, "--limit-secs", "0")
    assert code == 1
    assert checks["equal as bits: fused"] is False


def test_what_the_time_does_not_allow_is_listed(tmp_path: Path) -> None:
    code, checks = run(tmp_path, "--limit-secs", "0")
    assert code == 0
    assert [name for name, passed in checks.items() if passed is None] == [
        "step over 0.0002 GB",
        "step over 0.002 GB",
        "step over 0.008 GB",
    ]


def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    sim.configure(capacity=14_000_000)
    code, checks = run(tmp_path)
    assert code == 0
    assert checks["step over 0.008 GB"] is None
    assert "step over 0.002 GB" not in checks


def test_the_table_has_eighty_columns() -> None:
    checks = [Check(name, True, "99.9999 x 999,999,999,999 B, first 99.9999") for name in CHECKS]
    link = [LinkRow("pinned by torch", 1234.5, 1234.5, 1234.5, 1234.5)]
    steps = [StepRow(4_000_000_000, 99.99, 99.99, 1234.5, 1234.5, 99.99)]
    lines = device_check.table(Result("cuda:0", "2.13.0", 1.0, checks, link, steps, 240.0)).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) > 12


def test_it_needs_only_torch_and_an_accelerator(tmp_path: Path) -> None:
    """Without a device it says so, and none of what only development needs has been imported."""
    absent = [
        "pytest",
        "rich",
        "typer",
        "fsspec",
        "tenacity",
        "psutil",
        "crc32c",
        "safetensors",
        "hypothesis",
    ]
    code = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({absent}))
sys.path[:] = [path for path in sys.path if path]
runpy.run_path({device_check.__file__!r}, run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "torch.accelerator finds no device here.\n")
