"""What the demo shows must be readable at 80 columns, on a terminal and in a log."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from swapckpt.demo.config import DemoConfig
from swapckpt.demo.display import Display
from swapckpt.demo.records import Saving, Started
from swapckpt.demo.units import human_nbytes
from swapckpt.demo.verdict import judge
from tests.demo.stories import MIB, make_story


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (7 * MIB, "7.00 MiB"),
        (38.125 * MIB, "38.1 MiB"),
        (850 * MIB, "850 MiB"),
        (1500 * MIB, "1.46 GiB"),
        (64 * 1024 * 1024 * MIB, "65536 GiB"),
    ],
)
def test_bytes_have_three_digits(nbytes: float, text: str) -> None:
    assert human_nbytes(nbytes) == text


def show(*, terminal: bool) -> str:
    """All that a console of 80 columns is sent during the made-up story."""
    sent = io.StringIO()
    console = Console(file=sent, width=80, height=24, force_terminal=terminal, color_system=None)
    story = make_story()
    with Display(console, DemoConfig(steps=12, save_every=3)) as display:
        for log in (story.reference, story.swapped, story.resumed):
            display.chapter(log.name, "a run")
            display.event(log, Started(start=log.start, device="cpu"))
            for record in log.steps:
                display.event(log, record)
                if record.step % 3 == 0 and log is not story.reference:
                    display.event(log, Saving(record.step))
                for save in log.saves:
                    if save.step == record.step - 1:  # training goes on before a save is committed
                        display.event(log, save)
            if log is story.swapped:
                assert story.kill is not None
                display.killed(story.kill)
        display.event(log, log.saves[-1])
    display.verdict(judge(story))
    return sent.getvalue()


def test_log_has_one_plain_line_per_event_within_80_columns() -> None:
    lines = show(terminal=False).splitlines()
    assert not [line for line in lines if len(line) > 80]
    assert "\x1b" not in "".join(lines)
    assert sum(" step " in line and " loss " in line for line in lines) == 12 + 7 + 9
    assert any(
        re.match(r"swapped +step  6/12 +loss 0\.8333 .*0 B .*7\.00 MiB.*38\.0 MiB", line) for line in lines
    )
    assert any("saved step 3: stalled training by 0.010 s, committed in 0.10 s" in line for line in lines)
    assert any("SIGKILL" in line and "step 6" in line and "1000 B" not in line for line in lines)
    assert any("resumed after step 3" in line for line in lines)


def test_terminal_shows_one_table_within_80_columns() -> None:
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", show(terminal=True)).replace("\r", "")
    assert not [line for line in text.splitlines() if len(line) > 80]
    last = text[text.rindex("peak") :]
    assert re.search(r"swapped +6/12 +0\.8333 +0 B +7\.00 MiB +38\.0 MiB +0\.10 +KILLED", last)
    assert re.search(r"swapped +7/12 .* 0\.10 *$", last, re.MULTILINE)
    for step in (6, 9, 12):
        assert re.search(rf"resumed +{step}/12 .* 0\.10 +0\.010 +0\.10 *$", last, re.MULTILINE)
    assert "writing" not in last


def test_verdict_names_each_check_once() -> None:
    text = show(terminal=False)
    for check in judge(make_story()):
        assert text.count(check.claim) == 1
    assert text.count(" ok ") == len(judge(make_story()))
