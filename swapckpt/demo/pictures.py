"""``loss.png`` and ``memory.png`` of a story. Needs matplotlib (the extra ``plot``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from swapckpt.demo.units import human_nbytes
from swapckpt.demo.verdict import differing_steps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from matplotlib.axes import Axes

    from swapckpt.demo.records import Stepped
    from swapckpt.demo.verdict import RunLog, Story

# Okabe and Ito's palette: distinguishable with every kind of colour vision.
_GREY, _BLUE, _GREEN, _ORANGE, _RED = "#b0b0b0", "#0072b2", "#009e73", "#e69f00", "#d55e00"
_DPI = 150


@dataclass(frozen=True, slots=True)
class _Line:
    """Look of one line; sizes in points. An empty label stays out of the legend."""

    color: str
    width: float = 1.5
    label: str = ""
    marker: str = ""
    marker_size: float = 0
    hollow: bool = False


# Hollow around filled: where two runs did the same step, both remain visible.
_SWAPPED = _Line(_BLUE, label="swapped, killed", marker="o", marker_size=8, hollow=True)
_RESUMED = _Line(_GREEN, label="resumed", marker="o", marker_size=4)


def draw_pictures(story: Story, folder: Path) -> None:
    """Write ``loss.png`` and ``memory.png``."""
    loss_figure(story).savefig(folder / "loss.png", dpi=_DPI)
    memory_figure(story).savefig(folder / "memory.png", dpi=_DPI)


def loss_figure(story: Story) -> Figure:
    """Losses of the three runs over steps, the kill marked, and below them the differences."""
    figure = _figure()
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    _plot(top, story.reference, _loss, _Line(_GREY, width=6, label="reference (unswapped)"))
    _plot(top, story.swapped, _loss, _SWAPPED)
    _plot(top, story.resumed, _loss, _RESUMED)
    top.set_ylabel("loss (nats per byte)")
    top.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)
    top.margins(y=0.12)
    _mark_kill(top, story, words=True)
    figure.suptitle(_loss_title(story), x=0.01, ha="left", fontsize=12)

    expected = {record.step: record.loss for record in story.reference.steps}
    for run, line in ((story.swapped, _SWAPPED), (story.resumed, _RESUMED)):
        _plot(bottom, run, lambda record: record.loss - expected[record.step], line)
    bottom.set_ylabel("minus\nreference")
    bottom.set_xlabel("step")
    if not _num_different(story):
        bottom.set_ylim(-1, 1)
        bottom.set_yticks([0])
    _mark_kill(bottom, story, words=False)
    return figure


def memory_figure(story: Story) -> Figure:
    """Bytes of optimizer state on the device (between and within steps) and on the host, over steps."""
    figure = _figure()
    top, bottom = figure.subplots(2, 1, sharex=True)
    _plot(top, story.reference, _device_mib, _Line(_GREY, width=3, label="unswapped, all the time"))
    _plot(bottom, story.reference, _host_mib, _Line(_GREY, width=3, label="unswapped"))
    for run, labelled in ((story.swapped, True), (story.resumed, False)):
        within, between, host = (
            ("swapped, within a step", "swapped, between steps", "swapped") if labelled else ("",) * 3
        )
        _plot(top, run, _peak_mib, _Line(_ORANGE, width=2, label=within))
        _plot(top, run, _device_mib, _Line(_BLUE, width=3, label=between))
        _plot(bottom, run, _host_mib, _Line(_BLUE, width=3, label=host))
    for axes, title in ((top, "on the device"), (bottom, "in host memory")):
        highest = max(axes.dataLim.ymax, 1e-3)
        axes.set_ylim(-0.05 * highest, 1.3 * highest)
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_ylabel("MiB")
        axes.legend(frameon=False, loc="center right")
        _mark_kill(axes, story, words=axes is top)
    bottom.set_xlabel("step")
    figure.suptitle(_memory_title(story), x=0.01, ha="left", fontsize=12)
    return figure


def _figure() -> Figure:
    figure = Figure(figsize=(8, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _plot(axes: Axes, run: RunLog, value: Callable[[Stepped], float], line: _Line) -> None:
    axes.plot(
        [record.step for record in run.steps],
        [value(record) for record in run.steps],
        color=line.color,
        label=line.label,
        linewidth=line.width,
        marker=line.marker,
        markersize=line.marker_size,
        markerfacecolor="none" if line.hollow else line.color,
    )


def _loss(record: Stepped) -> float:
    return record.loss


def _device_mib(record: Stepped) -> float:
    return record.device_nbytes / 2**20


def _peak_mib(record: Stepped) -> float:
    return record.device_peak_nbytes / 2**20


def _host_mib(record: Stepped) -> float:
    return record.host_nbytes / 2**20


def _mark_kill(axes: Axes, story: Story, *, words: bool) -> None:
    """Mark the kill and shade the steps that the resumed run repeats."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if story.kill is None:
        return
    # Training went on while the step was saved: what is lost ends with the last step that was done.
    resumed, killed = story.kill.newest_committed, story.swapped.steps[-1].step
    axes.axvline(killed, color=_RED, linestyle="--", linewidth=1.2)
    axes.axvspan(resumed, killed, color=_RED, alpha=0.08, linewidth=0)
    if words:
        _note(axes, f"SIGKILL in the save\nof step {story.kill.step}", step=killed, offset=4, align="left")
        _note(axes, f"resumed\nfrom step {resumed}", step=resumed, offset=-4, align="right")


def _note(axes: Axes, text: str, *, step: int, offset: float, align: Literal["left", "right"]) -> None:
    axes.annotate(
        text,
        (step, 1.0),
        xytext=(offset, -2),
        xycoords=axes.get_xaxis_transform(),
        textcoords="offset points",
        color=_RED,
        fontsize=9,
        va="top",
        ha=align,
    )


def _num_different(story: Story) -> int:
    return sum(len(differing_steps(story.reference, run)) for run in (story.swapped, story.resumed))


def _loss_title(story: Story) -> str:
    total = len(story.swapped.steps) + len(story.resumed.steps)
    different = _num_different(story)
    if different:
        return f"{different} of {total} losses differ from the unswapped reference"
    return f"Killed and resumed: all {total} losses equal the unswapped reference to the last bit"


def _memory_title(story: Story) -> str:
    unswapped = max(record.device_nbytes for record in story.reference.steps)
    peak = max(record.device_peak_nbytes for run in (story.swapped, story.resumed) for record in run.steps)
    return (
        f"Optimizer state of one rank: {human_nbytes(unswapped)} on the device unswapped, "
        f"{human_nbytes(peak)} at most swapped"
    )
