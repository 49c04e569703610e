"""Does swapping work, and what does it cost, on the accelerator of this machine?

    python integration/device_check.py --json result.json

Needs torch, NumPy and this repository, a few minutes at most, and one device that ``torch.accelerator``
finds; and what the checkpoint service requires, to measure how long a save stalls training. It checks that
results are equal as bits, that an idle optimizer holds no device memory and that a step holds what the
formula says; and it measures steps and copies beside plain torch in the same run. Exit code 0: all checks
passed; 1: one failed; 2: there is no accelerator.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import AdamW

sys.path.insert(0, str(Path(__file__).parents[1]))  # it need not be installed

import swapckpt
from swapckpt.device import AcceleratorDevice
from swapckpt.errors import HostMemoryError, StorageError
from swapckpt.memory import HostArena
from swapckpt.plan import lay_out

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from swapckpt.device import CopyPair, Stream

STATE_GB = (0.1, 1.0, 4.0)
LINK_GB = 0.25
NUM_PARAMS = 32
NUM_STEPS = 5
# Step counters have one element: they stay on the device, everything else is swapped, at any scale.
CONFIG = swapckpt.SwapConfig(min_numel=2)
PARITY_SHAPES = ((257, 129), (1000,), (7,), (), (64, 3, 3, 3), (2, 4096), (511, 33))
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "fused, amsgrad": {"fused": True, "amsgrad": True},
    "foreach, amsgrad": {"foreach": True, "amsgrad": True},
}


@dataclass(frozen=True, slots=True)
class Check:
    """One yes or no. ``passed`` is None for what this device or the time did not allow."""

    name: str
    passed: bool | None
    detail: str


@dataclass(frozen=True, slots=True)
class LinkRow:
    """GB/s of one copy at a time and of both directions at once (each), in one kind of host memory."""

    memory: str
    h2d_gbps: float
    d2h_gbps: float
    duplex_h2d_gbps: float
    duplex_d2h_gbps: float


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step over ``state_nbytes`` of state. GB/s are those of the copies while they run."""

    state_nbytes: int
    native_secs: float
    swapped_secs: float
    load_gbps: float
    offload_gbps: float
    save_stall_secs: float | None  # of the training thread in an asynchronous save; None: not measured

    @property
    def ratio(self) -> float:
        return self.swapped_secs / self.native_secs


@dataclass(slots=True)
class Result:
    """Everything that was found."""

    device: str
    torch_version: str
    scale: float
    checks: list[Check] = field(default_factory=list)
    link: list[LinkRow] = field(default_factory=list)
    steps: list[StepRow] = field(default_factory=list)
    secs: float = 0.0


# ------------------------------------------------------------------------------------------------ parts


def matrices(nbytes: int, device: torch.device) -> list[nn.Parameter]:
    """Equal float32 parameters of ``nbytes`` together, with gradients."""
    rows = 64
    columns = max(1, nbytes // (4 * NUM_PARAMS * rows))
    params = []
    for _ in range(NUM_PARAMS):
        param = nn.Parameter(torch.empty(rows, columns, device=device).fill_(0.5))
        param.grad = torch.empty(rows, columns, device=device).fill_(0.01)
        params.append(param)
    return params


class Meter:
    """The device allocator's figures: what was asked for where it tells, else what that was rounded up to."""

    def __init__(self) -> None:
        asked = torch.accelerator.memory_stats().get("requested_bytes.all.current", 0)
        self._kind = "requested_bytes.all" if asked else "allocated_bytes.all"
        self.counter_nbytes = 4 if asked else 512  # a step counter, in this measure

    def current(self) -> int:
        return int(torch.accelerator.memory_stats()[f"{self._kind}.current"])

    def peak_of(self, action: Callable[[], object]) -> int:
        """Highest figure during ``action``."""
        torch.accelerator.reset_peak_memory_stats()
        action()
        torch.accelerator.synchronize()
        return int(torch.accelerator.memory_stats()[f"{self._kind}.peak"])


def timed(action: Callable[[], object], repeats: int = NUM_STEPS) -> float:
    """Median seconds of ``action`` and all it has queued, after two runs that do not count."""
    durations = []
    for _ in range(repeats + 2):
        torch.accelerator.synchronize()
        begin = time.perf_counter()
        action()
        torch.accelerator.synchronize()
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations[2:])


def clear() -> None:
    gc.collect()
    torch.accelerator.empty_cache()


# ----------------------------------------------------------------------------------------------- checks


