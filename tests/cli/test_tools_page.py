"""The session of docs/tools.md: its commands print what the page shows, and its JSON keys are those."""

from __future__ import annotations

import json
import re
import shlex
from types import ModuleType
from typing import TYPE_CHECKING

from tests.test_docs import ROOT, blocks_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from tests.cli.conftest import Result

    Cli = Callable[..., Result]

PAGE = ROOT / "docs" / "tools.md"
VARIES = {
    r"[\d.e+-]+ GB/s": "RATE",
    r"\b\d+ (s|min|h|d)\b": "AGE",
    r"\d{4}-\d\d-\d\d \d\d:\d\d": "DATE",
    r"torch \d[\w.+]*": "torch VERSION",
}


def normal(text: str, folder: Path) -> list[str]:
    """Lines without what is different every time, and without alignment."""
    text = text.replace(str(folder), "/home/me")
    for pattern, name in VARIES.items():
        text = re.sub(pattern, name, text)
    return [" ".join(line.split()) for line in text.splitlines()]


def commands(text: str) -> list[tuple[str, str]]:
    """Each command of a console block and what is shown below it."""
    parts = re.split(r"^\$ swapckpt (.*)$", text, flags=re.MULTILINE)[1:]
    return [(command, shown.strip("\n")) for command, shown in zip(parts[::2], parts[1::2], strict=True)]


def test_the_session_is_true(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType("page")
    num_commands = 0
    for block in blocks_of(PAGE.read_text()):
        if block.language == "python":
            exec(compile(block.text, str(PAGE), "exec"), module.__dict__)
        elif block.language == "console":
            for command, shown in commands(block.text):
                num_commands += 1
                result = cli(*shlex.split(command))
                assert normal(result.stdout + result.stderr, tmp_path) == normal(shown, tmp_path), command
    assert num_commands == 11


def test_the_keys_of_json_are_those_of_the_page(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text()
    exec(next(block.text for block in blocks_of(page) if block.language == "python"), {})
    rows = {
        cells[0].strip("` "): re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", cells[1]))
        for line in page.partition("## JSON")[2].splitlines()
        if len(cells := line.strip("| ").split(" | ")) == 3 and cells[0].startswith("`")
    }
    for arguments in (
        ("ls", "runs/a"),
        ("inspect", "runs/a/step-1"),
        ("verify", "runs/a"),
        ("diff", "runs/a/step-0", "runs/b/step-0"),
        ("convert", "runs/a/step-0", "a.pt"),
        ("prune", "runs/a"),
        ("doctor",),
    ):
        assert list(json.loads(cli(*arguments, "--json").stdout)) == rows.pop(arguments[0])
    assert rows == {}
