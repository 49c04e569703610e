"""Settings: every wrong value is an error when they are made, and says what is allowed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from swapckpt import SwapConfig
from swapckpt.errors import ConfigError, SwapCkptError

WRONG: list[tuple[str, Any, str]] = [
    *(
        ("swap_times", value, "swap_times must be an integer >= 1")
        for value in (0, -1, 1.0, "16", True, None)
    ),
    *(("min_numel", value, "min_numel must be an integer >= 0") for value in (-1, 0.5, False, None)),
    *(
        ("staging_buffers", value, "staging_buffers must be an integer >= 2")
        for value in (1, 0, -3, 2.0, True, None)
    ),
    *(("packed", value, "packed must be True or False") for value in (1, 0, "false", None)),
    *(("release_staging", value, "release_staging must be True or False") for value in (1, "yes", None)),
    *(("spare_nbytes", value, "spare_nbytes must be an integer >= 0") for value in (-1, 1.5, "1G", True)),
    *(
        ("timeout_secs", value, "timeout_secs must be a positive finite number")
        for value in (0, -1.0, float("inf"), float("nan"), "600", True, None)
    ),
    *(
        ("state_keys", value, "state_keys must be None or a sequence of non-empty strings")
        for value in ("exp_avg", ("exp_avg", ""), ("exp_avg", 1), 7, {"exp_avg"})
    ),
    *(("master_weights", value, "master_weights must be True or False") for value in (1, "yes", None)),
    *(("split_oversized", value, "split_oversized must be True or False") for value in (1, "auto")),
    *(
        ("min_slice_numel", value, "min_slice_numel must be an integer >= 1")
        for value in (0, 1.0, True, None)
    ),
    *(("gather_matrices", value, "gather_matrices must be True or False") for value in (1, "yes", None)),
    *(("shard_replicas", value, "shard_replicas must be True or False") for value in (1, "yes", None)),
    *(
        ("replica_group_size", value, "replica_group_size must be an integer >= 1")
        for value in (0, -2, 2.0, "8", True)
    ),
    ("replica_group_size", 4, "has no effect without shard_replicas=True"),
    *(
        ("replica_bucket_nbytes", value, "replica_bucket_nbytes must be an integer >= 512")
        for value in (511, 0, 1024.0, "1M", True, None)
    ),
    ("state_keys", (), "or name at least one key"),
    ("state_keys", [], "or name at least one key"),
]


@pytest.mark.parametrize(
    ("name", "value", "message"), WRONG, ids=[f"{name}={value!r}" for name, value, _ in WRONG]
)
def test_a_wrong_value_is_refused_with_what_is_allowed(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SwapConfig(**{name: value})
    assert message in str(caught.value)
    assert repr(value) in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, SwapCkptError)


RIGHT: list[tuple[str, Any]] = [
    ("swap_times", 1),
    ("swap_times", 10**6),
    ("min_numel", 0),
    ("staging_buffers", 2),
    ("packed", False),
    ("release_staging", False),
    ("spare_nbytes", 0),
    ("spare_nbytes", None),
    ("timeout_secs", 1),
    ("timeout_secs", 0.001),
    ("master_weights", True),
    ("split_oversized", None),
    ("split_oversized", False),
    ("min_slice_numel", 1),
    ("gather_matrices", True),
    ("shard_replicas", True),
    ("replica_group_size", None),
    ("replica_bucket_nbytes", 512),
    ("state_keys", None),
    ("state_keys", ("exp_avg",)),
]


@pytest.mark.parametrize(("name", "value"), RIGHT, ids=str)
def test_values_at_the_edge_are_allowed(name: str, value: Any) -> None:
    assert getattr(SwapConfig(**{name: value}), name) == value


def test_every_setting_is_tested_at_its_edges() -> None:
    settings = {field.name for field in dataclasses.fields(SwapConfig)}
    assert {name for name, *_ in WRONG} == settings
    assert {name for name, _ in RIGHT} == settings


def test_a_list_of_keys_becomes_a_tuple_so_that_settings_are_hashable() -> None:
    config = SwapConfig(state_keys=["b", "a"])  # type: ignore[arg-type]
    assert config.state_keys == ("b", "a")
    assert hash(config) == hash(SwapConfig(state_keys=("b", "a")))


def test_settings_cannot_be_changed_or_given_by_position() -> None:
    config = SwapConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.swap_times = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        SwapConfig(16)  # type: ignore[misc]
    with pytest.raises(TypeError, match="swap_time"):
        SwapConfig(swap_time=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError):
        dataclasses.replace(config, swap_times=0)


def test_the_defaults() -> None:
    assert SwapConfig() == SwapConfig(
        swap_times=16,
        state_keys=None,
        min_numel=1024,
        packed=True,
        staging_buffers=3,
        release_staging=True,
        spare_nbytes=None,
        timeout_secs=600.0,
        master_weights=False,
        shard_replicas=False,
        replica_group_size=None,
        replica_bucket_nbytes=32 * 1024 * 1024,
    )
