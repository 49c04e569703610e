"""The Checkpointer on an accelerator: parameters and device state are copied behind the compute stream and in
front of the next step, whatever the order in which streams do their work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import swapckpt
from tests import simaccel as sim
from tests.manager.test_exchange import always
from tests.manager.training import Net, assert_same_bits, contents, train
from tests.simaccel.test_resume import CONFIG, build

if TYPE_CHECKING:
    from pathlib import Path

    from torch.optim import Optimizer

KIND = "AdamW-fused"
STEPS = range(1, 4)
SLOW_COPIES = sim.Schedule(sim.Policy.MASK, slow_mask=0b1110)  # compute runs ahead of what is copied for it
SLOW_COMPUTE = sim.Schedule(sim.Policy.MASK, slow_mask=0b0001)  # copies start as early as the order allows
SCHEDULES = {
    "async": [sim.EAGER, sim.LAZY, SLOW_COPIES, SLOW_COMPUTE, *sim.seeds(2)],
    "async_with_pinned_mem": [SLOW_COPIES, SLOW_COMPUTE],
}


def managed(side: str) -> tuple[Net, Optimizer, dict[str, object]]:
    model, optimizer, _ = build(KIND, "stock")
    manager = swapckpt.StateManager(model, optimizer, CONFIG if side == "swapped" else None)
    return model, optimizer, {"model": model, "optimizer": manager}


def history() -> dict[int, dict[str, object]]:
    """What plain torch has after each step."""
    model, optimizer, _ = build(KIND, "stock")
    found = {}
    for step in STEPS:
        train(model, optimizer, steps=range(step, step + 1), use_spare=always)
        found[step] = contents(model, optimizer)
    return found


@pytest.mark.parametrize(
    ("mode", "side"), [("async", "swapped"), ("async", "managed"), ("async_with_pinned_mem", "swapped")]
)
def test_a_save_holds_the_step_it_was_made_at_in_every_order(tmp_path: Path, mode: str, side: str) -> None:
    config, plain = swapckpt.CheckpointConfig(async_mode=mode, timeout_secs=60), history()
    for schedule in sim.each(SCHEDULES[mode]):
        folder = tmp_path / str(schedule)
        model, optimizer, states = managed(side)
        with swapckpt.Checkpointer(folder, states, config) as checkpointer:
            for step in STEPS:  # no synchronization anywhere: the step may not even have begun
                train(model, optimizer, steps=range(step, step + 1), use_spare=always)
                checkpointer.save(step)
            train(model, optimizer, steps=range(4, 5), use_spare=always)
        sim.use(sim.EAGER)
        for step in STEPS:
            resumed, resumed_optimizer, target = managed(side)
            with swapckpt.Checkpointer(folder, target) as checkpointer:
                assert checkpointer.load(step) == step
            assert_same_bits(contents(resumed, resumed_optimizer), plain[step])


def test_saves_take_no_device_memory_and_host_memory_once(tmp_path: Path) -> None:
    model, optimizer, states = managed("swapped")
    figures = []
    with swapckpt.Checkpointer(tmp_path, states, swapckpt.CheckpointConfig(timeout_secs=60)) as checkpointer:
        for step in STEPS:
            train(model, optimizer, steps=range(step, step + 1), use_spare=always)
            sim.reset_peak()
            before = sim.memory().allocated_nbytes
            checkpointer.save(step).wait()
            assert sim.memory().peak_nbytes == before
            figures.append(checkpointer._staging.nbytes)
    assert len(set(figures)) == 1
    assert figures[0] >= sum(param.nbytes for param in model.parameters())
