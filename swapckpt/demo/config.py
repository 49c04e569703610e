"""Settings of the demo, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from swapckpt.config import require_choice, require_int
from swapckpt.demo.model import LlamaShape, parse_count, solve_shape
from swapckpt.demo.records import TrainConfig
from swapckpt.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """What the demo trains and when it saves.

    Attributes:
        params: Wanted size of the model ("10M").
        ranks: Number of processes the model is sharded over.
        device: Device type ("cpu", "cuda", "npu", ...).
        data: Text to train on, or None for the one that ships with CPython.
        out: Folder for pictures, records and logs, and for checkpoints where ``store`` is "disk".
        store: Where checkpoints go: "disk", or "s3" for a server that the demo starts.
        steps: Steps of the reference run; the resumed run ends there too.
        save_every: Steps between two saves.
        batch: Sequences per step, over all ranks (a multiple of ``ranks``).
        time: Tokens per sequence.

    Raises:
        ConfigError: A value is outside its range.
    """

    params: str = "10M"
    ranks: int = 2
    device: str = "cpu"
    data: Path | None = None
    out: Path = Path("demo-output")
    store: str = "disk"
    steps: int = 20
    save_every: int = 4
    batch: int = 8
    time: int = 128
    seed: int = 0
    swap_times: int = 16
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        require_int("ranks", self.ranks, minimum=1)
        require_int("save_every", self.save_every, minimum=1)
        require_int("steps", self.steps, minimum=1)
        require_int("batch", self.batch, minimum=1)
        require_int("time", self.time, minimum=2)
        require_int("swap_times", self.swap_times, minimum=1)
        solve_shape(parse_count(self.params))
        require_int("seed", self.seed, minimum=0)
        require_choice("store", self.store, ["disk", "s3"])
        if self.steps < 2 * self.save_every:
            msg = (
                f"The demo is killed in its second save or later and resumes from the one before: "
                f"steps must be at least 2 x save_every = {2 * self.save_every}, got {self.steps}."
            )
            raise ConfigError(msg)
        if self.device not in ("cpu", default_device()):
            msg = f"device must be 'cpu' or what torch finds here, {default_device()!r}, got {self.device!r}."
            raise ConfigError(msg)
        if self.device != "cpu" and self.ranks > torch.accelerator.device_count():
            count = torch.accelerator.device_count()
            msg = f"ranks must be at most the number of {self.device} devices, {count}, got {self.ranks}."
            raise ConfigError(msg)
        if self.batch % self.ranks:
            msg = f"batch must be a multiple of the {self.ranks} ranks, got {self.batch}."
            raise ConfigError(msg)

    @classmethod
    def quick(cls) -> Self:
        """Small enough for half a minute on two cores."""
        return cls(params="1M", steps=12, save_every=3, batch=4, time=64)

    @property
    def shape(self) -> LlamaShape:
        return solve_shape(parse_count(self.params))

    @property
    def checkpoints(self) -> str:
        return str(self.out / "checkpoints") if self.store == "disk" else "s3://swapckpt-demo/checkpoints"

    @property
    def logs(self) -> Path:
        return self.out / "logs"

    @property
    def timeline(self) -> Path:
        return self.out / "timeline.json"

    @property
    def kill_step(self) -> int:
        """The save to be killed in: a little past the middle, never the first."""
        saves = self.steps // self.save_every
        return max(2, round(saves * 0.6)) * self.save_every

    def reference_run(self) -> TrainConfig:
        """Plain AdamW, nothing swapped, nothing saved."""
        return TrainConfig(
            shape=self.shape,
            data=self.data,
            device=self.device,
            seed=self.seed,
            steps=self.steps,
            batch=self.batch,
            time=self.time,
            learning_rate=self.learning_rate,
        )

    def swapped_run(self) -> TrainConfig:
        """The same run swapped; it saves, and resumes from what it finds saved."""
        return replace(
            self.reference_run(),
            swap_times=self.swap_times,
            checkpoints=self.checkpoints,
            save_every=self.save_every,
            timeline=self.timeline,
        )


def default_device() -> str:
    """The accelerator that torch finds, else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else accelerator.type


def default_ranks(device: str) -> int:
    """Two, or one where the machine has no more accelerators of this type (or none: then that is refused)."""
    return 2 if device == "cpu" else max(1, min(2, torch.accelerator.device_count()))
