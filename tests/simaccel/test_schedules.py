"""The schedules find ordering bugs: each one planted below gives a wrong value under some of them.

The program under test swaps optimizer state: a load stream copies a mirror into a staging buffer, the compute
stream updates parameter and state, an offload stream copies the state back. Two buffers serve four batches.
"""

from __future__ import annotations

import enum

import pytest
import torch

from tests import simaccel as sim

NUM_BATCHES, NUM_STEPS, NUMEL = 4, 3, 1000
LR, MOMENTUM = 0.1, 0.9


class Bug(enum.Enum):
    """What the program forgets."""

    UPDATE_BEFORE_LOAD = "the update waits for the load"
    LOAD_INTO_USED_BUFFER = "a load waits for the offload that still reads the buffer"
    OFFLOAD_BEFORE_UPDATE = "an offload waits for the update"
    FREE_BEFORE_OFFLOAD = "the buffers are freed after the last offload"
    READ_BEFORE_OFFLOAD = "the host reads the mirrors after the last offload"
    LOAD_BEFORE_ALLOCATION = "the first load into a new buffer waits for the stream that owns the buffer"


def swapped_sgd(bug: Bug | None, schedule: sim.Schedule) -> list[torch.Tensor]:
    """Parameters at the end, and the mirrors after every step."""
    sim.reset()
    sim.use(schedule)
    module = torch.get_device_module("sim")
    compute, load, offload = module.current_stream(), module.Stream(), module.Stream()
    generator = torch.Generator().manual_seed(0)
    grads = torch.randn(NUM_STEPS, NUM_BATCHES, NUMEL, generator=generator).to("sim")
    params = torch.zeros(NUM_BATCHES, NUMEL, device="sim")
    mirrors = torch.zeros(NUM_BATCHES, NUMEL).pin_memory()
    read = []
    for step in range(NUM_STEPS):
        buffers = [torch.empty(NUMEL, device="sim") for _ in range(2)]
        if bug is not Bug.LOAD_BEFORE_ALLOCATION:
            load.wait_stream(compute)
        offloaded: list[torch.Event] = []
        for batch in range(NUM_BATCHES):
            buffer = batch % 2
            if batch >= 2 and bug is not Bug.LOAD_INTO_USED_BUFFER:
                load.wait_event(offloaded[batch - 2])
            with module.stream(load):
                buffers[buffer].copy_(mirrors[batch], non_blocking=True)
            if bug is not Bug.UPDATE_BEFORE_LOAD:
                compute.wait_event(load.record_event())
            buffers[buffer].mul_(MOMENTUM).add_(grads[step, batch])
            params[batch].sub_(buffers[buffer], alpha=LR)
            if bug is not Bug.OFFLOAD_BEFORE_UPDATE:
                offload.wait_stream(compute)
            with module.stream(offload):
                mirrors[batch].copy_(buffers[buffer], non_blocking=True)
            offloaded.append(offload.record_event())
        if bug is not Bug.FREE_BEFORE_OFFLOAD:
            compute.wait_event(offloaded[-1])
        del buffers
        if bug is not Bug.READ_BEFORE_OFFLOAD:
            offloaded[-1].synchronize()
        read.append(mirrors.clone())
    return [params.cpu(), *read]


def plain_sgd() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    grads = torch.randn(NUM_STEPS, NUM_BATCHES, NUMEL, generator=generator)
    params, momentum = torch.zeros(NUM_BATCHES, NUMEL), torch.zeros(NUM_BATCHES, NUMEL)
    read = []
    for grad in grads:
        momentum.mul_(MOMENTUM).add_(grad)
        params.sub_(momentum, alpha=LR)
        read.append(momentum.clone())
    return [params, *read]


def is_wrong(bug: Bug | None, schedule: sim.Schedule) -> bool:
    return not all(map(torch.equal, swapped_sgd(bug, schedule), plain_sgd()))


@pytest.mark.parametrize("schedule", [sim.EAGER, sim.LAZY, *sim.masks(3), *sim.seeds(10)], ids=str)
def test_the_correct_program_is_right_in_every_schedule(schedule: sim.Schedule) -> None:
    assert not is_wrong(None, schedule)


@pytest.mark.parametrize("bug", Bug, ids=lambda bug: bug.name.lower())
def test_a_planted_bug_gives_wrong_values_under_some_mask_and_never_when_eager(bug: Bug) -> None:
    assert not is_wrong(bug, sim.EAGER)
    assert any(is_wrong(bug, schedule) for schedule in sim.masks(3))


@pytest.mark.parametrize("bug", Bug, ids=lambda bug: bug.name.lower())
def test_a_planted_bug_gives_wrong_values_for_some_seed(bug: Bug) -> None:
    assert any(is_wrong(bug, schedule) for schedule in sim.seeds(20))
