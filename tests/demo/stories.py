"""A made-up story for tests that look at how stories are judged and shown."""

from __future__ import annotations

from swapckpt.demo.records import Finished, Stepped
from swapckpt.demo.verdict import Kill, RunLog, Story

MIB = 2**20


def unswapped(number: int) -> Stepped:
    return Stepped(number, (5 / number).hex(), 0.1, 38 * MIB, 38 * MIB, 0)


def swapped(number: int) -> Stepped:
    return Stepped(number, (5 / number).hex(), 0.1, 0, 7 * MIB, 38 * MIB)


def make_story() -> Story:
    """Steps 1 to 12, killed in the save of step 6, resumed from step 3."""
    end = Finished("params", "moments")
    return Story(
        reference=RunLog("reference", 0, [unswapped(n) for n in range(1, 13)], {}, end),
        swapped=RunLog("swapped", 0, [swapped(n) for n in range(1, 7)], {3: 0.1}, None),
        resumed=RunLog("resumed", 3, [swapped(n) for n in range(4, 13)], {6: 0.1}, end),
        kill=Kill(step=6, written_nbytes=1000, incomplete=True, newest_complete=3),
    )
