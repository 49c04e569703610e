"""The demo must refuse settings it cannot tell its story with, before it starts anything."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swapckpt.demo.config import DemoConfig, default_ranks
from swapckpt.demo.records import Finished, Saved, Saving, Started, Stepped, TrainConfig, decode, encode
from swapckpt.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("ranks", 0, "ranks must be an integer >= 1"),
        ("batch", 7, "multiple of the 2 ranks"),
        ("batch", 0, "batch must be"),
        ("steps", 7, "at least 2 x save_every = 8"),
        ("save_every", 0, "save_every must be"),
        ("time", 1, "time must be"),
        ("seed", -1, "seed must be"),
        ("swap_times", 0, "swap_times must be"),
        ("params", "many", "model size"),
        ("store", "S3", "store must be one of disk, s3, got 'S3'"),
        ("device", "abacus", "device must be 'cpu' or what torch finds here"),
    ],
)
def test_setting_outside_its_range_is_refused(field: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(DemoConfig(), **{field: value})


def test_a_device_that_is_not_there_is_refused_as_such_and_not_for_its_ranks() -> None:
    with pytest.raises(ConfigError, match="device must be"):
        replace(DemoConfig(), device="abacus", ranks=default_ranks("abacus"))


def test_kill_is_in_a_save_that_happens_and_has_one_before_it() -> None:
    for save_every, steps in itertools.product([1, 2, 3, 5, 7], range(14, 60)):
        config = DemoConfig(steps=steps, save_every=save_every)
        assert config.kill_step % save_every == 0
        assert 2 * save_every <= config.kill_step <= steps


def test_reference_neither_swaps_nor_saves() -> None:
    reference, swapped = DemoConfig().reference_run(), DemoConfig().swapped_run()
    assert (reference.swap_times, reference.checkpoints, reference.timeline) == (None, None, None)
    assert replace(swapped, swap_times=None, checkpoints=None, timeline=None, save_every=0) == reference


def test_train_config_survives_json() -> None:
    config = replace(DemoConfig(data=Path("some/text")).swapped_run(), learning_rate=0.1 + 0.2)
    assert TrainConfig.from_json(config.to_json()) == config
    assert TrainConfig.from_json(DemoConfig().reference_run().to_json()) == DemoConfig().reference_run()


@pytest.mark.parametrize(
    "event",
    [
        Started(start=4, device="cpu"),
        Stepped(3, (0.1 + 0.2).hex(), 0.5, 0, 1, 2),
        Saving(3),
        Saved(3, 0.01, 0.25),
        Finished("a", "b"),
    ],
)
def test_event_survives_its_line(event: Started | Stepped | Saving | Saved | Finished) -> None:
    line = encode(event)
    assert "\n" not in line
    assert decode(line) == event
