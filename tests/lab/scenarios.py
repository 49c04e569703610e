"""What every mutant is run through: all oracles of the lab on the same few steps."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from swapckpt import SwapConfig
from swapckpt.device import CpuDevice
from swapckpt.errors import StepError, TransferTimeoutError
from swapckpt.manager import StateManager
from swapckpt.optimizer import guard_with, swap_of
from swapckpt.testing import CheckedDevice, RaceDetector, WatchedGate
from tests.core.devices import FailingDevice
from tests.core.training import Recipe, Twins, always, bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from swapckpt import Snapshot

SHAPES = ((40, 50), (64, 32), (7,), (33, 65), (50, 41))
RECIPE = Recipe(cls=torch.optim.AdamW, options={"foreach": False}, shapes=SHAPES)
STAGING_BUFFERS = 2
TIMEOUT_SECS = 2.0


def config(**options: int) -> SwapConfig:
    """Fewer buffers than batches: every buffer is used again in each step."""
    settings = {"swap_times": 4, "min_numel": 16, "staging_buffers": STAGING_BUFFERS, **options}
    return SwapConfig(timeout_secs=TIMEOUT_SECS, **settings)  # type: ignore[arg-type]


def late(step: int, index: int) -> bool:
    """Parameter 4 has its first gradient in step 2, when its buffer has already served another batch; in the
    batch of parameters 2 and 3 only one moves."""
    if index == 4:
        return step >= 2
    return index != 2 or step % 2 == 1


def tensors(tree: object) -> Iterator[torch.Tensor]:
    """All tensors of a state dict, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from tensors(value)


def assert_memory(twins: Twins) -> None:
    """Nothing on the device between steps, and never more than the buffers' worth of the largest batch."""
    ledger = twins.swap.device.ledger
    assert ledger.device_nbytes == 0
    assert ledger.device_peak_nbytes <= STAGING_BUFFERS * twins.swap.table.largest_batch_nbytes
    assert ledger.device_peak_nbytes > 0


def steps_are_ordered() -> None:
    """Race detector: steps that create, load and offload state, and a save right after each."""
    for active in (always, late):
        detector = RaceDetector()
        device = CheckedDevice(detector, CpuDevice("inline"))
        twins = Twins(RECIPE, config(), device, active=active)  # type: ignore[arg-type]
        manager = StateManager(nn.ParameterList(twins.params), twins.swapped)
        with detector.watching():
            for _ in range(5):
                twins.step()
                for tensor in tensors(manager.state_dict()):
                    detector.read(tensor, "save")
        twins.check()
        assert_memory(twins)
        detector.check()


def snapshots_are_ordered(spare_nbytes: int, *, by_tensor: bool) -> None:
    """Race detector: readers in threads of their own while steps overwrite, redirected or waiting."""
    detector = RaceDetector()
    device = CheckedDevice(detector, CpuDevice("inline"))
    twins = Twins(RECIPE, config(spare_nbytes=spare_nbytes), device, active=late)  # type: ignore[arg-type]
    guard_with(twins.swapped, WatchedGate(swap_of(twins.swapped).gate, detector))
    manager = StateManager(nn.ParameterList(twins.params), twins.swapped)
    problems: list[str] = []
    with detector.watching():
        twins.step(3)
        for number in range(3):
            snapshot = manager.snapshot()
            expected = [bits(tensor) for tensor in tensors(snapshot.state_dict)]
            started = detector.now(detector.host())
            reader = threading.Thread(
                target=_read,
                args=(detector, snapshot, expected),
                kwargs={"started": started, "problems": problems, "by_tensor": by_tensor},
                name=f"reader {number}",
            )
            reader.start()
            twins.step()
            reader.join(TIMEOUT_SECS)
            detector.join(detector.host(), detector.now(f"host thread reader {number}"))
    twins.check()
    assert not problems, problems
    detector.check()


class Releasing(torch.optim.AdamW):
    """Calls ``release`` in its third call, once."""

    release: Callable[[], None] | None = None
    _num_calls = 0

    def step(self, closure: object = None) -> object:  # type: ignore[override]
        self._num_calls += 1
        if self.release is not None and self._num_calls == 3:
            self.release()
        return super().step(closure)  # type: ignore[arg-type]


