"""A simulated accelerator, the torch device "sim": code that runs on a GPU or NPU runs here unmodified.

Its memory has its own addresses and a limit; its streams do their work as late as the program allows, or in
any other legal order; its calls fail when told to. ``csrc/simaccel.cpp`` says how. This is its control.

Loading it changes the process (``torch.accelerator`` exists from then on), so the tests of this folder run in
a process of their own: see ``tests/childprocess.py``.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class Policy(enum.Enum):
    """When the work of a stream is done."""

    EAGER = 0  # when it is submitted
    LAZY = 1  # when something ordered after it needs it
    RANDOM = 2  # at moments drawn from the seed
    MASK = 3  # eagerly on fast streams, lazily on slow ones


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """One reproducible order of execution.

    Bit i of ``slow_mask`` makes the i-th stream slow, in order of creation since ``reset``; the default
    stream is number 0.
    """

    policy: Policy
    seed: int = 0
    slow_mask: int = 0

    def __str__(self) -> str:
        detail = {Policy.RANDOM: f"-{self.seed}", Policy.MASK: f"-{self.slow_mask:b}"}.get(self.policy, "")
        return self.policy.name.lower() + detail


EAGER = Schedule(Policy.EAGER)
LAZY = Schedule(Policy.LAZY)


def masks(num_streams: int) -> list[Schedule]:
    """All 2**n ways to make each of the first n streams fast or slow."""
    return [Schedule(Policy.MASK, slow_mask=mask) for mask in range(2**num_streams)]


def seeds(count: int) -> list[Schedule]:
    return [Schedule(Policy.RANDOM, seed=seed) for seed in range(count)]


def each(schedules: list[Schedule]) -> Iterator[Schedule]:
    """Every schedule in turn, in force on a freshly reset device: the body creates its own streams."""
    for schedule in schedules:
        reset()
        use(schedule)
        yield schedule
    reset()


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """By the allocators' own accounting. Peaks count from ``reset`` or ``reset_peak``."""

    allocated_nbytes: int
    peak_nbytes: int
    reserved_nbytes: int  # allocated and cached
    pinned_nbytes: int
    pinned_peak_nbytes: int


def load() -> None:
    """Makes the device "sim" and ``torch.sim`` exist in this process, for good."""
    if "torch.sim" in sys.modules:
        return
    from torch.utils import backend_registration

    from tests.simaccel import build, device_module

    torch.ops.load_library(str(build.library()))
    backend_registration.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", device_module)
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    sys.modules["torch.sim"] = device_module


def use(schedule: Schedule) -> None:
    """Work submitted from now on is done in this order."""
    configure(policy=schedule.policy, seed=schedule.seed, slow_mask=schedule.slow_mask)


def configure(
    *,
    policy: Policy | None = None,
    seed: int | None = None,
    slow_mask: int | None = None,
    capacity: int | None = None,
    fail_alloc: int | None = None,
    fail_pin: int | None = None,
    fail_copy: int | None = None,
    fail_copy_late: int | None = None,
) -> None:
    """Changes what is given, and leaves the rest.

    Args:
        policy: See ``Policy``.
        seed: Of ``Policy.RANDOM``.
        slow_mask: Of ``Policy.MASK``; see ``Schedule``.
        capacity: Bytes of each device, cached blocks included.
        fail_alloc: The n-th allocation of device memory from now on raises ``torch.OutOfMemoryError``; 0 is
            never, here and below.
        fail_pin: The n-th allocation of pinned memory raises ``RuntimeError``.
        fail_copy: The n-th copy between host and device raises ``RuntimeError`` at once.
        fail_copy_late: The n-th copy fails when it is executed: the device does nothing more, and every later
            launch, record, wait, query and synchronization raises ``RuntimeError``, until ``reset``.
    """
    ops = torch.ops.simaccel
    if policy is not None:
        ops.set_policy(policy.value)
    if seed is not None:
        ops.set_seed(seed)
    if slow_mask is not None:
        ops.set_slow_mask(slow_mask)
    if capacity is not None:
        ops.set_capacity(capacity)
    if fail_alloc is not None:
        ops.fail_nth_alloc(fail_alloc)
    if fail_pin is not None:
        ops.fail_nth_pin(fail_pin)
    if fail_copy is not None:
        ops.fail_nth_copy(fail_copy, False)
    if fail_copy_late is not None:
        ops.fail_nth_copy(fail_copy_late, True)


def slow(stream: torch.Stream, is_slow: bool = True) -> None:
    """Makes one stream slow or fast under ``Policy.MASK``, whatever the mask says."""
    torch.ops.simaccel.set_slow(stream.device_index, stream.stream_id, is_slow)


def reset() -> None:
    """Does all pending work, then: eager, nothing injected, no fault, caches empty, peaks at the present.

    Streams created from now on are number 1, 2, ... of a mask.
    """
    torch.ops.simaccel.reset()


def memory(device_index: int = 0) -> Memory:
    stats = torch.accelerator.memory_stats(device_index)
    pinned, pinned_peak = torch.ops.simaccel.pinned_nbytes()
    return Memory(
        allocated_nbytes=stats["allocated_bytes.all.current"],
        peak_nbytes=stats["allocated_bytes.all.peak"],
        reserved_nbytes=stats["reserved_bytes.all.current"],
        pinned_nbytes=pinned,
        pinned_peak_nbytes=pinned_peak,
    )


def reset_peak() -> None:
    torch.accelerator.reset_peak_memory_stats()
    torch.ops.simaccel.reset_pinned_peak()


def peek(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU copy of the tensor's bytes as they are now: waits for nothing."""
    peeked: torch.Tensor = torch.ops.simaccel.peek(tensor)
    return peeked


def num_pending() -> int:
    """Submitted work, waits included, that has not been done yet."""
    count: int = torch.ops.simaccel.num_pending()
    return count


def virtual_secs() -> float:
    """When all submitted work is done by the virtual clock. It only adds up: compare differences.

    The link has 25 GB/s in each direction, the device's memory 1 TB/s; work is in order within a stream and
    exclusive within a direction of the link and the compute units.
    """
    secs: float = torch.ops.simaccel.virtual_secs()
    return secs


def host_register(tensor: torch.Tensor) -> None:
    """Pins the storage of an ordinary CPU tensor, as ``cudaHostRegister`` does."""
    torch.ops.simaccel.host_register(tensor)


def host_unregister(tensor: torch.Tensor) -> None:
    torch.ops.simaccel.host_unregister(tensor)
