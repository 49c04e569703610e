"""Checkpoints of training on an accelerator: what is swapped goes into mirrors, the rest back to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp

import swapckpt
from tests import simaccel as sim
from tests.manager.test_exchange import StockOptimizer, always
from tests.manager.training import OPTIMIZERS, Net, assert_same_bits, contents, train

if TYPE_CHECKING:
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


@pytest.mark.parametrize("kind", ["AdamW", "AdamW-fused"])
def test_loading_puts_swapped_state_into_mirrors_and_small_state_where_the_step_needs_it(
    tmp_path: Path, kind: str
) -> None:
    model, optimizer, source = build(kind, "swapped")
    train(model, optimizer, steps=range(2), use_spare=always)
    dcp.save({"model": model.state_dict(), "optimizer": source}, checkpoint_id=tmp_path)

    resumed, resumed_optimizer, target = build(kind, "swapped")
    assert isinstance(target, swapckpt.StateManager)
    dcp.load({"model": resumed.state_dict(), "optimizer": target}, checkpoint_id=tmp_path)
    counter = "sim" if kind == "AdamW-fused" else "cpu"
    assert devices(resumed, resumed_optimizer, SWAPPED) == {
        "step": counter,
        "exp_avg": "cpu",
        "exp_avg_sq": "cpu",
    }
    assert devices(resumed, resumed_optimizer, SMALL) == {
        "step": counter,
        "exp_avg": "sim",
        "exp_avg_sq": "sim",
    }
    assert target.memory().device_peak_nbytes == 0


@pytest.mark.parametrize("kind", ["AdamW", "AdamW-fused", "NAdam"])
def test_torchs_own_load_puts_everything_where_the_step_needs_it(tmp_path: Path, kind: str) -> None:
    model, optimizer, _ = build(kind, "stock")
    train(model, optimizer, steps=range(2), use_spare=always)
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "run.pt")
    train(model, optimizer, steps=range(2, 4), use_spare=always)

    resumed, resumed_optimizer, _ = build(kind, "swapped")
    parameters, state = torch.load(tmp_path / "run.pt", map_location="cpu", weights_only=True)
    resumed.load_state_dict(parameters)
    resumed_optimizer.load_state_dict(state)
    assert devices(resumed, resumed_optimizer, SWAPPED)["exp_avg"] == "cpu"
    assert devices(resumed, resumed_optimizer, SMALL)["exp_avg"] == "sim"
    train(resumed, resumed_optimizer, steps=range(2, 4), use_spare=always)
    assert_same_bits(contents(resumed, resumed_optimizer), contents(model, optimizer))
