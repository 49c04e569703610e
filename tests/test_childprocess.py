"""What happens in a child reaches the run that the user sees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
CONFTEST = """
from pathlib import Path
import pytest
from tests.childprocess import ChildProcess

process = ChildProcess(Path(__file__).parent)

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    return process.protocol(item)

def pytest_unconfigure():
    process.close()
"""
TESTS = """
import os
import signal
import pytest

@pytest.mark.parametrize("value", [1, 2])
def test_value(value):
    print("seen", value, os.environ["SWAPCKPT_TESTS_INLINE"])
    assert value == 1

def test_death():
    os.kill(os.getpid(), signal.SIGSEGV)

def test_after():
    pass
"""


OTHER = """
import os

def test_here():
    assert "SWAPCKPT_TESTS_INLINE" not in os.environ
"""


def run(root: Path, *, tests: str) -> str:
    """The output of a run over a folder with ``tests`` and another one without a child."""
    files = {
        "pytest.ini": "[pytest]\n",
        "apart/conftest.py": CONFTEST,
        "apart/test_probe.py": tests,
        "beside/test_other.py": OTHER,
    }
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    environ = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider"]
    done = subprocess.run(command, check=False, cwd=root, env=environ, capture_output=True, text=True)
    assert not done.stderr
    return done.stdout


def test_every_test_has_its_own_result_and_a_crash_fails_one(tmp_path: Path) -> None:
    output = run(tmp_path, tests=TESTS)
    assert "PASSED apart/test_probe.py::test_value[1]" in output
    assert "FAILED apart/test_probe.py::test_value[2] - assert 2 == 1" in output
    assert "seen 2 1" in output
    assert "FAILED apart/test_probe.py::test_death - The process" in output
    assert "was killed by SIGSEGV in this test" in output
    assert "PASSED apart/test_probe.py::test_after" in output
    assert "PASSED beside/test_other.py::test_here" in output
    assert "2 failed, 3 passed" in output


def test_a_process_that_cannot_start_fails_every_test_with_its_output(tmp_path: Path) -> None:
    broken = 'import os\nassert "SWAPCKPT_TESTS_INLINE" not in os.environ, "no collection here"\n' + TESTS
    output = run(tmp_path, tests=broken)
    assert "before the first test" in output
    assert "no collection here" in output
    assert "4 failed, 1 passed" in output
