"""The gate between readers and offloads: asked before every overwrite, obeyed in both of its answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import optim

from swapckpt import SwapConfig
from swapckpt.device import CpuDevice
from swapckpt.errors import StepError
from swapckpt.fence import OpenGate
from swapckpt.memory import HostArena
from swapckpt.optimizer import guard_with, swapped_state
from swapckpt.plan import lay_out
from tests.core.training import Recipe, Twins, bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from swapckpt.memory import HostSegment

POLICIES = ["inline", "thread", "lazy", "random"]
RECIPE = Recipe(cls=optim.AdamW, options={"foreach": False}, shapes=((40, 40),) * 8)
CONFIG = SwapConfig(swap_times=4)


class ScriptedGate:
    """Redirects segments that are being read into new ones, lets others pass, notes every question."""

    def __init__(self, arena: HostArena) -> None:
        self._arena = arena
        self.redirected: set[HostSegment] = set()
        self.asked: list[HostSegment] = []
        self.before_answer: Callable[[HostSegment], None] = lambda segment: None

    def begin_read(self, segment: HostSegment) -> None:
        self.redirected.add(segment)

    def end_read(self, segment: HostSegment) -> None:
        self.redirected.remove(segment)

    def before_overwrite(self, segment: HostSegment) -> HostSegment:
        self.asked.append(segment)
        self.before_answer(segment)
        if segment in self.redirected:
            return self._arena.allocate(segment.layout)
        return segment


def start(policy: str, active: Callable[[int, int], bool], steps: int = 2) -> tuple[Twins, ScriptedGate]:
    twins = Twins(RECIPE, CONFIG, CpuDevice(policy, seed=4), active=active)
    twins.step(steps)
    gate = ScriptedGate(twins.swap.arena)
    guard_with(twins.swapped, gate)
    return twins, gate


def everyone(step: int, index: int) -> bool:
    del step, index
    return True


def one_of_two(step: int, index: int) -> bool:
    """From step 2 on half of each batch has no gradient: by turns."""
    return step < 2 or (step + index) % 2 == 0


def segments(twins: Twins) -> list[HostSegment]:
    return [segment for batch in twins.swap.table.batches for segment in batch.segments]


def mirrors(twins: Twins) -> list[Tensor]:
    return [tensor.host for tensor in twins.swap.table.tensors()]


def test_the_open_gate_lets_everything_pass() -> None:
    gate = OpenGate()
    segment = HostArena(CpuDevice()).allocate(lay_out([8]))
    gate.begin_read(segment)
    assert gate.before_overwrite(segment) is segment
    gate.end_read(segment)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_gate_is_asked_once_a_step_for_every_segment_that_is_written(policy: str) -> None:
    twins, gate = start(policy, lambda step, index: step < 2 or index >= 2)
    twins.step()
    assert gate.asked == segments(twins)[1:]  # batch 0 had no gradients
    twins.step()
    assert gate.asked == segments(twins)[1:] * 2
    twins.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_gate_is_asked_before_the_first_byte_is_written(policy: str) -> None:
    twins, gate = start(policy, everyone)
    before = {
        segment: [bits(segment.bytes(r)) for r in segment.layout.regions] for segment in segments(twins)
    }

    def unchanged(segment: HostSegment) -> None:
        assert [bits(segment.bytes(region)) for region in segment.layout.regions] == before[segment]

    gate.before_answer = unchanged
    twins.step()
    assert len(gate.asked) == len(before)
    after = {segment: [bits(segment.bytes(r)) for r in segment.layout.regions] for segment in segments(twins)}
    assert all(after[segment] != before[segment] for segment in before)


@pytest.mark.parametrize("active", [everyone, one_of_two])
@pytest.mark.parametrize("policy", POLICIES)
def test_after_a_redirect_the_mirrors_follow_and_old_aliases_keep_their_bytes(
    policy: str, active: Callable[[int, int], bool]
) -> None:
    twins, gate = start(policy, active)
    view = swapped_state(twins.swapped)
    for _ in range(3):
        old_segments, aliases = segments(twins), mirrors(twins)
        exported = [view.values(param) for param in twins.params]
        assert [dict(values) for values in exported] == [twins.swapped.state[param] for param in twins.params]
        content = [bits(alias) for alias in aliases]
        leased = old_segments[1::2]
        for segment in leased:
            gate.begin_read(segment)
        twins.step()
        twins.check()
        for old, new in zip(old_segments, segments(twins), strict=True):
            assert (new is old) == (old not in leased)
        live = {tensor.data_ptr() for tensor in mirrors(twins)}
        for tensor, alias, before in zip(twins.swap.table.tensors(), aliases, content, strict=True):
            moved = tensor.host.data_ptr() != alias.data_ptr()
            assert moved == any(tensor.segment is each for each in segments(twins)[1::2])
            if moved:
                assert bits(alias) == before
                assert alias.data_ptr() not in live
            # with or without a gradient in this step, what the optimizer shows is the mirror
            assert twins.swapped.state[tensor.param][tensor.id.key] is tensor.mirror
            assert view.values(tensor.param)[tensor.id.key] is tensor.mirror
        for segment in leased:
            gate.end_read(segment)
        twins.step()
        twins.check()


@pytest.mark.parametrize("policy", ["lazy", "thread"])
def test_in_place_edits_after_a_redirect_are_not_lost(policy: str) -> None:
    twins, gate = start(policy, one_of_two)
    for segment in segments(twins):
        gate.begin_read(segment)
    twins.step()
    for params, optimizer in ((twins.plain_params, twins.plain), (twins.params, twins.swapped)):
        for param in params:
            optimizer.state[param]["exp_avg"].mul_(0.5)
    twins.step(3)
    twins.check()


def test_state_assigned_from_outside_passes_the_gate_too() -> None:
    twins, gate = start("thread", one_of_two)
    guard_with(twins.swapped, gate)
    aliases, old_segments = mirrors(twins), segments(twins)
    content = [bits(alias) for alias in aliases]
    for segment in old_segments:
        gate.begin_read(segment)
    for params, optimizer in ((twins.plain_params, twins.plain), (twins.params, twins.swapped)):
        for param in params:
            optimizer.state[param]["exp_avg"] = torch.full_like(param, 0.125)
    twins.step()
    twins.check()
    assert [bits(alias) for alias in aliases] == content
    twins.step(2)
    twins.check()
    assert [bits(alias) for alias in aliases] == content


def test_a_load_passes_the_gate_too() -> None:
    twins, gate = start("thread", everyone)
    guard_with(twins.swapped, gate)
    saved = {key: value for key, value in twins.swapped.state_dict().items() if key != "state"}
    state = {
        index: {key: value.clone() for key, value in twins.swapped.state[param].items()}
        for index, param in enumerate(twins.params)
    }
    aliases = mirrors(twins)
    twins.step()
    content = [bits(alias) for alias in aliases]
    old_segments = segments(twins)
    for segment in old_segments:
        gate.begin_read(segment)
    twins.swapped.load_state_dict({**saved, "state": state})
    assert not set(segments(twins)) & set(old_segments)
    assert [bits(alias) for alias in aliases] == content
    for index, param in enumerate(twins.params):
        for key, value in state[index].items():
            assert bits(twins.swapped.state[param][key]) == bits(value)
    for tensor in twins.swap.table.tensors():
        assert twins.swapped.state[tensor.param][tensor.id.key] is tensor.mirror


@pytest.mark.parametrize("policy", POLICIES)
def test_a_gate_that_raises_fails_the_step_and_names_the_batch(policy: str) -> None:
    twins, gate = start(policy, everyone)
    third = segments(twins)[2]

    def refuse(segment: HostSegment) -> None:
        if segment is third:
            msg = "a reader does not let go"
            raise TimeoutError(msg)

    gate.before_answer = refuse
    content = [bits(third.bytes(region)) for region in third.layout.regions]
    twins.set_gradients()
    with pytest.raises(StepError, match=r"batch 2 \(offload; .*a reader does not let go"):
        twins.swapped.step()
    assert [bits(third.bytes(region)) for region in third.layout.regions] == content


@pytest.mark.parametrize("exported", [False, True])
def test_state_that_is_created_later_follows_a_redirect(exported: bool) -> None:
    """A mirror that was reserved for a parameter without a gradient moves along with its segment."""
    twins = Twins(RECIPE, CONFIG, CpuDevice("lazy"), active=lambda step, index: index % 2 == 0 or step >= 2)
    view = swapped_state(twins.swapped)
    if exported:
        for param in twins.params:
            view.values(param)
    twins.step()
    gate = ScriptedGate(twins.swap.arena)
    guard_with(twins.swapped, gate)
    old = segments(twins)
    for segment in old:
        gate.begin_read(segment)
    twins.step()
    for segment in old:  # the gate hands these out again: nobody may write there any more
        for region in segment.layout.regions:
            segment.bytes(region).fill_(0xFF)
    content = [bits(segment.bytes(region)) for segment in old for region in segment.layout.regions]
    for param in twins.params:
        view.values(param)
    twins.step(2)
    twins.check()
    assert [bits(segment.bytes(r)) for segment in old for r in segment.layout.regions] == content
