"""What commands print: lines for people, JSON for programs, and progress that does not get in the way."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from swapckpt.report import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

WIDTH = 80
PLAIN_STEPS = 4
"""Lines of progress where there is no terminal."""
PLAIN_MIN_NBYTES = 64 << 20
"""Less is read before anybody wonders how far it is."""


def say(line: str = "", *, style: str = "") -> None:
    """One line on standard output, coloured on a terminal, never wrapped or cut."""
    Console().print(line, style=style or None, markup=False, highlight=False, soft_wrap=True)


def say_json(record: object) -> None:
    """A record on standard output. Numbers that JSON does not have are refused, not invented."""
    typer.echo(json.dumps(record, indent=1, allow_nan=False))


def columns(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> list[str]:
    """Rows as lines with aligned columns; those in ``right`` are aligned there. The first row has titles."""
    widths = [max(len(row[number]) for row in rows) for number in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def entry(name: str, *details: str) -> list[str]:
    """A name and what there is to say about it: on one line where that fits, else one for each."""
    line = f"  {name}: {', '.join(details)}"
    return [line] if len(line) <= WIDTH else [f"  {name}:", *(f"      {detail}" for detail in details)]


def plural(count: int, noun: str) -> str:
    """``"1 tensor"``, ``"1,204 tensors"``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def age(modified_secs: float | None) -> str:
    """Time since a moment, in the largest unit that fits."""
    if modified_secs is None:
        return "-"
    secs = max(0.0, time.time() - modified_secs)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if secs >= 2 * length:
            return f"{secs / length:.0f} {unit}"
    return f"{secs:.0f} s"


@contextmanager
def progress(title: str, total_nbytes: int, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Shows how far work is, on standard error: a bar on a terminal, a few lines elsewhere.

    Gives the function to call with bytes done, from any thread.
    """
    console = Console(stderr=True)
    if quiet or not total_nbytes:
        yield _nothing
    elif not console.is_terminal:
        yield _Lines(title, total_nbytes).add if total_nbytes >= PLAIN_MIN_NBYTES else _nothing
    else:
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        with bar:
            task = bar.add_task(title, total=total_nbytes)
            yield lambda nbytes: bar.advance(task, nbytes)


def _nothing(nbytes: int) -> None:
    del nbytes


class _Lines:
    """Progress as plain lines."""

    def __init__(self, title: str, total_nbytes: int) -> None:
        self._title = title
        self._total_nbytes = total_nbytes
        self._done_nbytes = 0
        self._said = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done_nbytes += nbytes
            step = self._done_nbytes * PLAIN_STEPS // self._total_nbytes
            if step > self._said:
                self._said = step
                percent = 100 * self._done_nbytes // self._total_nbytes
                total = format_nbytes(self._total_nbytes)
                typer.echo(f"{self._title}: {percent} % of {total}", err=True)


def rate(nbytes: int, secs: float) -> str:
    """``"1.25 GB/s"``."""
    return f"{nbytes / max(secs, 1e-9) / 1e9:.3g} GB/s"
