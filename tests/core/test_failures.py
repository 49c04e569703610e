"""Case S10: what fails inside a step is named with its batch, tears nothing silently, can be recovered."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import swapckpt
from swapckpt import StateManager, SwapConfig
from swapckpt.device import CpuDevice
from swapckpt.errors import (
    AdoptionError,
    PhaseError,
    StateFailedError,
    StepError,
    TransferError,
    TransferTimeoutError,
)
from swapckpt.swap import Phase
from tests.core.devices import FailingDevice
from tests.core.optimizers import Exploding
from tests.core.training import Recipe, Twins, always, bits, gradient

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

POLICIES = ["inline", "thread", "lazy", "random"]
SHAPES = ((40, 40),) * 12
BATCHES = 6  # of two parameters each
RECIPE = Recipe(cls=Exploding, options={"foreach": False}, shapes=SHAPES)


def manager_of(twins: Twins) -> StateManager:
    return StateManager(nn.ParameterList(twins.params), twins.swapped)


class Saved:
    """What a checkpoint would hold: parameters, the optimizer's own state dict and the manager's."""

    def __init__(self, twins: Twins) -> None:
        self.params = copy.deepcopy(twins.params)
        self.optimizer = copy.deepcopy(twins.swapped.state_dict())
        self.manager = copy.deepcopy(manager_of(twins).state_dict())

    def restore_params(self, twins: Twins) -> None:
        with torch.no_grad():
            for param, value in zip(twins.params, self.params, strict=True):
                param.copy_(value)


def start(policy: str, *, steps: int = 2, active: Callable[[int, int], bool] = always) -> Twins:
    config = SwapConfig(swap_times=BATCHES)
    twins = Twins(RECIPE, config, FailingDevice(policy, seed=1), active=active)
    twins.step(steps)
    return twins


def device_of(twins: Twins) -> FailingDevice:
    assert isinstance(twins.device, FailingDevice)
    return twins.device


def fuse(twins: Twins, index: int | None, error: BaseException | None = None) -> None:
    assert isinstance(twins.swapped, Exploding)
    twins.swapped.fuse = None if index is None else twins.params[index]
    if error is not None:
        twins.swapped.error = error


def fail_a_step(twins: Twins) -> StepError:
    """The error of a step of the swapped twin alone."""
    twins.set_gradients()
    twins.steps -= 1  # it will be repeated
    with pytest.raises(StepError) as caught:
        twins.swapped.step()
    return caught.value


def assert_nothing_is_left_on_the_device(twins: Twins) -> None:
    assert twins.device.ledger.device_nbytes == 0
    mirrors = {tensor.host.data_ptr() for tensor in twins.swap.table.tensors()}
    large = [
        value
        for state in twins.swapped.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.numel() >= twins.swap.config.min_numel
    ]
    assert {value.data_ptr() for value in large} <= mirrors


def assert_failed_until_recovered(twins: Twins, saved: Saved, cause: StepError) -> None:
    """Everything that needs whole state refuses and names the cause; both ways of recovery work."""
    assert twins.swap.phase is Phase.FAILED
    manager = manager_of(twins)
    refused: list[Callable[[], object]] = [
        twins.swapped.step,
        twins.swapped.state_dict,
        manager.state_dict,
        lambda: twins.swapped.load_state_dict(saved.optimizer),
        lambda: manager.load_state_dict(saved.manager),
        lambda: pickle.dumps(twins.swapped),
        lambda: swapckpt.release(twins.swapped),
    ]
    for call in refused:
        with pytest.raises(StateFailedError, match="failed midway") as caught:
            call()
        assert caught.value.__cause__ is cause
    assert_nothing_is_left_on_the_device(twins)


def recover_by_manager(twins: Twins, saved: Saved) -> None:
    saved.restore_params(twins)
    manager_of(twins).load_state_dict(saved.manager, accept_parameters=True)


def recover_by_block(twins: Twins, saved: Saved) -> None:
    with swapckpt.recovery(twins.swapped):
        saved.restore_params(twins)
        twins.swapped.load_state_dict(saved.optimizer)


RECOVERIES = [recover_by_manager, recover_by_block]


def assert_recovers(twins: Twins, saved: Saved, recover: Callable[[Twins, Saved], None]) -> None:
    fuse(twins, None)
    recover(twins, saved)
    assert twins.swap.phase is Phase.IDLE
    twins.check()
    twins.step(3)
    twins.check()
    assert twins.device.ledger.device_nbytes == 0


@pytest.mark.parametrize("recover", RECOVERIES)
@pytest.mark.parametrize("steps", [0, 2], ids=["first-step", "later-step"])
@pytest.mark.parametrize("batch", [0, 1, 5])
@pytest.mark.parametrize("policy", POLICIES)
def test_s10_the_update_raises(
    policy: str, batch: int, steps: int, recover: Callable[[Twins, Saved], None]
) -> None:
    twins = start(policy, steps=steps)
    saved = Saved(twins)
    fuse(twins, 2 * batch)
    error = fail_a_step(twins)
    assert f"failed in batch {batch} (update; " in str(error)
    assert "boom" in str(error)
    assert "partly updated" in str(error)
    assert isinstance(error.__cause__, ArithmeticError)
    assert_failed_until_recovered(twins, saved, error)
    assert_recovers(twins, saved, recover)


@pytest.mark.parametrize("policy", POLICIES)
def test_s10_state_that_a_failed_update_adds_is_dropped(policy: str) -> None:
    twins = start(policy)
    saved = Saved(twins)
    fuse(twins, 5)
    twins.swapped.leaves_something = True  # type: ignore[attr-defined]
    error = fail_a_step(twins)
    assert_failed_until_recovered(twins, saved, error)
    assert_recovers(twins, saved, recover_by_manager)


@pytest.mark.parametrize("batch", [1, 3, 5])
@pytest.mark.parametrize("policy", POLICIES)
def test_s10_a_load_fails_after_an_update(policy: str, batch: int) -> None:
    twins = start(policy)
    saved = Saved(twins)
    device_of(twins).load.copies_left = batch
    error = fail_a_step(twins)
    assert f"failed in batch {batch} (load; " in str(error)
    assert "the link is down" in str(error)
    assert isinstance(error.__cause__, TransferError)
    assert_failed_until_recovered(twins, saved, error)
    assert_recovers(twins, saved, recover_by_block)


@pytest.mark.parametrize("steps", [0, 2], ids=["first-step", "later-step"])
@pytest.mark.parametrize("batch", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("policy", POLICIES)
def test_s10_an_offload_fails(policy: str, batch: int, steps: int) -> None:
    twins = start(policy, steps=steps)
    saved = Saved(twins)
    device_of(twins).offload.copies_left = batch
    error = fail_a_step(twins)
    assert f"failed in batch {batch} (offload; " in str(error)
    assert isinstance(error.__cause__, TransferError)
    assert "partly updated" in str(error)
    assert_failed_until_recovered(twins, saved, error)
    assert_recovers(twins, saved, recover_by_manager)


@pytest.mark.parametrize("policy", POLICIES)
def test_s10_an_allocation_fails_after_an_update(policy: str) -> None:
    # Batch 4 gets a buffer of its own size, since one of its parameters has its first gradient now.
    twins = start(policy, active=lambda step, index: index != 9 or step >= 2)
    saved = Saved(twins)
    device_of(twins).allocations_left = 3
    error = fail_a_step(twins)
    assert "failed in batch 4 (load; " in str(error)
    assert "no room for staging" in str(error)
    assert isinstance(error.__cause__, MemoryError)
    assert_failed_until_recovered(twins, saved, error)
    assert_recovers(twins, saved, recover_by_block)


def fail_allocation(twins: Twins, batch: int) -> None:
    device_of(twins).allocations_left = batch


def fail_load(twins: Twins, batch: int) -> None:
    assert batch == 0
    device_of(twins).load.copies_left = batch


@pytest.mark.parametrize(("fail", "batch"), [(fail_allocation, 0), (fail_allocation, 2), (fail_load, 0)])
@pytest.mark.parametrize("policy", POLICIES)
def test_s10_a_failure_before_the_first_update_changes_nothing(
    policy: str, fail: Callable[[Twins, int], None], batch: int
) -> None:
    twins = start(policy)
    before = [bits(value) for value in everything(twins)]
    fail(twins, batch)
    error = fail_a_step(twins)
    assert f"failed in batch {batch} (load; " in str(error)
    assert "Nothing was updated" in str(error)
    assert twins.swap.phase is Phase.IDLE
    assert_nothing_is_left_on_the_device(twins)
    assert [bits(value) for value in everything(twins)] == before
    twins.step(2)  # the same step again
    twins.check()


def everything(twins: Twins) -> list[Tensor]:
    state: list[Tensor] = [
        value
        for values in twins.swapped.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    ]
    return [*twins.params, *state]


@pytest.mark.parametrize("policy", POLICIES)
def test_s10_an_interrupt_passes_as_itself_and_leaves_the_state_failed(policy: str) -> None:
    twins = start(policy)
    saved = Saved(twins)
    fuse(twins, 5, KeyboardInterrupt())
    twins.set_gradients()
    twins.steps -= 1
    with pytest.raises(KeyboardInterrupt):
        twins.swapped.step()
    assert twins.swap.phase is Phase.FAILED
    assert_nothing_is_left_on_the_device(twins)
    with pytest.raises(StateFailedError):
        twins.swapped.step()
    assert_recovers(twins, saved, recover_by_block)


@pytest.mark.parametrize("direction", ["load", "offload"])
def test_s10_a_copy_that_hangs_is_given_up_and_cannot_spoil_what_is_loaded_later(direction: str) -> None:
    timeout_secs = 0.5  # enough for every copy that does not hang
    config = SwapConfig(swap_times=BATCHES, timeout_secs=timeout_secs)
    twins = Twins(RECIPE, config, FailingDevice("thread", timeout_secs=timeout_secs))
    twins.step(2)
    saved = Saved(twins)
    stream = device_of(twins).load if direction == "load" else device_of(twins).offload
    stream.copies_left, stream.resume = 3, threading.Event()
    error = fail_a_step(twins)
    assert isinstance(error.__cause__, TransferTimeoutError)
    assert f"failed in batch 3 ({direction}; " in str(error)
    assert twins.swap.phase is Phase.FAILED
    for recover in RECOVERIES:
        with pytest.raises(TransferTimeoutError, match=f"The {direction} stream did not finish"):
            recover(twins, saved)
        assert twins.swap.phase is Phase.FAILED
    stream.resume.set()
    assert_recovers(twins, saved, recover_by_block)


def test_s10_the_first_cause_is_kept() -> None:
    twins = start("inline")
    saved = Saved(twins)
    fuse(twins, 5)
    first = fail_a_step(twins)
    with pytest.raises(KeyError), swapckpt.recovery(twins.swapped):
        raise KeyError
    for _ in range(2):
        with pytest.raises(StateFailedError) as caught:
            twins.swapped.step()
        assert caught.value.__cause__ is first
    assert_recovers(twins, saved, recover_by_manager)


def test_s10_recovery_without_a_load_recovers_nothing() -> None:
    twins = start("inline")
    fuse(twins, 5)
    fail_a_step(twins)
    with swapckpt.recovery(twins.swapped), pytest.raises(PhaseError, match="Cannot step inside recovery"):
        twins.swapped.step()
    assert twins.swap.phase is Phase.FAILED


def test_s10_groups_are_whole_after_a_failed_step() -> None:
    twins = start("inline")
    fuse(twins, 5)
    fail_a_step(twins)
    found = [[id(param) for param in group["params"]] for group in twins.swapped.param_groups]
    assert found == [[id(param) for param in twins.params[:6]], [id(param) for param in twins.params[6:]]]


class SmallHost(CpuDevice):
    """A device with host memory for one slab."""

    slabs_left = 1

    def register_host(self, slab: Tensor) -> Callable[[], None]:
        self.slabs_left -= 1
        if self.slabs_left < 0:
            msg = "no pages to lock"
            raise RuntimeError(msg)
        return super().register_host(slab)


def failing_link(policy: str) -> CpuDevice:
    device = FailingDevice(policy)
    device.offload.copies_left = 3
    return device


@pytest.mark.parametrize(
    ("make_device", "cause"), [(failing_link, "link is down"), (SmallHost, "no pages to lock")]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_s10_adoption_that_cannot_move_existing_state_leaves_the_optimizer_as_it_was(
    policy: str, make_device: Callable[[str], CpuDevice], cause: str
) -> None:
    params, optimizer = Recipe(cls=Exploding, shapes=((300, 300),) * 6).build()
    for index, param in enumerate(params):
        param.grad = gradient(param, step=0, index=index)
    optimizer.step()
    before = {param: dict(values) for param, values in optimizer.state.items()}
    device = make_device(policy)
    with pytest.raises(AdoptionError, match=f"existing state could not be moved to the host: .*{cause}"):
        swapckpt.swap_optimizer(optimizer, SwapConfig(swap_times=BATCHES), device=device)
    assert type(optimizer) is Exploding
    assert not swapckpt.is_swapped(optimizer)
    assert list(optimizer.state) == list(before)
    for key, values in optimizer.state.items():
        assert list(values) == list(before[key])
        assert all(value is before[key][name] for name, value in values.items())
    assert device.ledger.device_nbytes == 0
    optimizer.step()
    if isinstance(device, SmallHost):
        device.slabs_left = 100
    swapckpt.swap_optimizer(optimizer, SwapConfig(swap_times=BATCHES), device=device)
    optimizer.step()
