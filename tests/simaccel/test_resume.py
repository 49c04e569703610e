"""Checkpoints of training on an accelerator: exported from the host, loaded into it, then stepped."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp

import swapckpt
from tests import simaccel as sim
from tests.manager.test_exchange import StockOptimizer, always
from tests.manager.training import OPTIMIZERS, Net, assert_same_bits, contents, train

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch.optim import Optimizer

CONFIG = swapckpt.SwapConfig(min_numel=40, swap_times=3)  # matrices of the blocks are swapped, little else
SWAPPED = "blocks.0.up.weight"
SMALL = "head.bias"


def build(kind: str, side: str) -> tuple[Net, Optimizer, StockOptimizer | swapckpt.StateManager]:
    model = Net().to("sim")
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    if side == "stock":
        return model, optimizer, StockOptimizer(model, optimizer, flat=False)
    config = CONFIG if side == "swapped" else None
    return model, optimizer, swapckpt.StateManager(model, optimizer, config)


def devices(model: Net, optimizer: Optimizer, name: str) -> dict[str, str]:
    state = optimizer.state[model.get_parameter(name)]
    return {key: value.device.type for key, value in state.items()}


@contextmanager
def untouched_device() -> Iterator[None]:
    """Asserts that nothing is allocated on the device meanwhile."""
    sim.reset_peak()
    before = sim.memory().allocated_nbytes
    yield
    assert sim.memory().allocated_nbytes == sim.memory().peak_nbytes == before


@pytest.mark.parametrize("schedule", [sim.EAGER, sim.LAZY], ids=str)
@pytest.mark.parametrize("reader", ["stock", "managed", "swapped"])
@pytest.mark.parametrize("writer", ["stock", "swapped"])
@pytest.mark.parametrize("kind", ["AdamW", "AdamW-fused", "SGD-dampening", "NAdam", "ASGD", "Adafactor"])
def test_resumed_training_equals_uninterrupted_training(
    tmp_path: Path, kind: str, writer: str, reader: str, schedule: sim.Schedule
) -> None:
    sim.use(schedule)
    model, optimizer, source = build(kind, writer)
    train(model, optimizer, steps=range(2), use_spare=always)
    dcp.save({"model": model.state_dict(), "optimizer": source}, checkpoint_id=tmp_path)
    train(model, optimizer, steps=range(2, 4), use_spare=always)

    resumed, resumed_optimizer, target = build(kind, reader)
    dcp.load({"model": resumed.state_dict(), "optimizer": target}, checkpoint_id=tmp_path)
    train(resumed, resumed_optimizer, steps=range(2, 4), use_spare=always)
    assert_same_bits(contents(resumed, resumed_optimizer), contents(model, optimizer))


@pytest.mark.parametrize("kind", ["AdamW", "AdamW-fused", "SGD-dampening"])
def test_a_load_touches_the_host_only_and_the_next_step_takes_small_state_along(
    tmp_path: Path, kind: str
) -> None:
    model, optimizer, source = build(kind, "swapped")
    train(model, optimizer, steps=range(2), use_spare=always)
    dcp.save({"optimizer": source}, checkpoint_id=tmp_path)

    resumed, resumed_optimizer, target = build(kind, "swapped")
    assert isinstance(target, swapckpt.StateManager)
    with untouched_device():
        dcp.load({"optimizer": target}, checkpoint_id=tmp_path)
    for name in (SWAPPED, SMALL):
        assert set(devices(resumed, resumed_optimizer, name).values()) == {"cpu"}
    train(resumed, resumed_optimizer, steps=range(2, 3), use_spare=always)
    train(model, optimizer, steps=range(2, 3), use_spare=always)
    for name in (SWAPPED, SMALL):
        assert devices(resumed, resumed_optimizer, name) == devices(model, optimizer, name)
    moment = "momentum_buffer" if kind == "SGD-dampening" else "exp_avg"
    assert devices(resumed, resumed_optimizer, SWAPPED)[moment] == "cpu"
    assert devices(resumed, resumed_optimizer, SMALL)[moment] == "sim"
    assert target.memory().device_nbytes == 0


@pytest.mark.parametrize("kind", ["AdamW", "AdamW-fused", "NAdam"])
def test_torchs_own_load_resumes_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    model, optimizer, _ = build(kind, "stock")
    train(model, optimizer, steps=range(2), use_spare=always)
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "run.pt")
    train(model, optimizer, steps=range(2, 4), use_spare=always)

    resumed, resumed_optimizer, _ = build(kind, "swapped")
    parameters, state = torch.load(tmp_path / "run.pt", map_location="cpu", weights_only=True)
    resumed.load_state_dict(parameters)
    with untouched_device():
        resumed_optimizer.load_state_dict(state)
    train(resumed, resumed_optimizer, steps=range(2, 4), use_spare=always)
    assert_same_bits(contents(resumed, resumed_optimizer), contents(model, optimizer))


@pytest.mark.parametrize("kind", ["AdamW-fused", "SGD-dampening"])
def test_an_export_touches_nothing_on_the_device(kind: str) -> None:
    model, optimizer, manager = build(kind, "swapped")
    assert isinstance(manager, swapckpt.StateManager)
    for steps in (range(0), range(2)):  # templates, then state
        train(model, optimizer, steps=steps)
        with untouched_device():
            exported = manager.state_dict()["state"]
        assert isinstance(exported, dict)
        assert {value.device.type for values in exported.values() for value in values.values()} == {"cpu"}
