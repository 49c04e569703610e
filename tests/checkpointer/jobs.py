"""A training job with a bit of everything in its checkpoint, repeatable bit for bit, and ways to disturb its
saves."""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn

import swapckpt
from swapckpt.checkpointer import service
from swapckpt.storage import open_files
from tests.manager.training import same_bits
from tests.storage.stores import HookedFiles

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping

    from torch.optim import Optimizer

    from swapckpt.storage.files import Files

SWAP = swapckpt.SwapConfig(swap_times=3, min_numel=16, timeout_secs=60)
SYNC = swapckpt.CheckpointConfig(async_mode="disabled", timeout_secs=60)
ASYNC = swapckpt.CheckpointConfig(timeout_secs=60)
CONFIGS = {"swapped": SWAP, "unswapped": None}
MODES = {"disabled": SYNC, "async": ASYNC}
LAST = 6


class Net(nn.Module):
    """Two matrices that are staged by a thread, small ones that are copied at once, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(96, 192, dtype=torch.float32)  # 72 KiB
        self.norm = nn.BatchNorm1d(192)
        self.down = nn.Linear(192, 96)
        self.unused = nn.Linear(96, 96)  # never has a gradient
        self.head = nn.Linear(96, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.tanh(self.norm(self.up(x)))))


@dataclass(slots=True)
class Job:
    """Everything that a checkpoint of it holds."""

    model: nn.Module
    optimizer: Optimizer
    manager: swapckpt.StateManager
    scheduler: torch.optim.lr_scheduler.LRScheduler
    progress: dict[str, Any] = field(default_factory=lambda: {"tokens": 0, "seen": torch.zeros(3)})

    @classmethod
    def build(
        cls, config: swapckpt.SwapConfig | None = SWAP, *, flat: bool = False, model: nn.Module | None = None
    ) -> Job:
        model = model if model is not None else Net()
        optimizer = torch.optim.AdamW(groups_of(model), lr=0.01, foreach=False, fused=False)
        manager = swapckpt.StateManager(model, optimizer, config, flat=flat)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return cls(model, optimizer, manager, scheduler)

    @property
    def states(self) -> dict[str, object]:
        return {
            "model": self.model,
            "optimizer": self.manager,
            "scheduler": self.scheduler,
            "progress": self.progress,
        }

    def step(self, step: int) -> None:
        """Step ``step``, counted from 1."""
        generator = torch.Generator().manual_seed(step)
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 96, generator=generator)).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.progress["tokens"] += 10 * step
        self.progress["seen"] += step

    def contents(self) -> dict[str, object]:
        """Copies of everything, by name."""
        copied: dict[str, object] = {}
        for name, value in self.model.state_dict().items():
            copied[name] = value.detach().clone()
        for name, param in self.model.named_parameters():
            for key, value in self.optimizer.state.get(param, {}).items():
                copied[f"{name}.{key}"] = value.detach().clone()
        for index, group in enumerate(self.optimizer.param_groups):
            copied |= {f"group {index} {key}": value for key, value in group.items() if key != "params"}
        copied |= {f"scheduler {key}": value for key, value in self.scheduler.state_dict().items()}
        copied |= {"tokens": self.progress["tokens"], "seen": self.progress["seen"].clone()}
        return copied


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with settings of their own and a key that torch does not know, and one without
    parameters."""
    head = [param for name, param in model.named_parameters() if name.startswith("head.")]
    body = [param for name, param in model.named_parameters() if not name.startswith("head.")]
    return [
        {"params": body, "betas": (0.8, 0.95), "tag": "body"},
        {"params": head, "lr": 0.02, "weight_decay": 0.0, "tag": "head"},
        {"params": [], "lr": 0.5, "tag": "nothing yet"},
    ]


def history(*, last: int = LAST) -> list[dict[str, object]]:
    """What plain torch has after each step, from 0."""
    job = Job.build(None)
    found = [job.contents()]
    for step in range(1, last + 1):
        job.step(step)
        found.append(job.contents())
    return found


def differing(found: Mapping[str, object], expected: Mapping[str, object]) -> list[str]:
    """Names of what is not the same, bit for bit."""
    names = found.keys() | expected.keys()
    return sorted(name for name in names if not same_bits(found.get(name), expected.get(name)))


def loaded(
    folder: str | os.PathLike[str],
    step: int | None = None,
    *,
    config: swapckpt.SwapConfig | None = SWAP,
    flat: bool = False,
    **options: bool,
) -> tuple[int | None, Job]:
    """A fresh job after a load, and the step it was given."""
    job = Job.build(config, flat=flat)
    with swapckpt.Checkpointer(folder, job.states, ASYNC) as checkpointer:
        return checkpointer.load(step, **options), job


def saved(folder: str | os.PathLike[str], *steps: int, **options: Any) -> None:
    """Checkpoints of the first steps of a job."""
    job = Job.build(**options)
    with swapckpt.Checkpointer(folder, job.states, SYNC) as checkpointer:
        for step in range(1, max(steps) + 1):
            job.step(step)
            if step in steps:
                checkpointer.save(step)


# --------------------------------------------------------------------------------------------- disturbances


@contextmanager
def hooked(before: Callable[[int, str, str], None]) -> Iterator[list[HookedFiles]]:
    """Checkpointers made inside announce each call on their folder first. Yields their folders."""
    made: list[HookedFiles] = []

    def opened(url: str, **options: Any) -> Files:
        made.append(HookedFiles(open_files(url, **options), before))
        return made[-1]

    with mock.patch.object(service, "open_files", opened):
        yield made


class Gate:
    """Holds the writers of a save until it is opened. A hook for ``hooked``; starts open."""

    def __init__(self, operation: str = "append") -> None:
        self._operation = operation
        self._open = threading.Event()
        self._open.set()
        self.arrived = threading.Event()

    def __call__(self, _number: int, operation: str, _path: str) -> None:
        if operation == self._operation:
            self.arrived.set()
            assert self._open.wait(60), "nobody opened the gate"

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Saves that begin inside come as far as the gate."""
        self.arrived.clear()
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def open(self) -> None:
        self._open.set()


class Failing:
    """Raises ``error`` at the n-th ``operation`` from now on when armed. A hook for ``hooked``."""

    def __init__(self, operation: str, error: BaseException) -> None:
        self._operation, self._error = operation, error
        self._left: int | None = None
        self.counts: dict[str, int] = defaultdict(int)

    def arm(self, number: int = 0) -> None:
        self._left = number

    def __call__(self, _number: int, operation: str, _path: str) -> None:
        self.counts[operation] += 1
        if operation == self._operation and self._left is not None:
            self._left -= 1
            if self._left < 0:
                self._left = None
                raise self._error
