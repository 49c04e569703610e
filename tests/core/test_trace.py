"""The timeline of a step, and the file a trace viewer reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from torch import nn, optim

from swapckpt import StateManager, SwapConfig
from swapckpt.device import CpuDevice
from swapckpt.trace import Span, Timeline
from tests.core.training import Recipe, Twins

if TYPE_CHECKING:
    from pathlib import Path

RECIPE = Recipe(cls=optim.AdamW, options={"foreach": False}, shapes=((40, 40),) * 8)


def test_the_chrome_trace_of_known_spans(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.add(Span("offload", "offload", 0, begin_ns=5_000, end_ns=9_000, nbytes=64))
    timeline.add(Span("load", "load", 0, begin_ns=2_000, end_ns=4_500, nbytes=64))
    timeline.write_chrome_trace(tmp_path / "timeline.json")
    assert json.loads((tmp_path / "timeline.json").read_text()) == {
        "displayTimeUnit": "ms",
        "traceEvents": [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "load"}},
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "offload"}},
            {
                "ph": "X",
                "name": "load",
                "pid": 0,
                "tid": 0,
                "ts": 0.0,
                "dur": 2.5,
                "args": {"batch": 0, "nbytes": 64},
            },
            {
                "ph": "X",
                "name": "offload",
                "pid": 0,
                "tid": 1,
                "ts": 3.0,
                "dur": 4.0,
                "args": {"batch": 0, "nbytes": 64},
            },
        ],
    }


def test_an_empty_timeline_is_a_valid_file(tmp_path: Path) -> None:
    Timeline().write_chrome_trace(str(tmp_path / "timeline.json"))
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] == []


@pytest.mark.parametrize("policy", ["inline", "thread", "lazy", "random"])
def test_a_recorded_step_has_a_span_for_every_stage_of_every_batch(policy: str) -> None:
    twins = Twins(RECIPE, SwapConfig(swap_times=4), CpuDevice(policy))
    manager = StateManager(nn.ParameterList(twins.params), twins.swapped)
    twins.step()
    with manager.record_timeline() as timeline:
        twins.step()
    twins.step()
    spans = {(span.stream, span.batch): span for span in timeline.spans}
    assert len(spans) == len(timeline.spans)
    assert sorted(spans) == [
        (stream, batch) for stream in ("compute", "load", "offload") for batch in range(4)
    ]
    for batch in range(4):
        load, update, offload = (spans[stream, batch] for stream in ("load", "compute", "offload"))
        assert load.begin_ns <= load.end_ns <= update.begin_ns <= update.end_ns <= offload.begin_ns
        assert offload.begin_ns <= offload.end_ns
        assert (load.name, update.name, offload.name) == ("load", "update", "offload")
        # two parameters with two moments of 6400 bytes each, at multiples of 512: one run
        assert (load.nbytes, update.nbytes, offload.nbytes) == (3 * 6656 + 6400, 0, 3 * 6656 + 6400)
    for batch in range(3, 4):  # a buffer is loaded again only after its offload
        assert spans["offload", batch - 3].end_ns <= spans["load", batch].begin_ns
    twins.check()


def test_a_step_that_creates_state_has_nothing_to_load() -> None:
    twins = Twins(RECIPE, SwapConfig(swap_times=4))
    manager = StateManager(nn.ParameterList(twins.params), twins.swapped)
    with manager.record_timeline() as timeline:
        twins.step()
    assert {span.stream for span in timeline.spans} == {"compute", "offload"}
