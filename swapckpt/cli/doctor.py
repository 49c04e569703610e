"""``swapckpt doctor``."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from swapckpt.cli.options import AsJson
from swapckpt.cli.output import WIDTH, plural, say, say_json
from swapckpt.tools.findings import Level
from swapckpt.tools.machine import look_at_machine
from swapckpt.tools.store import look_at_store

if TYPE_CHECKING:
    from swapckpt.tools.findings import Finding

_STYLES = {Level.OK: "", Level.WARNING: "yellow", Level.PROBLEM: "red"}
_INDENT = 27


def doctor(
    folder: Annotated[
        str | None, typer.Argument(metavar="FOLDER", help="Where checkpoints go: a path or URL.")
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Look at this machine, and at a folder or bucket for checkpoints.

    In FOLDER small files are written, read, and removed again.

    Exit status: 0, or 1 when something is a problem (warnings are none).
    """
    findings = list(look_at_machine())
    if folder is not None:
        findings += look_at_store(folder)
    problems = [finding for finding in findings if finding.level is Level.PROBLEM]
    if as_json:
        say_json({"ok": not problems, "findings": [_record(finding) for finding in findings]})
    else:
        for finding in findings:
            _print(finding)
        warnings = [finding for finding in findings if finding.level is Level.WARNING]
        say(f"{plural(len(problems), 'problem')}, {plural(len(warnings), 'warning')}")
    if problems:
        raise typer.Exit(1)


def _record(finding: Finding) -> dict[str, str]:
    return {
        "name": finding.name,
        "level": finding.level.value,
        "message": finding.message,
        "advice": finding.advice,
    }


def _print(finding: Finding) -> None:
    head = f"{finding.level.value:8} {finding.name:16}  "
    indent = " " * _INDENT
    for text, start in ((finding.message, head), (finding.advice, f"{indent}-> ")):
        for line in textwrap.wrap(
            text, WIDTH, initial_indent=start, subsequent_indent=indent, break_long_words=False
        ):
            say(line, style=_STYLES[finding.level])
