"""The pictures must show what was measured: every step of every run, and the kill where it was."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from PIL import Image  # comes with matplotlib

from swapckpt.demo.pictures import draw_pictures, loss_figure, memory_figure
from tests.demo.stories import make_story

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes


def curves(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    """Label to x and y of every line."""
    return {
        str(line.get_label()): (np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist())
        for line in axes.lines
    }


def test_loss_shows_every_step_of_the_three_runs() -> None:
    top, bottom = loss_figure(make_story()).axes
    shown = curves(top)
    assert shown["reference (unswapped)"] == (list(range(1, 13)), [5 / n for n in range(1, 13)])
    assert shown["swapped, killed"][0] == list(range(1, 8))
    assert shown["resumed"][0] == list(range(4, 13))
    assert curves(bottom)["resumed"] == (list(range(4, 13)), [0.0] * 9)


def test_loss_marks_the_kill() -> None:
    top, _ = loss_figure(make_story()).axes
    assert ([7, 7], [0, 1]) in curves(top).values()  # the last step that was done while step 6 was saved
    assert {text.get_text() for text in top.texts} == {
        "SIGKILL in the save\nof step 6",
        "resumed\nfrom step 3",
    }


def test_loss_says_so_when_runs_differ() -> None:
    story = make_story()
    assert "all 16 losses equal" in loss_figure(story).get_suptitle()
    record = story.resumed.steps[2]
    story.resumed.steps[2] = replace(record, loss_hex=math.nextafter(record.loss, 9).hex())
    assert "1 of 16 losses differ" in loss_figure(story).get_suptitle()


def test_memory_shows_device_and_host_swapped_and_not() -> None:
    device, host = (curves(axes) for axes in memory_figure(make_story()).axes)
    assert device["unswapped, all the time"] == (list(range(1, 13)), [38.0] * 12)
    assert device["swapped, within a step"][1] == [7.0] * 7
    assert device["swapped, between steps"][1] == [0.0] * 7
    assert host["swapped"][1] == [38.0] * 7
    assert host["unswapped"][1] == [0.0] * 12


def test_story_without_a_kill_can_be_drawn(tmp_path: Path) -> None:
    draw_pictures(replace(make_story(), kill=None), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"loss.png", "memory.png"}


def test_files_are_pictures(tmp_path: Path) -> None:
    draw_pictures(make_story(), tmp_path)
    for name in ("loss.png", "memory.png"):
        with Image.open(tmp_path / name) as image:
            assert image.size == (1200, 810)
            colors = image.convert("RGB").getcolors(maxcolors=2**24)
            assert colors is not None
            assert (0x00, 0x72, 0xB2) in {color for _, color in colors}