class Training:
    """AdamW over parameters of odd shapes, with the same values and gradients in every run."""

    def __init__(self, options: dict[str, bool], device: torch.device, *, swapped: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self._device = device
        values = [torch.randn(shape, generator=generator) for shape in PARITY_SHAPES]
        self._params = [nn.Parameter(value.to(device)) for value in values]
        self._optimizer = AdamW(self._params, lr=0.01, weight_decay=0.1, **options)
        self._generator = generator
        if swapped:
            swapckpt.swap_optimizer(self._optimizer, swapckpt.SwapConfig(swap_times=3, min_numel=2))

    def step(self) -> None:
        for param in self._params:
            param.grad = torch.randn(param.shape, generator=self._generator).to(self._device)
        self._optimizer.step()

    def bits(self) -> list[bytes]:
        """Parameters and state."""
        values = [param.detach() for param in self._params]
        for param in self._params:
            values += [self._optimizer.state[param][key] for key in sorted(self._optimizer.state[param])]
        return [value.cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for value in values]


def check_parity(name: str, device: torch.device) -> Check:
    """The swapped optimizer beside the plain one, on this device."""
    label = f"equal as bits: {name}"
    try:
        twins = [Training(IMPLEMENTATIONS[name], device, swapped=swapped) for swapped in (False, True)]
    except RuntimeError as error:
        return Check(label, None, f"torch refuses it here: {error}")
    for number in range(1, NUM_STEPS):
        for each in twins:
            each.step()
        if twins[0].bits() != twins[1].bits():
            return Check(label, False, f"differs after step {number}")
    return Check(label, True, f"{NUM_STEPS - 1} steps")


def check_idle(implementation: str, state_nbytes: int, device: torch.device) -> Check:
    """What stays on the device after a step: nothing but the step counters of fused implementations."""
    clear()
    params = matrices(state_nbytes // 2, device)
    meter = Meter()
    baseline = meter.current()
    options = IMPLEMENTATIONS[implementation]
    optimizer = swapckpt.swap_optimizer(AdamW(params, **options), CONFIG)  # type: ignore[arg-type]
    held = 0
    for _ in range(3):
        optimizer.step()
        held = max(held, meter.current() - baseline)
    counters = NUM_PARAMS * meter.counter_nbytes if "fused" in options else 0
    detail = f"{held:,} B held, {counters:,} B expected"
    return Check(f"idle, {implementation}", held <= counters, detail)


def check_peak(state_nbytes: int, device: torch.device) -> Check:
    """Staging buffers, and what torch's own step needs on top of its state on this device."""
    clear()
    params = matrices(state_nbytes // 2, device)
    meter = Meter()
    baseline = meter.current()
    optimizer = AdamW(params, fused=True)
    optimizer.step()
    resident = meter.current()
    workspace = meter.peak_of(optimizer.step) - resident
    del optimizer
    manager = swapckpt.StateManager(nn.ParameterList(params), AdamW(params, fused=True), CONFIG)
    formula = manager.report(gbps=1.0).staging_peak_nbytes
    (swapped,) = manager.optimizers.values()
    first, *later = [meter.peak_of(swapped.step) - baseline for _ in range(3)]
    # The counters, and a packed copy of them for each buffer and the next one.
    counters = (1 + CONFIG.staging_buffers + 1) * NUM_PARAMS * meter.counter_nbytes
    passed = formula <= max(later) and max(first, *later) <= formula + counters + workspace
    detail = f"{max(later) / formula:.4f} x {formula:,} B, first {first / formula:.4f}"
    return Check("peak of a step by the formula", passed, detail)


# ------------------------------------------------------------------------------------------------- link


def measure_link(nbytes: int, device: torch.device) -> list[LinkRow]:
    """Plain pinned memory, and the memory mirrors lie in, through the same streams."""
    clear()
    accelerator = AcceleratorDevice(device)
    segments = [HostArena(accelerator).allocate(lay_out([nbytes]), own_slab=True) for _ in range(2)]
    mirrors = [segment.bytes(segment.layout.regions[0]) for segment in segments]
    pinned = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    buffers = [accelerator.allocate(nbytes) for _ in range(2)]
    rows = []
    for memory, (source, target) in (("pinned by torch", pinned), ("mirrors", mirrors)):
        load = (accelerator.load, (buffers[0], source))
        offload = (accelerator.offload, (target, buffers[1]))
        both = [_end_secs([load, offload]) for _ in range(NUM_STEPS)]
        secs = [
            statistics.median(_end_secs([load])[0] for _ in range(NUM_STEPS)),
            statistics.median(_end_secs([offload])[0] for _ in range(NUM_STEPS)),
            *(statistics.median(each) for each in zip(*both, strict=True)),
        ]
        rows.append(LinkRow(memory, *(nbytes / each / 1e9 for each in secs)))
    for buffer in buffers:
        accelerator.release(buffer)
    return rows


def _end_secs(copies: Sequence[tuple[Stream, CopyPair]]) -> list[float]:
    """Seconds until each of the copies, submitted together, was done. One of equal length runs before."""
    for stream, pair in copies:
        stream.copy([pair])
    torch.accelerator.synchronize()
    begin = time.perf_counter()
    for stream, pair in copies:
        stream.copy([pair])
    events = [stream.record() for stream, _ in copies]
    ends: dict[int, float] = {}
    while len(ends) < len(events):
        for index, event in enumerate(events):
            if index not in ends and event.query():
                ends[index] = time.perf_counter() - begin
    return [ends[index] for index in range(len(events))]


# ------------------------------------------------------------------------------------------------ steps


def measure_steps(state_nbytes: int, device: torch.device) -> StepRow:
    """The fused step of plain torch, then the swapped one, over the same parameters."""
    clear()
    params = matrices(state_nbytes // 2, device)
    optimizer = AdamW(params, fused=True)
    native_secs = timed(optimizer.step)
    swapckpt.swap_optimizer(optimizer, CONFIG)
    clear()
    manager = swapckpt.StateManager(nn.ParameterList(params), optimizer)
    swapped_secs = timed(optimizer.step)
    save_stall_secs = measure_save_stall(manager)
    with manager.record_timeline() as timeline:
        optimizer.step()
    moved = {"load": [0, 1], "offload": [0, 1]}  # bytes, nanoseconds
    for span in timeline.spans:
        if span.name in moved:
            moved[span.name][0] += span.nbytes
            moved[span.name][1] += span.end_ns - span.begin_ns
    load_gbps, offload_gbps = (nbytes / duration_ns for nbytes, duration_ns in moved.values())
    return StepRow(state_nbytes, native_secs, swapped_secs, load_gbps, offload_gbps, save_stall_secs)


def measure_save_stall(manager: swapckpt.StateManager) -> float | None:
    """Seconds until an asynchronous save of model and optimizer returns: the second one, which has its plan.

    None where the checkpoint service's own requirements are not installed, or the disk is too small.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            states = {"model": manager.model, "optimizer": manager}
            config = swapckpt.CheckpointConfig(sync_files=False, keep_latest=1)
            with swapckpt.Checkpointer(folder, states, config) as checkpointer:
                checkpointer.save(1).wait()
                return checkpointer.save(2).stalled_secs
    except (ImportError, StorageError):
        return None


# ----------------------------------------------------------------------------------------------- report


def table(result: Result) -> str:
    """Eighty columns."""
    lines = [f"{result.device}, torch {result.torch_version}, {result.secs:.0f} s", ""]
    marks = {True: "ok", False: "FAILED", None: "skipped"}
    lines += [f"{marks[each.passed]:8}{each.name:36}{each.detail}"[:80] for each in result.checks]
    lines += ["", f"{'copies, GB/s':20}{'H2D':>12}{'D2H':>12}{'both: H2D':>14}{'both: D2H':>14}"]
    lines += [
        f"{row.memory:20}{row.h2d_gbps:12.2f}{row.d2h_gbps:12.2f}"
        f"{row.duplex_h2d_gbps:14.2f}{row.duplex_d2h_gbps:14.2f}"
        for row in result.link
    ]
    columns = ("state", "native ms", "swapped ms", "ratio", "H2D GB/s", "D2H GB/s", "stall ms")
    lines += ["", "".join(f"{column:>11}" for column in columns)]
    lines += [
        f"{row.state_nbytes / 1e9:8.4g} GB{row.native_secs * 1e3:11.2f}{row.swapped_secs * 1e3:11.2f}"
        f"{row.ratio:11.2f}{row.load_gbps:11.2f}{row.offload_gbps:11.2f}{_millis(row.save_stall_secs):>11}"
        for row in result.steps
    ]
    return "\n".join(lines)


def _millis(secs: float | None) -> str:
    return "-" if secs is None else f"{secs * 1e3:.2f}"


def run(device: torch.device, *, scale: float, limit_secs: float) -> Result:
    """All checks and measurements. What begins after ``limit_secs`` is skipped, and listed as such."""
    begin = time.monotonic()
    result = Result(str(device), torch.__version__, scale)
    result.checks += [check_parity(name, device) for name in IMPLEMENTATIONS]
    smallest_nbytes = int(STATE_GB[0] * scale * 1e9)
    result.checks += [check_idle(name, smallest_nbytes, device) for name in ("fused", "foreach")]
    result.checks.append(check_peak(smallest_nbytes, device))
    result.link += measure_link(int(LINK_GB * scale * 1e9), device)
    for size in STATE_GB:
        state_nbytes = int(size * scale * 1e9)
        label = f"step over {state_nbytes / 1e9:.4g} GB"
        if time.monotonic() - begin > limit_secs:
            result.checks.append(Check(label, None, "no time left"))
            continue
        try:
            result.steps.append(measure_steps(state_nbytes, device))
        except (torch.OutOfMemoryError, HostMemoryError) as error:
            result.checks.append(Check(label, None, str(error)))
    result.secs = time.monotonic() - begin
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--scale", type=float, default=1.0, help="multiplies all sizes (default 1: up to 4 GB)"
    )
    parser.add_argument("--limit-secs", type=float, default=150.0, help="begin nothing after this (150)")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args(arguments)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        print("torch.accelerator finds no device here.", file=sys.stderr)
        return 2
    device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    result = run(device, scale=options.scale, limit_secs=options.limit_secs)
    print(table(result))
    if options.json is not None:
        figures = asdict(result) | {"passed": all(each.passed is not False for each in result.checks)}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if any(each.passed is False for each in result.checks) else 0


if __name__ == "__main__":
    sys.exit(main())
