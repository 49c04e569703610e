"""Asynchronous saves: what they cost training, ours beside stock DCP's.

A model and its AdamW state, 2 GB together, and one of 20,000 tensors (5,000 parameters of 4 KB, their moments
and steps). "stall" is the time until the call that saves returns; "lost" is what a stretch of training takes
longer when a save is started at its beginning; "spare" is host memory beyond the mirrors. Stock saves an
optimizer that is not swapped, ours is.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
import warnings
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import swapckpt
from benchmarks._harness import Ratio, finish, millis, parser, print_load, print_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

STALL_GOAL_SECS = 0.010
SMALL_LOST_GOAL_SECS = 0.2


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is trained, and how often."""

    title: str
    shapes: tuple[tuple[int, ...], ...]
    compute_secs: float
    repetitions: int


def sizes(*, quick: bool) -> tuple[Sizes, Sizes]:
    """Two GB, or 13 MB; and many small tensors."""
    row = 1024
    large = [(row * count, row) for count in ((1,) if quick else (16, 16, 32, 8, 8, 32, 16, 16, 8, 8))]
    small = ((row,),) * (50 if quick else 5_000)
    repetitions = 1 if quick else 3
    return (
        Sizes("2 GB" if not quick else "13 MB", tuple(large), 0.05 if quick else 0.5, repetitions),
        Sizes(f"{4 * len(small):,} small", small, 0.05 if quick else 0.5, repetitions),
    )


class Trainer:
    """A training loop whose forward and backward are matrix products of a fixed duration."""

    def __init__(self, size: Sizes) -> None:
        self.model = nn.Module()
        for index, shape in enumerate(size.shapes):
            self.model.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape)))
        for param in self.model.parameters():
            param.grad = torch.randn_like(param)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        self._compute_secs = size.compute_secs
        self._matrix = torch.randn(256, 256)

    def step(self) -> None:
        end = time.perf_counter() + self._compute_secs
        while time.perf_counter() < end:
            self._matrix = (self._matrix @ self._matrix).clamp(-1, 1)
        self.optimizer.step()

    @property
    def spare_nbytes(self) -> int:
        return 0

    def steps(self, number: int) -> float:
        """Seconds of that many steps."""
        begin = time.perf_counter()
        for _ in range(number):
            self.step()
        return time.perf_counter() - begin


class Ours(Trainer):
    """Swapped, saved by a Checkpointer."""

    def __init__(self, size: Sizes, folder: Path, *, mode: str) -> None:
        super().__init__(size)
        self.manager = swapckpt.StateManager(self.model, self.optimizer, swapckpt.SwapConfig())
        self.checkpointer = swapckpt.Checkpointer(
            folder,
            {"model": self.model, "optimizer": self.manager},
            swapckpt.CheckpointConfig(async_mode=mode, keep_latest=1),
        )
        self._step = 0

    @property
    def spare_nbytes(self) -> int:
        mirrors = sum(param.nbytes for param in self.model.parameters()) * 2
        return self.manager.memory().host_peak_nbytes - mirrors

    def save(self) -> Callable[[], object]:
        self._step += 1
        return self.checkpointer.save(self._step).result

    def close(self) -> None:
        self.checkpointer.close()


class Stock(Trainer):
    """Not swapped, saved by ``dcp.async_save``."""

    def __init__(self, size: Sizes, folder: Path) -> None:
        super().__init__(size)
        self._folder = folder

    def save(self) -> Callable[[], object]:
        shutil.rmtree(self._folder, ignore_errors=True)
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        saved = dcp.async_save(state, checkpoint_id=self._folder)
        assert isinstance(saved, Future)
        return saved.result

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Figures:
    """Medians of one way to save."""

    stall_secs: float
    save_secs: float
    lost_secs: float
    step_secs: float


def measure(trainer: Ours | Stock, *, repetitions: int) -> Figures:
    for _ in range(2):  # the first creates state, the second plans; both touch memory
        trainer.step()
        trainer.save()()
    step_secs = statistics.median(trainer.steps(1) for _ in range(3))
    stalls, saves, lost = [], [], []
    for _ in range(repetitions):
        begin = time.perf_counter()
        result = trainer.save()
        stalls.append(time.perf_counter() - begin)
        result()
        saves.append(time.perf_counter() - begin)
        number = 2 + int(saves[-1] / step_secs)
        without = trainer.steps(number)
        begin = time.perf_counter()
        result = trainer.save()
        trainer.steps(number)
        lost.append(time.perf_counter() - begin - without)
        result()
    return Figures(statistics.median(stalls), statistics.median(saves), statistics.median(lost), step_secs)


def compare(size: Sizes, root: Path) -> dict[str, Figures]:
    makers: dict[str, Callable[[], Ours | Stock]] = {
        "async": partial(Ours, size, root / "async", mode="async"),
        "pinned": partial(Ours, size, root / "pinned", mode="async_with_pinned_mem"),
        "stock": partial(Stock, size, root / "stock"),
    }
    found: dict[str, Figures] = {}
    rows: list[Sequence[str]] = []
    for name, make in makers.items():
        with ExitStack() as stack:
            trainer = make()
            stack.callback(trainer.close)
            found[name] = figures = measure(trainer, repetitions=size.repetitions)
            times = (figures.stall_secs, figures.save_secs, figures.lost_secs, figures.step_secs)
            rows.append((name, *map(millis, times), f"{trainer.spare_nbytes / 1e6:.0f}"))
    print(f"\n{size.title}")
    print_table(("", "stall ms", "save ms", "lost ms", "step ms", "spare MB"), rows)
    return found


def ratios(large: dict[str, Figures], small: dict[str, Figures]) -> dict[str, Ratio]:
    ours, stock = large["async"], large["stock"]
    allowed = max(0.0, ours.save_secs - ours.step_secs) + 0.05 * ours.save_secs
    few, many = small["pinned"], small["stock"]
    return {
        "stall_over_10_ms": Ratio(ours.stall_secs / STALL_GOAL_SECS, 1.0),
        "stall_over_stock": Ratio(ours.stall_secs / stock.stall_secs, 1 / 50),
        "lost_over_allowed": Ratio(max(ours.lost_secs, 1e-4) / allowed, 1.0),
        "lost_over_stock": Ratio(max(ours.lost_secs, 1e-4) / max(stock.lost_secs, 1e-4), 1.0),
        "small_lost_over_200_ms": Ratio(max(few.lost_secs, 1e-4) / SMALL_LOST_GOAL_SECS, 1.0),
        "small_lost_over_stock": Ratio(max(few.lost_secs, 1e-4) / max(many.lost_secs, 1e-4), 1.0),
    }


def main(arguments: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print_load()
    large, small = sizes(quick=arguments.quick)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        finish(
            ratios(compare(large, Path(folder) / "large"), compare(small, Path(folder) / "small")),
            arguments.json,
        )


if __name__ == "__main__":
    options = parser(__doc__ or "")
    options.add_argument("--folder", type=Path, help="where to save (default: the system's folder)")
    main(options.parse_args())
