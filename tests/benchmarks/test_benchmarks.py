"""Every benchmark runs at quick size, fits a terminal and says what it measured. No figure is asserted, but
that nothing is lost.

A process of its own would import torch for longer than most benchmarks take: they run as the main module of a
process that is forked from the server of :mod:`tests.multirank`.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks
from benchmarks._harness import figure

ROOT = Path(benchmarks.__file__).parents[1]
NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))
_CONTEXT = multiprocessing.get_context("forkserver")
TIMEOUT_SECS = 170.0


def run(name: str, *arguments: str, folder: Path) -> str:
    """What ``python -m benchmarks.<name>`` prints."""
    output = folder / "output"
    process = _CONTEXT.Process(target=_be_main, args=(f"benchmarks.{name}", arguments, output))
    process.start()
    process.join(TIMEOUT_SECS)
    code = process.exitcode
    process.kill()
    printed = output.read_text()
    assert code == 0, printed
    return printed


def _be_main(module: str, arguments: tuple[str, ...], output: Path) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.chdir(ROOT)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def test_there_are_benchmarks_and_they_are_listed() -> None:
    assert {"load", "overhead", "schedule", "step"} <= set(NAMES)
    listing = subprocess.run([sys.executable, "-m", "benchmarks"], cwd=ROOT, check=True, capture_output=True)
    assert [line.split()[0] for line in listing.stdout.decode().splitlines()[2:]] == NAMES


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.000"), (0.00096, "0.001"), (0.25, "0.250"), (4.3, "4.30"), (46.94, "46.9"), (187.4, "187")],
)
def test_a_figure_has_about_three_digits_and_never_an_exponent(value: float, text: str) -> None:
    assert figure(value) == text
    assert figure(99_999.0) == "99999"


@pytest.mark.parametrize("name", NAMES)
def test_a_quick_run_prints_a_table_and_writes_its_ratios(name: str, tmp_path: Path) -> None:
    path = tmp_path / "results" / "ratios.json"
    printed = run(name, "--quick", "--json", str(path), folder=tmp_path)
    assert max(map(len, printed.splitlines())) <= 80
    content = json.loads(path.read_text())
    assert list(content) == ["ratios"]
    assert content["ratios"]
    for label, ratio in content["ratios"].items():
        assert set(ratio) == {"value", "goal", "better"}, label
        assert math.isfinite(ratio["value"]), label
        counts_failures = label in {"losses", "wrong_loads"}
        # not `> 0`: a difference of two times may be below zero on a busy machine
        assert (ratio["value"] != 0) is not counts_failures, label
        assert (ratio["goal"] > 0) is not counts_failures, label
        assert ratio["better"] in ("lower", "higher"), label
        assert label in printed
