"""A made-up story for tests that look at how stories are judged and shown."""

from __future__ import annotations

from swapckpt.demo.records import Finished, Saved, Stepped
from swapckpt.demo.verdict import Kill, RunLog, Story
from swapckpt.storage import CheckpointInfo, CheckpointState

MIB = 2**20


def unswapped(number: int) -> Stepped:
    return Stepped(number, (5 / number).hex(), 0.1, 38 * MIB, 38 * MIB, 0)


def swapped(number: int) -> Stepped:
    return Stepped(number, (5 / number).hex(), 0.1, 0, 7 * MIB, 38 * MIB)


def checkpoint(step: int, state: CheckpointState = CheckpointState.COMPLETE) -> CheckpointInfo:
    return CheckpointInfo(f"step-{step}", "somewhere", step, state, 1000, None, 2, "")


def make_story() -> Story:
    """Steps 1 to 12, killed in step 7 inside the save of step 6, resumed from step 3."""
    end = Finished("params", "moments")
    saves = [Saved(step, 0.01, 0.1) for step in (6, 9, 12)]
    return Story(
        reference=RunLog("reference", 0, [unswapped(n) for n in range(1, 13)], [], end),
        swapped=RunLog("swapped", 0, [swapped(n) for n in range(1, 8)], [Saved(3, 0.01, 0.1)], None),
        resumed=RunLog("resumed", 3, [swapped(n) for n in range(4, 13)], saves, end),
        kill=Kill(6, 1000, 2000, (checkpoint(3), checkpoint(6, CheckpointState.INCOMPLETE))),
        kept=(9, 12),
    )
