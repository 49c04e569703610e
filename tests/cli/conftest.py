"""The command line, in this process (fast) and as a process of its own (as users run it)."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from swapckpt.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable

ENVIRONMENT = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """``cli("plan", "--json")``: how ``swapckpt plan --json`` ends at 80 columns, run in this process."""

    def run(*arguments: str) -> Result:
        for name, value in ENVIRONMENT.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["swapckpt", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
def cli_process() -> Callable[..., Result]:
    """The same in a process of its own."""

    def run(*arguments: str) -> Result:
        process = subprocess.run(
            [sys.executable, "-m", "swapckpt.cli", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **ENVIRONMENT},
        )
        return Result(process.returncode, process.stdout, process.stderr)

    return run
