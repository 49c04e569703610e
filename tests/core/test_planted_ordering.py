"""Tests of the tests: take away one wait at a time, and the hostile policies must notice.

Only policies that run copies on the calling thread are used: a missing wait gives them wrong values, where
threads could crash the process. On the CPU the compute stream is the calling thread, so two waits cannot be
missed here: an offload's for its update, and a load's for the allocation of its buffer. The simulated
accelerator shows those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import optim

from swapckpt import SwapConfig
from swapckpt.device import CpuDevice
from swapckpt.device.cpu import CpuEvent, CpuStream, _ComputeStream
from swapckpt.memory import StagingRing, StagingSlot
from swapckpt.pipeline import Pipeline
from swapckpt.plan import OpKind
from tests.core.training import Recipe, Twins, differences

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapckpt.device import Event

SCHEDULES = [("lazy", 0), *(("random", seed) for seed in range(5))]


def growing(step: int, index: int) -> bool:
    """One more parameter of each batch has its first gradient in each step, so buffers change their size."""
    return index % 3 <= step


def all_at_once(step: int, index: int) -> bool:
    """State of all batches is created in the first step and moves in each later one."""
    del step, index
    return True


def problems(policy: str, seed: int, active: Callable[[int, int], bool]) -> list[str]:
    """What is wrong after three steps of nine batches through two buffers: values, or too much memory."""
    config = SwapConfig(swap_times=9, staging_buffers=2)
    shapes = tuple((32, 33 + index) for index in range(27))
    twins = Twins(
        Recipe(cls=optim.AdamW, options={"foreach": False}, shapes=shapes),
        config,
        CpuDevice(policy, seed=seed),
        active=active,
    )
    twins.step(3)
    found = differences(twins)
    ledger = twins.device.ledger
    if ledger.device_peak_nbytes > config.staging_buffers * twins.swap.table.largest_batch_nbytes:
        found.append("memory")
    return found


@pytest.fixture(autouse=True)
def _freed_state_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """State that an update made is freed after its offload; as on a device, others write there at once."""
    drop = StagingRing._drop_created

    def poison(ring: StagingRing, slot: StagingSlot) -> None:
        for tensor in slot.created:
            tensor.fill_(float("nan"))
        drop(ring, slot)

    monkeypatch.setattr(StagingRing, "_drop_created", poison)


# --------------------------------------------------------------------------------------------- the mutations


def loads_do_not_wait_for_the_offload_of_their_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = CpuStream.wait

    def forgetful(stream: CpuStream, event: Event) -> None:
        if not (stream.name == "load" and isinstance(event, CpuEvent) and event._stream.name == "offload"):
            wait(stream, event)

    monkeypatch.setattr(CpuStream, "wait", forgetful)


def updates_do_not_wait_for_their_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ComputeStream, "wait", lambda *_: None)


def buffers_are_resized_and_state_is_freed_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(ring: StagingRing, slot: StagingSlot) -> None:
        slot.done = None
        ring._drop_created(slot)

    monkeypatch.setattr(StagingRing, "settle", settle)


def slots_are_never_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagingRing, "settle", lambda *_: None)


def steps_return_without_waiting_for_their_offloads(monkeypatch: pytest.MonkeyPatch) -> None:
    def drain(pipeline: Pipeline) -> None:
        for kind, index in pipeline._events:
            if kind is OpKind.OFFLOAD:
                pipeline._table.to_host(pipeline._table.batches[index])

    monkeypatch.setattr(Pipeline, "_drain", drain)


def buffers_are_released_before_the_last_offloads(monkeypatch: pytest.MonkeyPatch) -> None:
    drain = Pipeline._drain

    def early(pipeline: Pipeline) -> None:
        pipeline._ring.close(release=True)
        drain(pipeline)

    monkeypatch.setattr(Pipeline, "_drain", early)


MUTATIONS = [
    loads_do_not_wait_for_the_offload_of_their_buffer,
    updates_do_not_wait_for_their_load,
    buffers_are_resized_and_state_is_freed_without_waiting,
    slots_are_never_settled,
    steps_return_without_waiting_for_their_offloads,
    buffers_are_released_before_the_last_offloads,
]


@pytest.mark.parametrize("active", [all_at_once, growing])
@pytest.mark.parametrize(("policy", "seed"), SCHEDULES)
def test_with_all_waits_nothing_is_wrong(policy: str, seed: int, active: Callable[[int, int], bool]) -> None:
    assert problems(policy, seed, active) == []


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("policy", ["lazy", "random"])
def test_a_missing_wait_is_noticed(
    policy: str, mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    assert any(
        problems(name, seed, active)
        for name, seed in SCHEDULES
        for active in (all_at_once, growing)
        if name == policy
    )


def test_without_the_hostile_policies_nothing_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why copies that run at once are not enough to test with."""
    loads_do_not_wait_for_the_offload_of_their_buffer(monkeypatch)
    updates_do_not_wait_for_their_load(monkeypatch)
    steps_return_without_waiting_for_their_offloads(monkeypatch)
    assert problems("inline", 0, all_at_once) == []
    assert problems("inline", 0, growing) == []


def test_the_compute_stream_of_the_cpu_is_never_behind() -> None:
    """The two waits that cannot be missed here wait for its events, which are complete when they are made."""
    event = CpuDevice("lazy").compute().record()
    assert event.query()
    event.synchronize(0.0)


def test_fresh_buffers_are_poisoned_only_where_a_missing_wait_is_to_show() -> None:
    for policy in ("lazy", "random"):
        assert torch.isnan(CpuDevice(policy).allocate(64).view(torch.float32)).all()
