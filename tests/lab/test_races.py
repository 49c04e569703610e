"""The detector's own judgement on small histories, and the fixture's use on a step."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from swapckpt import StateManager, SwapConfig
from swapckpt.device import CpuDevice
from swapckpt.testing import CheckedDevice, RaceDetector
from tests.core.training import Recipe, Twins

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def device() -> CheckedDevice:
    return CheckedDevice(RaceDetector(), CpuDevice("inline"))


def slab(device: CheckedDevice, nbytes: int = 64) -> torch.Tensor:
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    device.register_host(memory)
    return memory


def test_a_load_that_waits_for_the_allocation_is_ordered(device: CheckedDevice) -> None:
    host, buffer = slab(device), device.allocate(64)
    device.load.wait(device.compute().record())
    device.load.copy([(buffer, host)])
    device.detector.check()


def test_a_load_into_fresh_memory_without_a_wait_is_a_race(device: CheckedDevice) -> None:
    host, buffer = slab(device), device.allocate(64)
    device.load.copy([(buffer, host)])
    with pytest.raises(AssertionError, match="load copy on load is not ordered after write by allocation"):
        device.detector.check()


def test_a_kernel_must_wait_for_the_load(device: CheckedDevice) -> None:
    host, buffer = slab(device), device.allocate(64)
    device.load.wait(device.compute().record())
    device.load.copy([(buffer, host)])
    loaded = device.load.record()
    with device.detector.watching():
        buffer.add_(1)
    assert len(device.detector.races) == 1
    device.detector.races.clear()
    device.compute().wait(loaded)
    with device.detector.watching():
        buffer.add_(1)
    device.detector.check()


def test_a_host_read_needs_a_host_wait_and_stream_order_is_not_enough(device: CheckedDevice) -> None:
    host, buffer = slab(device), device.allocate(64)
    device.offload.wait(device.compute().record())
    device.offload.copy([(host, buffer)])
    done = device.offload.record()
    device.compute().wait(done)
    device.detector.read(host)
    assert "host read" in str(device.detector.races[0])
    device.detector.races.clear()
    done.synchronize(1.0)
    device.detector.read(host)
    device.detector.check()


def test_parts_of_a_block_that_do_not_overlap_do_not_race(device: CheckedDevice) -> None:
    host, buffer = slab(device), device.allocate(64)
    device.load.wait(device.compute().record())
    device.offload.wait(device.compute().record())
    device.load.copy([(buffer[:32], host[:32])])
    device.offload.copy([(host[32:], buffer[32:])])
    device.detector.check()
    device.offload.copy([(host[31:32], buffer[31:32])])
    assert {race.block for race in device.detector.races} == {"a staging buffer", "a mirror slab"}


def test_two_reads_do_not_race_and_a_write_after_them_does(device: CheckedDevice) -> None:
    host, first, second = slab(device), device.allocate(64), device.allocate(64)
    allocated = device.compute().record()
    device.load.wait(allocated)
    device.offload.wait(allocated)
    device.load.copy([(first, host)])
    device.offload.copy([(second, host)])
    device.detector.check()
    device.detector.write(host)
    assert len(device.detector.races) == 2


def test_a_copy_of_memory_that_nobody_holds_is_reported(device: CheckedDevice) -> None:
    host = slab(device)
    device.offload.copy([(host, torch.zeros(64, dtype=torch.uint8))])
    with pytest.raises(AssertionError, match="64 bytes that nobody holds"):
        device.detector.check()


def test_threads_are_ordered_by_the_clock_they_are_started_with(device: CheckedDevice) -> None:
    host, detector = slab(device), device.detector
    detector.write(host)
    started = detector.now(detector.host())

    def read(*, ordered: bool) -> None:
        with detector.watching(after=started if ordered else None):
            host.sum()

    for ordered in (True, False):
        thread = threading.Thread(target=read, kwargs={"ordered": ordered}, name=f"ordered {ordered}")
        thread.start()
        thread.join()
        assert bool(detector.races) is not ordered


def test_a_written_range_forgets_what_it_replaces(device: CheckedDevice) -> None:
    host, detector = slab(device), device.detector
    for _ in range(100):
        detector.write(host)
    assert len(detector._blocks[0].accesses) == 1


def test_steps_a_save_a_load_and_a_snapshot_run_under_the_fixture(
    race_checked: RaceDetector, tmp_path: Path
) -> None:
    twins = Twins(Recipe(cls=torch.optim.AdamW), SwapConfig(swap_times=3, min_numel=16, spare_nbytes=1 << 30))
    assert isinstance(twins.device, CpuDevice)
    manager = StateManager(nn.ParameterList(twins.params), twins.swapped)
    assert isinstance(twins.swap.device, CheckedDevice)
    twins.step(2)
    for value in twins.swapped.state.values():
        race_checked.read(value["exp_avg"])
    dcp.save({"optimizer": manager}, checkpoint_id=tmp_path, no_dist=True)
    with manager.snapshot():
        twins.step()
    dcp.load({"optimizer": manager}, checkpoint_id=tmp_path, no_dist=True)
    race_checked.check()
    assert len(race_checked._blocks) > 0
    stream = twins.swap.device.offload
    tensor = next(iter(twins.swap.table.tensors()))
    bytes_ = tensor.segment.bytes(tensor.region)
    stream.copy([(bytes_, bytes_.clone())])
    race_checked.read(tensor.host)
    assert race_checked.races  # it does look: a read without a wait
    race_checked.races.clear()
    race_checked.unheld.clear()
