"""The verdict must not be ok when anything of the story is not as claimed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from swapckpt.demo.records import Finished
from swapckpt.demo.verdict import judge
from swapckpt.storage import CheckpointState
from tests.demo.stories import checkpoint, make_story

if TYPE_CHECKING:
    from swapckpt.demo.records import Stepped
    from swapckpt.demo.verdict import Story
    from swapckpt.storage import CheckpointInfo


@pytest.fixture
def story() -> Story:
    return make_story()


def failed_claims(story: Story) -> list[str]:
    return [check.claim for check in judge(story) if not check.ok]


def ulp_up(record: Stepped) -> Stepped:
    return replace(record, loss_hex=math.nextafter(record.loss, math.inf).hex())


def test_story_as_it_should_be_is_ok(story: Story) -> None:
    assert failed_claims(story) == []


@pytest.mark.parametrize("index", [0, 3, 6])
def test_one_bit_before_the_kill_is_not_ok(story: Story, index: int) -> None:
    story.swapped.steps[index] = ulp_up(story.swapped.steps[index])
    assert failed_claims(story) == ["losses before the kill"]
    (check,) = (check for check in judge(story) if not check.ok)
    assert check.evidence == f"6 of 7 equal to the last bit; step {index + 1} differs first"


def test_one_bit_after_the_resume_is_not_ok(story: Story) -> None:
    story.resumed.steps[-1] = ulp_up(story.resumed.steps[-1])
    assert failed_claims(story) == ["losses after the resume"]


def test_negative_zero_is_not_zero(story: Story) -> None:
    story.reference.steps[-1] = replace(story.reference.steps[-1], loss_hex=(0.0).hex())
    story.resumed.steps[-1] = replace(story.resumed.steps[-1], loss_hex=(-0.0).hex())
    assert failed_claims(story) == ["losses after the resume"]


def test_step_unknown_to_the_reference_is_not_ok(story: Story) -> None:
    del story.reference.steps[-1]
    assert failed_claims(story) == ["losses after the resume"]


def test_run_without_steps_is_not_ok(story: Story) -> None:
    story.resumed.steps.clear()
    assert failed_claims(story) == ["losses after the resume"]


def test_complete_save_is_no_kill_inside_a_save(story: Story) -> None:
    assert story.kill is not None
    nothing = replace(story.kill, written_nbytes=0)
    assert failed_claims(replace(story, kill=nothing)) == ["killed inside a save"]
    committed = replace(story.kill, found=(checkpoint(3), checkpoint(6)))
    assert failed_claims(replace(story, kill=committed)) == [
        "killed inside a save",
        "its remainder is no checkpoint",
        "resumed from a committed save",
    ]


@pytest.mark.parametrize(
    "left", [(), (checkpoint(6, CheckpointState.CORRUPT),), (checkpoint(5, CheckpointState.INCOMPLETE),)]
)
def test_other_remainder_of_the_kill_is_not_ok(left: tuple[CheckpointInfo, ...], story: Story) -> None:
    assert story.kill is not None
    kill = replace(story.kill, found=(checkpoint(3), *left))
    assert failed_claims(replace(story, kill=kill)) == ["its remainder is no checkpoint"]


def test_missing_kill_is_not_ok(story: Story) -> None:
    assert failed_claims(replace(story, kill=None)) == [
        "killed inside a save",
        "its remainder is no checkpoint",
        "resumed from a committed save",
    ]


@pytest.mark.parametrize("start", [0, 6])
def test_resume_from_elsewhere_is_not_ok(story: Story, start: int) -> None:
    story.resumed.start = start
    assert failed_claims(story) == ["resumed from a committed save"]


@pytest.mark.parametrize("end", [None, Finished("other", "moments"), Finished("params", "other")])
def test_other_end_is_not_ok(story: Story, end: Finished | None) -> None:
    story.resumed.finished = end
    assert failed_claims(story) == ["final parameters and moments"]


def test_state_left_on_the_device_is_not_ok(story: Story) -> None:
    story.swapped.steps[2] = replace(story.swapped.steps[2], device_nbytes=1)
    assert failed_claims(story) == ["state on the device between steps"]


@pytest.mark.parametrize("kept", [(), (12,), (6, 9, 12), (6, 12)])
def test_other_checkpoints_than_the_last_two_are_not_ok(kept: tuple[int, ...], story: Story) -> None:
    assert failed_claims(replace(story, kept=kept)) == ["the last 2 saves are kept"]


def test_kept_checkpoints_may_be_of_both_runs(story: Story) -> None:
    del story.resumed.saves[1:]
    assert failed_claims(replace(story, kept=(3, 6))) == []
