"""The lab tests itself: the code is clean, and each mutant that lacks one wait is flagged by some oracle."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab.mutants import MODULES, mutants

EQUIVALENT: dict[str, str] = {}
"""Mutants that change nothing, by name, with the proof. Every other mutant must be flagged."""


def test_every_module_that_orders_work_has_mutants() -> None:
    found = {mutant.module for mutant in mutants()}
    assert found == set(MODULES)
    names = [mutant.name for mutant in mutants()]
    assert len(set(names)) == len(names)
    assert len(names) >= 35


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_the_code_is_clean_and_every_mutant_is_flagged() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.lab"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=380,
    )
    verdicts = {record["mutant"]: record["flagged"] for record in map(json.loads, run.stdout.splitlines())}
    assert verdicts.pop("the code as it is") == ""
    assert set(verdicts) == {mutant.name for mutant in mutants()}
    survivors = {name for name, flagged in verdicts.items() if not flagged}
    assert survivors == set(EQUIVALENT)