def a_spare_is_written_by_the_host_within_the_step() -> None:
    """Race detector: two parameters in two slices each. The mirrors of the first are redirected, released by
    their reader, and become the spare of the second, into which the host copies what is not stepped yet."""
    detector = RaceDetector()
    device = CheckedDevice(detector, CpuDevice("inline"))
    recipe = Recipe(cls=Releasing, options={"foreach": False}, shapes=((64, 64), (64, 64)))
    settings = config(spare_nbytes=1 << 30, min_slice_numel=1, split_oversized=True)
    twins = Twins(recipe, settings, device)  # type: ignore[arg-type]
    manager = StateManager(nn.ParameterList(twins.params), twins.swapped)
    swapped = twins.swapped
    assert isinstance(swapped, Releasing)
    with detector.watching():
        twins.step(2)
        snapshot = manager.snapshot()
        state = snapshot.state_dict["state"]
        assert isinstance(state, dict)
        first = swap_of(swapped).table.batches[0].segments

        def release() -> None:
            for tensor in tensors(state["0"]):
                snapshot.written(tensor)

        before = list(first)
        swapped._num_calls, swapped.release = 0, release
        twins.step()
        snapshot.close()
        assert swap_of(swapped).table.batches[1].segments == before, "the spare was not used again"
        swapped.release = None
        twins.step()
    twins.check()
    detector.check()


def _read(
    detector: RaceDetector,
    snapshot: Snapshot,
    expected: list[bytes],
    *,
    started: dict[str, int],
    problems: list[str],
    by_tensor: bool,
) -> None:
    try:
        with detector.watching(after=started), snapshot:
            for tensor, values in zip(tensors(snapshot.state_dict), expected, strict=True):
                time.sleep(0.003)
                detector.read(tensor, "snapshot")
                if bits(tensor) != values:
                    problems.append(f"torn: {tuple(tensor.shape)}")
                if by_tensor:
                    snapshot.written(tensor)
            if by_tensor and snapshot.segments:
                problems.append("everything is written, and segments are still leased")
    except Exception as error:  # noqa: BLE001 - no thread's result is lost
        problems.append(repr(error))


def values_are_right(policy: str, seed: int) -> None:
    """Values: hostile schedules that delay copies as long as nobody waits for them."""
    twins = Twins(RECIPE, config(), CpuDevice(policy, seed=seed, timeout_secs=TIMEOUT_SECS), active=late)
    for _ in range(5):
        twins.step()
        twins.check()
    assert_memory(twins)


def failures_are_seen(policy: str) -> None:
    """A copy that fails is an error of the step and batch that submitted it; the device rests after it."""
    device = FailingDevice(policy)
    twins = Twins(RECIPE, config(), device)
    twins.step(2)
    device.offload.copies_left = 1
    twins.set_gradients()
    with pytest.raises(StepError, match=r"batch 1 \(offload"):
        twins.swapped.step()
    for stream in (device.load, device.offload):
        assert stream.record().reached(), f"{stream.name} is not at rest, or not without error"


def a_device_that_hangs_is_not_at_rest() -> None:
    """reset() must not say that memory is safe while a copy still runs."""
    device = CpuDevice("thread", timeout_secs=0.05)
    go_on = threading.Event()
    device.load._submit(lambda: (go_on.wait(TIMEOUT_SECS), None)[1])
    with pytest.raises(TransferTimeoutError):
        device.reset()
    go_on.set()


def a_slow_device_is_waited_for() -> None:
    """reset() returns when a copy that takes its time is done, and not before."""
    device = CpuDevice("thread", timeout_secs=TIMEOUT_SECS)
    device.load._submit(lambda: time.sleep(0.1))
    event = device.load.record()
    device.reset()
    assert event.reached()


def polling_ends() -> None:
    """A loop that only asks makes progress, also where copies run as late as legal."""
    device = CpuDevice("lazy")
    target, source = torch.zeros(4, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)
    device.offload.copy([(target, source)])
    event = device.offload.record()
    assert any(event.query() for _ in range(100)), "polling never ends"
    assert bits(target) == bits(source)


def run_all() -> None:
    """Raise if any oracle finds anything."""
    torch.set_num_threads(1)
    steps_are_ordered()
    for spare_nbytes in (0, 1 << 30):
        for by_tensor in (True, False):
            snapshots_are_ordered(spare_nbytes, by_tensor=by_tensor)
    a_spare_is_written_by_the_host_within_the_step()
    for policy, seed in (("lazy", 0), ("random", 0), ("random", 1), ("random", 2), ("thread", 0)):
        values_are_right(policy, seed)
    for policy in ("inline", "thread", "lazy"):
        failures_are_seen(policy)
    a_device_that_hangs_is_not_at_rest()
    a_slow_device_is_waited_for()
    polling_ends()
