"""A job whose every bit is known, and its life in a process that is struck while it trains and saves.

[Note: what is right] What a load gives is compared with plain torch that trained to the same step without a
swap, a save or a load: by a digest of all bits of model, optimizer and progress.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

import swapckpt
from swapckpt.errors import SwapCkptError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

    from torch import Tensor

PINNED = "async_with_pinned_mem"
MODES = ("async", PINNED, "disabled")
LIMIT_SECS = 300.0
"""No wait of a save is longer. On a machine that starves it a process may need minutes to start."""

# Both import much, an optimizer the half of torch: once, before processes are forked from this one.
torch.optim.AdamW([torch.empty(0)])
CHECKPOINTER = swapckpt.Checkpointer


class Job:
    """A small model trained by AdamW, repeatable bit for bit.

    Args:
        width: Of its two matrices. A checkpoint has 24 bytes for each of their elements.
        is_swapped: Whether the optimizer's state is ours.
        seed: Of its first parameters.
    """

    def __init__(self, width: int, *, is_swapped: bool = True, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self._width = width
        self.model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=True)
        config = swapckpt.SwapConfig(swap_times=4) if is_swapped else None
        self.manager = swapckpt.StateManager(self.model, self.optimizer, config)
        self.progress = {"step": 0}

    @property
    def states(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.manager, "progress": self.progress}

    def checkpointer(
        self, folder: Path, mode: str = "async", *, verify_on_load: bool = True
    ) -> swapckpt.Checkpointer:
        config = swapckpt.CheckpointConfig(
            async_mode=mode, keep_latest=3, timeout_secs=LIMIT_SECS, verify_on_load=verify_on_load
        )
        return swapckpt.Checkpointer(folder, self.states, config)

    @property
    def steps(self) -> int:
        """Steps done since the beginning of training."""
        return self.progress["step"]

    def step(self) -> None:
        self.progress["step"] += 1
        generator = torch.Generator().manual_seed(self.steps)
        self.optimizer.zero_grad()
        self.model(torch.randn(4, self._width, generator=generator)).square().mean().backward()
        self.optimizer.step()

    def digest(self) -> str:
        """Of every bit that a checkpoint of the job has."""
        found = hashlib.blake2b(str(self.steps).encode(), digest_size=16)
        for tensor in self._tensors():
            found.update(tensor.detach().contiguous().numpy())
        return found.hexdigest()

    def _tensors(self) -> Iterator[Tensor]:
        for param in self.model.parameters():
            yield param
            state = self.optimizer.state.get(param, {})
            yield from (state[key] for key in sorted(state))


class Reference:
    """What plain torch has after each step.

    Args:
        width: Of the job.
        seed: Of the job.
    """

    def __init__(self, width: int, *, seed: int = 0) -> None:
        self._job = Job(width, is_swapped=False, seed=seed)
        self._digests = [self._job.digest()]

    def digest(self, step: int) -> str:
        while len(self._digests) <= step:
            self._job.step()
            self._digests.append(self._job.digest())
        return self._digests[step]


@dataclass(frozen=True, slots=True)
class Begun:
    """A job was born and has loaded the newest checkpoint: of ``step`` (None: there is none)."""

    step: int | None
    digest: str


@dataclass(frozen=True, slots=True)
class Saving:
    """A save begins when it is answered; ``writer`` is the process that writes."""

    step: int
    writer: int | None


@dataclass(frozen=True, slots=True)
class Saved:
    """A save has reported success, ``secs`` after it began: from now on it must not be lost."""

    step: int
    secs: float


@dataclass(frozen=True, slots=True)
class Failed:
    """A save has failed with this error of ours."""

    step: int
    error: str


Event = Begun | Saving | Saved | Failed


def live(parent: Connection, folder: Path, width: int, mode: str) -> None:
    """Load, then train and save until somebody ends this process. Steps go on while a save is written."""
    torch.set_num_threads(1)
    job = Job(width)
    with job.checkpointer(folder, mode) as checkpointer:
        parent.send(Begun(checkpointer.load(), job.digest()))
        while True:
            job.step()
            step = job.steps
            parent.send(Saving(step, checkpointer.runner.pid if checkpointer.runner else None))
            parent.recv()
            begin = time.perf_counter()
            try:
                handle = checkpointer.save(step)
                job.step()
                handle.result()
            except SwapCkptError as error:
                parent.send(Failed(step, str(error)))
            else:
                parent.send(Saved(step, time.perf_counter() - begin))
