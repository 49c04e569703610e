"""What the ranks are told (:class:`TrainConfig`) and what they report (:data:`Event`), as JSON both ways."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from swapckpt.demo.model import LlamaShape

DIE_WITH = "--die-with"
"""Option of the trainer: PID of the process that it must not outlive."""

KEEP_LATEST = 2
"""Checkpoints that a run keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One training run. ``checkpoints`` None: never save nor resume. ``swap_times`` None: do not swap."""

    shape: LlamaShape
    data: Path | None
    device: str
    seed: int
    steps: int
    batch: int  # sequences per step, over all ranks
    time: int  # tokens per sequence
    learning_rate: float
    swap_times: int | None = None
    checkpoints: str | None = None  # path or URL
    save_every: int = 0
    timeline: Path | None = None

    def to_json(self) -> str:
        """JSON text for the ranks' command line."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        """The record that :meth:`to_json` wrote."""
        fields = json.loads(text)
        fields["shape"] = LlamaShape(**fields["shape"])
        for name in ("data", "timeline"):
            fields[name] = None if fields[name] is None else Path(fields[name])
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Started:
    """Training begins after step ``start`` (0: from scratch)."""

    start: int
    device: str


@dataclass(frozen=True, slots=True)
class Stepped:
    """Step ``step`` is done.

    ``loss_hex`` is the loss over all ranks with every bit of it. The bytes are those of optimizer state on
    rank 0: on the device now (between two steps), the most it ever was, and in host mirrors.
    """

    step: int
    loss_hex: str
    secs: float
    device_nbytes: int
    device_peak_nbytes: int
    host_nbytes: int

    @property
    def loss(self) -> float:
        return float.fromhex(self.loss_hex)


@dataclass(frozen=True, slots=True)
class Saving:
    """The save of step ``step`` has begun, and the one before it is committed."""

    step: int


@dataclass(frozen=True, slots=True)
class Saved:
    """The checkpoint of step ``step`` is committed, ``secs`` after its save began.

    Of these the training thread was kept for ``stalled_secs``.
    """

    step: int
    stalled_secs: float
    secs: float


@dataclass(frozen=True, slots=True)
class Finished:
    """All steps are done. Digests are over the bytes of every rank's shards, in rank and parameter order."""

    params_digest: str
    state_digest: str


Event = Started | Stepped | Saving | Saved | Finished
_EVENTS: dict[str, type[Event]] = {cls.__name__: cls for cls in (Started, Stepped, Saving, Saved, Finished)}


def encode(event: Event) -> str:
    """One line of JSON."""
    return json.dumps({"event": type(event).__name__, **asdict(event)})


def decode(line: str) -> Event:
    """The event that :func:`encode` wrote."""
    fields = json.loads(line)
    return _EVENTS[fields.pop("event")](**fields)
