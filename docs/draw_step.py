"""Draws ``docs/images/step.svg`` from the step plan itself: ``python docs/draw_step.py``.

The times are those of the plan on a virtual clock, so the figure cannot show an order that the pipeline does
not run.
"""  # noqa: INP001 - a script

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swapckpt.plan import Op, OpKind, StepPlan

PATH = Path(__file__).parent / "images" / "step.svg"
PLAN = StepPlan(num_batches=8, staging_buffers=3)
UNITS = {OpKind.LOAD: 2.0, OpKind.UPDATE: 1.2, OpKind.OFFLOAD: 2.0}  # a step that the link bounds

_STREAMS = {OpKind.LOAD: "load stream", OpKind.UPDATE: "compute stream", OpKind.OFFLOAD: "offload stream"}
_COLORS = ("#8ec7e8", "#8fd6bd", "#f3cf80")  # one for each buffer
_LEFT, _UNIT, _ROW, _BAR, _GAP = 118, 36, 34, 24, 30  # pixels
_TOP = 34


@dataclass(frozen=True, slots=True)
class Bar:
    """One operation on the virtual clock."""

    op: Op
    begin: float
    end: float


def timeline(plan: StepPlan) -> dict[tuple[OpKind, int], Bar]:
    """When each operation runs: streams in order, different streams in parallel."""
    bars: dict[tuple[OpKind, int], Bar] = {}
    stream_end = dict.fromkeys(OpKind, 0.0)
    for op in plan.operations():
        begin = max([stream_end[op.kind], *(bars[key].end for key in op.after)])
        stream_end[op.kind] = begin + UNITS[op.kind]
        bars[op.key] = Bar(op, begin, stream_end[op.kind])
    return bars


def draw(plan: StepPlan) -> str:
    """The figure as SVG text."""
    bars = timeline(plan)
    width = _LEFT + round(_UNIT * max(bar.end for bar in bars.values())) + 14
    buffers_top = _TOP + 3 * _ROW + _GAP
    height = buffers_top + plan.staging_buffers * _ROW + 10
    title = (
        f"One step: {plan.num_batches} batches (numbers), {plan.staging_buffers} staging buffers (colours)"
    )
    style = 'font-family="sans-serif" font-size="12" fill="#111"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {style}>',
        f'<rect width="{width}" height="{height}" rx="6" fill="#fff"/>',
        f'<text x="12" y="22" font-weight="bold">{title}</text>',
    ]
    tops = {kind: _TOP + row * _ROW for row, kind in enumerate(_STREAMS)}
    parts += [_label(top, _STREAMS[kind]) for kind, top in tops.items()]
    parts += [_label(buffers_top + row * _ROW, f"buffer {row}") for row in range(plan.staging_buffers)]
    for bar in bars.values():
        buffer = plan.buffer_of(bar.op.batch)
        parts += _bar(bar, top=tops[bar.op.kind], color=_COLORS[buffer], text=str(bar.op.batch))
        text = f"{bar.op.kind.value} {bar.op.batch}"
        parts += _bar(bar, top=buffers_top + buffer * _ROW, color=_COLORS[buffer], text=text)
    for bar in (bars[op.key] for op in plan.operations() if op.batch in (0, plan.staging_buffers)):
        for key in bar.op.after:
            parts.append(_wait(bars[key], bar, tops=tops))
    return "\n".join([*parts, "</svg>", ""])


def _label(top: int, text: str) -> str:
    return f'<text x="12" y="{top + 16}">{text}</text>'


def _x(time: float) -> int:
    return _LEFT + round(_UNIT * time)


def _bar(bar: Bar, *, top: int, color: str, text: str) -> list[str]:
    x, width = _x(bar.begin), _x(bar.end) - _x(bar.begin)
    size = 12 if width > 7 * len(text) else 9
    return [
        f'<rect x="{x}" y="{top}" width="{width}" height="{_BAR}" fill="{color}" stroke="#fff"/>',
        f'<text x="{x + width // 2}" y="{top + 16}" text-anchor="middle" font-size="{size}">{text}</text>',
    ]


def _wait(first: Bar, then: Bar, *, tops: dict[OpKind, int]) -> str:
    """A line from the end of ``first`` to the beginning of ``then``, which waits for it."""
    down = tops[then.op.kind] > tops[first.op.kind]
    y1 = tops[first.op.kind] + (_BAR if down else 0)
    y2 = tops[then.op.kind] + (0 if down else _BAR)
    x1, x2 = _x(first.end), _x(then.begin)
    return (
        f'<path d="M{x1} {y1} L{x2} {y2}" stroke="#c0392b" stroke-width="1.6"/>'
        f'<circle cx="{x2}" cy="{y2}" r="2.6" fill="#c0392b"/>'
    )


if __name__ == "__main__":
    PATH.write_text(draw(PLAN))
