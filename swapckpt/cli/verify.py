"""``swapckpt verify``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from swapckpt.cli.options import AsJson
from swapckpt.cli.output import entry, plural, progress, rate, say, say_json
from swapckpt.report import format_nbytes
from swapckpt.tools.checks import Plan, check, plan_at

if TYPE_CHECKING:
    from swapckpt.storage import Problem
    from swapckpt.tools.checks import Task

_SHOWN = 20


def verify(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A checkpoint or a folder of them: path or URL.")
    ],
    *,
    show_all: Annotated[
        bool, typer.Option("--all", help=f"Show all problems, not the first {_SHOWN}.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read all data and compare it with its checksums; loads nothing, runs no code.

    Checkpoints of stock torch are compared with the checksums in their archives, which cover less.

    Exit status: 0, 1 when something is wrong, 2 when there is nothing to verify.
    """
    plan = plan_at(path)
    verdicts = [_verify(task, quiet=as_json) for task in plan.tasks]
    if as_json:
        say_json(_record(plan, verdicts))
    else:
        for verdict in verdicts:
            _print(verdict, shown=None if show_all else _SHOWN)
        for name in plan.unfinished:
            say(f"{name}: not finished, not verified", style="yellow")
    if any(verdict.problems for verdict in verdicts):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Verdict:
    task: Task
    problems: list[Problem]
    secs: float


def _verify(task: Task, *, quiet: bool) -> _Verdict:
    began = time.perf_counter()
    with progress(f"verifying {task.location.name}", task.nbytes, quiet=quiet) as on_progress:
        problems = check(task, on_progress=on_progress)
    return _Verdict(task, problems, time.perf_counter() - began)


def _record(plan: Plan, verdicts: list[_Verdict]) -> dict[str, object]:
    return {
        "checkpoints": [
            {
                "checkpoint": verdict.task.location.url,
                "ok": not verdict.problems,
                "nbytes": verdict.task.nbytes,
                "secs": verdict.secs,
                "problems": [
                    {"file": problem.file, "fqn": problem.fqn, "message": problem.message}
                    for problem in verdict.problems
                ],
            }
            for verdict in verdicts
        ],
        "unfinished": plan.unfinished,
    }


def _print(verdict: _Verdict, *, shown: int | None) -> None:
    task, problems = verdict.task, verdict.problems
    read = f"{format_nbytes(task.nbytes)} at {rate(task.nbytes, verdict.secs)}"
    if not problems:
        say(f"{task.location.name}: ok, {read}", style="green")
        return
    say(f"{task.location.name}: {plural(len(problems), 'problem')} in {read}", style="red")
    for problem in problems[:shown]:
        where = ", ".join(part for part in (problem.file, problem.fqn) if part)
        message = problem.message.replace(f"{task.location.url}/", "")
        for line in entry(where, message) if where else [f"  {message}"]:
            say(line)
    if shown is not None and len(problems) > shown:
        say(f"  and {len(problems) - shown:,} more; --all shows them")
