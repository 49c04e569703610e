"""The runtime obeys the plan: what it submits to which stream, behind what, and when it waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from torch import optim

from swapckpt import SwapConfig
from swapckpt.device import CpuDevice
from swapckpt.device.cpu import CpuEvent, CpuStream, _ComputeStream
from swapckpt.optimizer import is_swapped
from tests.core.training import Recipe, Twins, always

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from swapckpt.device import CopyPair, Event

POLICIES = ["inline", "thread", "lazy", "random"]


class LoggingEvent:
    """An event with the number of its stream's record; host waits are logged."""

    def __init__(self, event: Event, name: str, log: list[str]) -> None:
        self.event, self.name, self._log = event, name, log

    def query(self) -> bool:
        return self.event.query()

    def synchronize(self, timeout_secs: float) -> None:
        self._log.append(f"host waits for {self.name}")
        self.event.synchronize(timeout_secs)


class LoggingStream:
    """Passes everything on to a stream of the CPU device and writes it down."""

    def __init__(self, stream: CpuStream | _ComputeStream, log: list[str]) -> None:
        self._stream, self._log = stream, log
        self.records = 0

    @property
    def name(self) -> str:
        return self._stream.name

    def wait(self, event: Event) -> None:
        assert isinstance(event, LoggingEvent)
        self._log.append(f"{self.name} waits for {event.name}")
        self._stream.wait(event.event)

    def copy(self, pairs: Sequence[CopyPair]) -> None:
        self._log.append(f"{self.name} copies {len(pairs)}")
        self._stream.copy(pairs)

    def record(self) -> LoggingEvent:
        event = LoggingEvent(self._stream.record(), f"{self.name}{self.records}", self._log)
        self.records += 1
        return event

    def span(self, name: str, *, batch: int, nbytes: int = 0) -> Any:
        return self._stream.span(name, batch=batch, nbytes=nbytes)


class LoggingDevice(CpuDevice):
    """The CPU device with a log of what it is asked to do. ``start`` begins a new log."""

    def __init__(self, policy: str = "inline") -> None:
        super().__init__(policy)
        self.log: list[str] = []
        self._streams = {
            stream.name: LoggingStream(stream, self.log)
            for stream in (self.load, self.offload, super().compute())
        }
        self.load, self.offload = self._streams["load"], self._streams["offload"]  # type: ignore[assignment]

    def start(self) -> None:
        self.log.clear()
        for stream in self._streams.values():
            stream.records = 0

    def compute(self) -> Any:
        return self._streams["compute"]

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.log.append("allocate")
        return super().allocate(nbytes)

    def release(self, buffer: torch.Tensor) -> None:
        self.log.append("release")
        super().release(buffer)


class LoggingAdamW(optim.AdamW):
    log: list[str] | None = None

    def step(self, closure: Any = None) -> Any:
        if self.log is not None:
            self.log.append("update")
        return super().step(closure)


def logged_step(
    num_batches: int, *, before: int = 1, active: Callable[[int, int], bool] = always, **options: Any
) -> list[str]:
    """What a step of ``num_batches`` batches of one parameter asks of the device, after ``before`` steps."""
    recipe = Recipe(
        cls=LoggingAdamW,
        options={"foreach": False},
        shapes=((40, 40),) * num_batches,
        groups=(tuple(range(num_batches)),),
    )
    device = LoggingDevice()
    twins = Twins(
        recipe, SwapConfig(swap_times=num_batches, staging_buffers=2, **options), device, active=active
    )
    twins.step(before)
    assert is_swapped(twins.swapped)
    device.start()
    twins.swapped.log = device.log  # type: ignore[attr-defined]
    twins.step()
    twins.check()
    return device.log


GOLDEN = {
    1: """
        allocate
        load waits for compute0
        load copies 1
        compute waits for load0
        update
        offload waits for compute1
        offload copies 1
        host waits for offload0
        release
    """,
    2: """
        allocate
        load waits for compute0
        load copies 1
        allocate
        load waits for compute1
        load copies 1
        compute waits for load0
        update
        offload waits for compute2
        offload copies 1
        compute waits for load1
        update
        offload waits for compute3
        offload copies 1
        host waits for offload0
        host waits for offload1
        release
        release
    """,
    3: """
        allocate
        load waits for compute0
        load copies 1
        allocate
        load waits for compute1
        load copies 1
        compute waits for load0
        update
        offload waits for compute2
        offload copies 1
        load waits for offload0
        load copies 1
        compute waits for load1
        update
        offload waits for compute3
        offload copies 1
        compute waits for load2
        update
        offload waits for compute4
        offload copies 1
        host waits for offload0
        host waits for offload1
        host waits for offload2
        release
        release
    """,
}


@pytest.mark.parametrize("num_batches", GOLDEN)
def test_golden_trace_of_a_step(num_batches: int) -> None:
    assert logged_step(num_batches) == [line.strip() for line in GOLDEN[num_batches].strip().splitlines()]


def test_kept_buffers_are_loaded_without_waiting_for_the_compute_stream() -> None:
    log = logged_step(3, before=2, release_staging=False)
    assert not {"allocate", "release"} & set(log)
    assert [line for line in log if line.startswith("load waits")] == ["load waits for offload0"]


def test_per_tensor_transfers_follow_the_same_plan() -> None:
    packed, single = logged_step(3), logged_step(3, packed=False)
    assert [line.replace("copies 2", "copies 1") for line in single] == packed
    assert single != packed


def test_the_first_step_loads_nothing_and_frees_new_state_behind_its_offload() -> None:
    log = logged_step(3, before=0)
    assert not [line for line in log if line.startswith(("load copies", "allocate"))]
    # buffer 0 is next used by batch 2: only then, and not before, the state of batch 0 has to have left
    assert log.index("host waits for offload0") < [i for i, line in enumerate(log) if line == "update"][1]
    assert [line for line in log if line.startswith("host")][-2:] == [
        "host waits for offload1",
        "host waits for offload2",
    ]


def test_batches_without_gradients_copy_nothing() -> None:
    log = logged_step(3, before=1, active=lambda step, index: step == 0 or index == 1)
    assert [line for line in log if "copies" in line] == ["load copies 1", "offload copies 1"]
    assert log.count("allocate") == 1
    assert log.count("update") == 3  # group fields advance whatever has gradients


def test_a_step_without_any_gradient_moves_nothing() -> None:
    log = logged_step(3, active=lambda step, _: step == 0)
    assert not [line for line in log if "copies" in line or line == "allocate"]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_offload_is_complete_when_the_step_returns(policy: str) -> None:
    twins = Twins(
        Recipe(cls=optim.AdamW, shapes=((40, 40),) * 6), SwapConfig(swap_times=6), CpuDevice(policy)
    )
    for _ in range(2):
        twins.step()
        assert twins.device.offload.progress.done == twins.device.offload._seq
        event = CpuEvent(twins.device.offload, twins.device.offload._seq)
        assert event.reached()


def test_an_optimizer_without_parameters_steps() -> None:
    recipe = Recipe(cls=optim.AdamW, shapes=(), groups=((),))
    twins = Twins(recipe)
    twins.step(2)
    twins.check()
    assert twins.swap.table.batches == []
