"""What every benchmark shares: arguments, interleaved measurements, the table and the JSON."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

Case = TypeVar("Case", bound="Hashable")


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure with its goal. ``better`` says on which side of the goal it should be."""

    value: float
    goal: float
    better: Literal["lower", "higher"] = "lower"

    @property
    def met(self) -> bool:
        return self.value <= self.goal if self.better == "lower" else self.value >= self.goal


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians of one case; ``spread`` is the distance of its quartiles over the median."""

    wall_secs: float
    cpu_secs: float
    spread: float


def parser(description: str) -> argparse.ArgumentParser:
    """``--quick`` and ``--json``, which every benchmark takes."""
    arguments = argparse.ArgumentParser(description=description.splitlines()[0])
    arguments.add_argument("--quick", action="store_true", help="small sizes, few repetitions: seconds")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the ratios to FILE")
    return arguments


def interleave(
    cases: Mapping[Case, Callable[[], object]],
    *,
    repetitions: int,
    warm_ups: int = 2,
    before: Callable[[Case], object] | None = None,
) -> dict[Case, Timing]:
    """Time the cases in turn, so that whatever else the machine does meets all of them alike.

    Every case runs twice unmeasured: the first call may create state, the second one touches its memory.
    ``before`` is called with the name of the case before each of its runs, unmeasured too.
    """

    def prepare(name: Case) -> None:
        if before is not None:
            before(name)

    walls: dict[Case, list[float]] = {name: [] for name in cases}
    cpus: dict[Case, list[float]] = {name: [] for name in cases}
    for _ in range(warm_ups):
        for name, case in cases.items():
            prepare(name)
            case()
    gc.collect()
    gc.disable()
    try:
        for _ in range(repetitions):
            for name, case in cases.items():
                prepare(name)
                cpu, begin = time.process_time(), time.perf_counter()
                case()
                walls[name].append(time.perf_counter() - begin)
                cpus[name].append(time.process_time() - cpu)
    finally:
        gc.enable()
    return {name: _timing(walls[name], cpus[name]) for name in cases}


def _timing(walls: list[float], cpus: list[float]) -> Timing:
    median = statistics.median(walls)
    low, _, high = statistics.quantiles(walls, n=4) if len(walls) > 1 else (median, median, median)
    return Timing(median, statistics.median(cpus), (high - low) / median)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their content; the first one is text, the others are figures."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        first, *others = (
            text.rjust(width) if column else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join((first, *others)).rstrip())


def finish(ratios: Mapping[str, Ratio], path: Path | None) -> None:
    """Print every ratio beside its goal, and write them to ``path``."""
    print()
    rows = [
        (
            name,
            f"{ratio.value:.2f}",
            f"{'<=' if ratio.better == 'lower' else '>='} {ratio.goal:.2f}",
            _verdict(ratio),
        )
        for name, ratio in ratios.items()
    ]
    print_table(("ratio", "value", "goal", ""), rows)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            name: {"value": ratio.value, "goal": ratio.goal, "better": ratio.better}
            for name, ratio in ratios.items()
        }
        path.write_text(json.dumps({"ratios": content}, indent=2) + "\n")


def _verdict(ratio: Ratio) -> str:
    return "met" if ratio.met else "missed"


def print_load() -> None:
    """Say how busy the machine is: on a busy one wall times are upper bounds."""
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} over the last minute")


def figure(value: float) -> str:
    """About three digits, at most five characters (below 100,000): ``0.001``, ``4.30``, ``46.9``, ``187``."""
    digits = next((digits for digits, limit in ((3, 1), (2, 10), (1, 100)) if value < limit), 0)
    return f"{value:.{digits}f}"


def millis(secs: float) -> str:
    return figure(secs * 1e3)
