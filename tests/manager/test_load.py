"""Loading writes into the mirrors that are there, whatever the optimizer was doing, and never steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp

import swapckpt
from swapckpt.optimizer import swap_of
from tests.manager.training import CONFIG, OPTIMIZERS, Net, assert_same_bits, backward, contents, train

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.optim import Optimizer


def build(kind: str, config: swapckpt.SwapConfig | None) -> tuple[Net, Optimizer, swapckpt.StateManager]:
    model = Net()
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    return model, optimizer, swapckpt.StateManager(model, optimizer, config)


def from_step_2(step: int) -> bool:
    """``spare`` has no gradient in the first two steps."""
    return step >= 2


def only_before_step_1(step: int) -> bool:
    return step < 1


@pytest.fixture(params=["AdamW", "SGD-dampening", "Adafactor"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def saved(kind: str, tmp_path: Path) -> Path:
    """A checkpoint of step 2, in which ``spare`` was never used."""
    model, optimizer, manager = build(kind, CONFIG)
    train(model, optimizer, steps=range(2), use_spare=from_step_2)
    dcp.save({"model": model, "optimizer": manager}, checkpoint_id=tmp_path / "step2")
    return tmp_path / "step2"


@pytest.fixture
def expected(kind: str) -> dict[str, object]:
    model = Net()
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    train(model, optimizer, steps=range(5), use_spare=from_step_2)
    return contents(model, optimizer)


def fresh(model: Net, optimizer: Optimizer) -> None:
    pass


def pending_gradients(model: Net, optimizer: Optimizer) -> None:
    backward(model, 7, use_spare=True)


def newer_state(model: Net, optimizer: Optimizer) -> None:
    train(model, optimizer, steps=range(6), use_spare=from_step_2)


def newer_state_and_pending_gradients(model: Net, optimizer: Optimizer) -> None:
    train(model, optimizer, steps=range(6), use_spare=from_step_2)
    backward(model, 7)


def never_used_parameters(model: Net, optimizer: Optimizer) -> None:
    train(model, optimizer, steps=range(4))


def used_what_was_never_used(model: Net, optimizer: Optimizer) -> None:
    train(model, optimizer, steps=range(1), use_spare=only_before_step_1)


CONDITIONS = [
    fresh,
    pending_gradients,
    newer_state,
    newer_state_and_pending_gradients,
    never_used_parameters,
    used_what_was_never_used,
]


@pytest.mark.parametrize("config", [CONFIG, None], ids=["swapped", "managed"])
@pytest.mark.parametrize("condition", CONDITIONS)
def test_load_restores_in_place_and_training_continues_bit_for_bit(
    saved: Path,
    expected: dict[str, object],
    kind: str,
    condition: Callable[[Net, Optimizer], None],
    config: swapckpt.SwapConfig | None,
) -> None:
    model, optimizer, manager = build(kind, config)
    condition(model, optimizer)
    destination = pointers(manager)
    host_nbytes = manager.memory().host_nbytes
    traffic = _traffic(optimizer)
    hooked = []
    optimizer.register_step_pre_hook(lambda *_: hooked.append("step"))

    dcp.load({"model": model.state_dict(), "optimizer": manager}, checkpoint_id=saved)

    loaded = {
        (name, key): value.data_ptr()
        for name, param in model.named_parameters()
        for key, value in optimizer.state.get(param, {}).items()
    }
    assert not any(name.startswith("spare") for name, _ in loaded)
    assert loaded == {place: pointer for place, pointer in destination.items() if place in loaded}
    assert manager.memory().host_nbytes == host_nbytes
    assert _traffic(optimizer) == traffic
    assert not hooked
    train(model, optimizer, steps=range(2, 5), use_spare=from_step_2)
    assert_same_bits(contents(model, optimizer), expected)


def pointers(manager: swapckpt.StateManager) -> dict[tuple[str, str], int]:
    state = manager.state_dict()["state"]
    assert isinstance(state, dict)
    return {(name, key): value.data_ptr() for name, values in state.items() for key, value in values.items()}


def _traffic(optimizer: Optimizer) -> tuple[int, ...]:
    if not swapckpt.is_swapped(optimizer):
        return ()
    ledger = swap_of(optimizer).device.ledger
    return ledger.num_loads, ledger.num_offloads, ledger.device_peak_nbytes if not ledger.num_loads else 0


def test_device_holds_nothing_before_and_after_a_load(saved: Path, kind: str) -> None:
    model, _, manager = build(kind, CONFIG)
    dcp.load({"model": model.state_dict(), "optimizer": manager}, checkpoint_id=saved)
    assert manager.memory().device_peak_nbytes == 0
    assert manager.memory().host_nbytes > 0


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("config", [CONFIG, None], ids=["swapped", "managed"])
def test_foreign_tensors_are_copied_into_the_mirrors(
    kind: str, config: swapckpt.SwapConfig | None, flat: bool
) -> None:
    """A state dict that was not handed out by the destination, such as one of ``torch.load``."""
    model, optimizer, source = build(kind, None)
    source.flat = flat
    train(model, optimizer, steps=range(3))
    state, parameters = source.state_dict(), model.state_dict()

    other, other_optimizer, target = build(kind, config)
    other.load_state_dict(parameters)
    destination = pointers(target)
    target.load_state_dict(state)
    after = pointers(target)
    assert after == destination
    source.flat = False
    assert set(after.values()).isdisjoint(pointers(source).values())
    train(model, optimizer, steps=range(3, 5))
    train(other, other_optimizer, steps=range(3, 5))
    assert_same_bits(contents(other, other_optimizer), contents(model, optimizer))


def test_a_state_dict_in_another_memory_format_is_read_into_the_optimizers_own() -> None:
    """Files hold channels-last state contiguously; the optimizer wants it as its parameter lies."""
    outcomes = []
    for stepped in (False, True):
        model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters())
        manager = swapckpt.StateManager(model, optimizer, CONFIG)
        if stepped:
            model(torch.ones(1, 3, 5, 5)).sum().backward()
            optimizer.step()
        state = manager.state_dict()["state"]
        assert isinstance(state, dict)
        values = state["weight"]
        before = {key: (value.data_ptr(), value.stride()) for key, value in values.items()}
        generator = torch.Generator().manual_seed(1)
        contiguous = {
            key: torch.rand(value.shape, generator=generator).contiguous() for key, value in values.items()
        }
        foreign = {
            "state": {**state, "weight": contiguous},
            "param_groups": manager.state_dict()["param_groups"],
        }
        manager.load_state_dict(foreign)
        live = optimizer.state[model.weight]
        assert {key: (value.data_ptr(), value.stride()) for key, value in live.items()} == before
        assert all(torch.equal(live[key], value) for key, value in contiguous.items())
        outcomes.append(live["exp_avg"].is_contiguous(memory_format=torch.channels_last))
    assert outcomes == [True, True]


def test_c3_export_and_load_between_backward_and_step(tmp_path: Path, kind: str) -> None:
    """Stock returns {} for a fresh optimizer with pending gradients, and loads nothing, silently."""
    model, optimizer, manager = build(kind, CONFIG)
    train(model, optimizer, steps=range(2), use_spare=from_step_2)
    before = contents(model, optimizer)
    backward(model, 2, use_spare=True)
    dcp.save({"model": model, "optimizer": manager}, checkpoint_id=tmp_path / "pending")
    optimizer.step()
    optimizer.zero_grad()

    resumed, resumed_optimizer, resumed_manager = build(kind, CONFIG)
    backward(resumed, 5)
    dcp.load(
        {"model": resumed.state_dict(), "optimizer": resumed_manager}, checkpoint_id=tmp_path / "pending"
    )
    assert_same_bits(contents(resumed, resumed_optimizer), before)
    train(resumed, resumed_optimizer, steps=range(2, 3), use_spare=from_step_2)
    assert_same_bits(contents(resumed, resumed_optimizer), contents(model, optimizer))


def test_c3_export_of_a_fresh_optimizer_with_pending_gradients_is_complete(kind: str) -> None:
    model, optimizer, manager = build(kind, CONFIG)
    backward(model, 0)
    state = manager.state_dict()["state"]
    assert isinstance(state, dict)
    assert state.keys() == dict(model.named_parameters()).keys()
    assert all(values for values in state.values())
    assert not optimizer.state
    optimizer.step()
    optimizer.zero_grad()
    alone = Net()
    alone_optimizer = OPTIMIZERS[kind](list(alone.parameters()))
    train(alone, alone_optimizer, steps=range(1))
    assert_same_bits(contents(model, optimizer), contents(alone, alone_optimizer))


def test_own_export_loads_into_itself_unchanged(kind: str) -> None:
    model, optimizer, manager = build(kind, CONFIG)
    train(model, optimizer, steps=range(2), use_spare=from_step_2)
    before = contents(model, optimizer)
    manager.load_state_dict(manager.state_dict())
    assert_same_bits(contents(model, optimizer), before)


class Particular(torch.optim.AdamW):
    """Steps only parameters of the sizes it was made for, so no stand-in tells what its state will be."""

    @torch.no_grad()
    def step(self, closure: object = None) -> object:
        sizes = {param.numel() for group in self.param_groups for param in group["params"]}
        if not sizes <= {72, 12, 36, 6, 18, 3}:
            error = f"unexpected sizes {sizes}"
            raise ValueError(error)
        return super().step(closure)


@pytest.mark.parametrize("config", [CONFIG, None], ids=["swapped", "managed"])
def test_state_that_cannot_be_told_beforehand_is_exported_after_a_step_and_loaded_before_one(
    config: swapckpt.SwapConfig | None,
) -> None:
    def make() -> tuple[Net, Optimizer, swapckpt.StateManager]:
        model = Net()
        optimizer = Particular(model.parameters())
        return model, optimizer, swapckpt.StateManager(model, optimizer, config)

    model, optimizer, source = make()
    with pytest.raises(swapckpt.errors.UnsupportedOptimizerError, match="Step once before exporting"):
        source.state_dict()
    assert not optimizer.state
    train(model, optimizer, steps=range(2), use_spare=lambda _: True)

    other, other_optimizer, target = make()
    other.load_state_dict(model.state_dict())
    target.load_state_dict(source.state_dict())
    train(model, optimizer, steps=range(2, 4), use_spare=lambda _: True)
    train(other, other_optimizer, steps=range(2, 4), use_spare=lambda _: True)
    assert_same_bits(contents(other, other_optimizer), contents(model, optimizer))
