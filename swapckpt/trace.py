"""Timeline of a step: one span per batch and stream, written in the Chrome trace format (opens in
Perfetto)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from os import PathLike


@dataclass(frozen=True, slots=True)
class Span:
    """Work on one stream: ``[begin_ns, end_ns)`` on the host's monotonic clock."""

    stream: str
    name: str
    batch: int
    begin_ns: int
    end_ns: int
    nbytes: int = 0


@dataclass(slots=True)
class Timeline:
    """Spans collected while recording, in the order in which they were finished."""

    spans: list[Span] = field(default_factory=list)

    def add(self, span: Span) -> None:
        """Append one span. Called from copy threads too (``list.append`` is atomic)."""
        self.spans.append(span)

    def write_chrome_trace(self, path: str | PathLike[str]) -> None:
        """Write the spans as Chrome trace events: one row per stream, microseconds from the first span."""
        origin = min((span.begin_ns for span in self.spans), default=0)
        streams = sorted({span.stream for span in self.spans})
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": stream}}
            for row, stream in enumerate(streams)
        ]
        events += [
            {
                "ph": "X",
                "name": span.name,
                "pid": 0,
                "tid": streams.index(span.stream),
                "ts": (span.begin_ns - origin) / 1000,
                "dur": (span.end_ns - span.begin_ns) / 1000,
                "args": {"batch": span.batch, "nbytes": span.nbytes},
            }
            for span in sorted(self.spans, key=lambda span: span.begin_ns)
        ]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
