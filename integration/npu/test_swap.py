"""Swapped optimizers on the real torch_npu: same numbers, memory given back, mirrors pinned, state saved."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

import swapckpt
from integration import npu
from integration.npu.training import Training, differences
from swapckpt.device import AcceleratorDevice
from swapckpt.errors import StateFailedError, StepError, TransferTimeoutError
from swapckpt.optimizer import swap_of
from swapckpt.swap import Phase

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings(
    "ignore:Cannot create tensor with internal format:UserWarning"  # torch_npu's, at AdamW's step counter
)

LOOP, FOREACH, FUSED = {"foreach": False}, {"foreach": True}, {"fused": True}
CONFIGS = {
    "packed": swapckpt.SwapConfig(swap_times=3),
    "each": swapckpt.SwapConfig(swap_times=100, packed=False, min_numel=0, staging_buffers=2),
    "kept": swapckpt.SwapConfig(swap_times=3, release_staging=False),
}
NUM_STEPS = 4


def device_of(training: Training) -> AcceleratorDevice:
    device = swap_of(training.optimizer).device
    assert isinstance(device, AcceleratorDevice)
    return device


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    "options",
    [LOOP, FOREACH, FUSED, FUSED | {"amsgrad": True}],
    ids=["loop", "foreach", "fused", "fused-amsgrad"],
)
def test_equals_the_unswapped_optimizer(options: dict[str, Any], config: swapckpt.SwapConfig) -> None:
    plain, swapped = Training(options), Training(options, config)
    for step in range(NUM_STEPS):
        plain.step()
        swapped.step()
        assert not differences(swapped.values(), plain.values()), step
    assert device_of(swapped).device.type == "npu"
    assert device_of(swapped).ledger.num_loads > 0


def allocated_nbytes() -> int:
    gc.collect()
    return torch.accelerator.memory_allocated()


def test_adoption_takes_existing_state_off_the_device_and_release_brings_it_back() -> None:
    plain, swapped = Training(FOREACH), Training(FOREACH)
    before = allocated_nbytes()
    plain.step(2)
    plain.set_gradients()
    state_nbytes = allocated_nbytes() - before
    swapped.step(2)
    swapped.set_gradients()
    with_state = allocated_nbytes()
    swapckpt.swap_optimizer(swapped.optimizer, swapckpt.SwapConfig(min_numel=0))
    assert allocated_nbytes() <= with_state - state_nbytes * 3 // 4  # gradients are new, too
    assert swapped.optimizer.state[swapped.params[0]]["exp_avg"].device.type == "cpu"
    assert not differences(swapped.values(), plain.values())
    plain.optimizer.step()
    swapped.optimizer.step()
    assert not differences(swapped.values(), plain.values())
    swapckpt.release(swapped.optimizer)
    assert swapped.optimizer.state[swapped.params[0]]["exp_avg"].device.type == "npu"
    plain.step()
    swapped.step()
    assert not differences(swapped.values(), plain.values())


def test_between_steps_the_device_holds_no_state() -> None:
    training = Training(LOOP, swapckpt.SwapConfig(swap_times=3, min_numel=0))
    training.set_gradients()
    training.num_steps = 0
    baseline = allocated_nbytes()
    for _ in range(3):
        training.step()
        training.num_steps = 0  # the same gradients again: they are counted as well
        assert allocated_nbytes() == baseline
    assert device_of(training).ledger.device_peak_nbytes > 0


def test_mirrors_lie_in_registered_memory_that_is_given_back() -> None:
    before = npu.pinned_nbytes()
    training = Training(FUSED, swapckpt.SwapConfig(min_numel=0))
    training.step()
    ledger = device_of(training).ledger
    assert ledger.host_nbytes > 0
    assert npu.pinned_nbytes() - before == ledger.host_nbytes
    state = [value for each in training.optimizer.state.values() for value in each.values()]
    mirrors = [value for value in state if value.device.type == "cpu"]
    assert len(mirrors) > len(training.params)
    assert all(mirror.is_pinned() for mirror in mirrors)
    assert not torch.empty(8).is_pinned()
    del training, state, mirrors
    gc.collect()
    assert npu.pinned_nbytes() == before


def test_a_run_saved_by_stock_dcp_is_resumed(tmp_path: Path) -> None:
    config = swapckpt.SwapConfig(swap_times=3)
    whole, first, second = Training(FUSED), Training(FUSED, config), Training(FUSED, config)
    whole.step(NUM_STEPS + 2)
    first.step(NUM_STEPS)
    saved = first.values()
    dcp.save({"model": first.model.state_dict(), "optimizer": first.manager}, checkpoint_id=tmp_path)
    first.step()  # what was saved is on disk
    target = {"model": second.model.state_dict(), "optimizer": second.manager}
    dcp.load(target, checkpoint_id=tmp_path)
    assert not differences(second.values(), saved)
    second.num_steps = NUM_STEPS
    second.step(2)
    assert not differences(second.values(), whole.values())


def test_an_unswapped_optimizer_loads_what_a_swapped_one_saved(tmp_path: Path) -> None:
    swapped, plain = Training(LOOP, swapckpt.SwapConfig(swap_times=3)), Training(LOOP)
    swapped.step(2)
    dcp.save({"optimizer": swapped.manager}, checkpoint_id=tmp_path)
    dcp.load({"optimizer": plain.manager}, checkpoint_id=tmp_path)
    state = {name: value for name, value in swapped.values().items() if "." in name}
    assert not differences({name: value for name, value in plain.values().items() if "." in name}, state)
    assert plain.optimizer.state[plain.params[0]]["exp_avg"].device.type == "npu"


def test_copies_that_hang_are_given_up_and_nothing_is_published() -> None:
    """As when the device does not answer: the step ends within its bound, and says which copies."""
    training = Training(LOOP, swapckpt.SwapConfig(swap_times=3, min_numel=0, timeout_secs=0.2))
    training.set_gradients()
    with npu.held_copies():
        with pytest.raises(StepError, match=r"offload.*did not complete within 0\.2 s") as raised:
            training.optimizer.step()
        assert isinstance(raised.value.__cause__, TransferTimeoutError)
        assert swap_of(training.optimizer).phase is Phase.FAILED
        with pytest.raises(StateFailedError):
            training.manager.state_dict()
        with pytest.raises(StateFailedError):
            training.optimizer.step()
    torch.accelerator.synchronize()
