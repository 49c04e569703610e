"""``CheckpointConfig``: every wrong value is an error when it is made, and says what is allowed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from swapckpt import AsyncMode, CheckpointConfig
from swapckpt.errors import ConfigError

BOOLS = ("sync_files", "drop_page_cache_after_save", "empty_cache_after_save", "verify_on_load")
WRONG: list[tuple[str, Any, str]] = [
    ("async_mode", "asynk", "Did you mean 'async'?"),
    ("async_mode", "async_with_pinned_memory", "Did you mean 'async_with_pinned_mem'?"),
    *(("async_mode", value, "async_mode must be one of disabled, async") for value in ("", None, True, 1)),
    *((name, value, f"{name} must be True or False") for name in BOOLS for value in (1, 0, "false", None)),
    *(
        (name, value, f"{name} must be an integer >= 1")
        for name in ("keep_latest", "keep_every")
        for value in (0, -1, 1.0, "3", True, False)
    ),
    *(("threads", value, "threads must be an integer >= 1") for value in (0, -4, 2.0, "4", True, None)),
    ("on_busy", "rais", "Did you mean 'raise'?"),
    *(("on_busy", value, "on_busy must be one of wait, raise") for value in ("", None, False)),
    *(
        ("timeout_secs", value, "timeout_secs must be a positive finite number")
        for value in (0, -1.0, float("inf"), float("nan"), "600", True, None)
    ),
]
RIGHT: list[tuple[str, Any]] = [
    *(("async_mode", mode) for mode in AsyncMode),
    *((name, value) for name in BOOLS for value in (True, False)),
    *((name, value) for name in ("keep_latest", "keep_every") for value in (None, 1, 1000)),
    ("threads", 1),
    ("on_busy", "wait"),
    ("on_busy", "raise"),
    ("timeout_secs", 0.001),
    ("timeout_secs", 1),
]


@pytest.mark.parametrize(
    ("name", "value", "message"), WRONG, ids=[f"{name}={value!r}" for name, value, _ in WRONG]
)
def test_a_wrong_value_is_refused_with_what_is_allowed(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CheckpointConfig(**{name: value})
    assert message in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(("name", "value"), RIGHT, ids=str)
def test_values_at_the_edge_are_allowed(name: str, value: Any) -> None:
    assert getattr(CheckpointConfig(**{name: value}), name) == value


def test_every_setting_is_tested_at_its_edges() -> None:
    settings = {field.name for field in dataclasses.fields(CheckpointConfig)}
    assert {name for name, *_ in WRONG} == {name for name, _ in RIGHT} == settings


@pytest.mark.parametrize("mode", AsyncMode)
def test_a_mode_may_be_given_by_its_name(mode: AsyncMode) -> None:
    assert CheckpointConfig(async_mode=mode.value) == CheckpointConfig(async_mode=mode)


def test_settings_cannot_be_changed_or_given_by_position() -> None:
    config = CheckpointConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.threads = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        CheckpointConfig("async")  # type: ignore[misc]
    with pytest.raises(ConfigError):
        dataclasses.replace(config, threads=0)
    assert hash(config) == hash(CheckpointConfig())
