"""State dicts by FQN, as stock torch flattens them: the first one, and those that are built like it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultSavePlanner

from swapckpt.flatten import Flattener

LEAVES = st.one_of(
    st.integers(0, 9),
    st.text("ab", max_size=2),
    st.builds(lambda: torch.zeros(1)),
    st.builds(lambda: torch.nn.Parameter(torch.zeros(1))),
    st.lists(st.integers(0, 9), max_size=2),
    st.tuples(st.integers(0, 9)),
)
KEYS = st.sampled_from(["a", "b", "c", "a.b", 0, 1, "1"])
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.dictionaries(KEYS, inner, max_size=3), st.lists(inner, max_size=3)),
    max_leaves=8,
)
STATES = st.dictionaries(KEYS, TREES, max_size=3)


def stock(state: dict[Any, Any]) -> tuple[dict[str, object], dict[str, Any]]:
    """Raises ValueError where two values have one FQN."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    return planner.state_dict, planner.mappings


def check(flattener: Flattener, state: dict[Any, Any]) -> None:
    found = flattener.flattened(state)
    try:
        expected, paths = stock(state)
    except ValueError:
        assert found is None
        return
    assert found is not None
    assert list(found[0]) == list(expected)
    assert all(value is expected[fqn] for fqn, value in found[0].items())
    assert found[1] == paths


@given(states=st.lists(STATES, min_size=2, max_size=3))
@settings(max_examples=200, deadline=None)
def test_any_state_dicts_one_after_the_other_are_flattened_as_by_stock(states: list[dict[Any, Any]]) -> None:
    flattener = Flattener()
    for state in [*states, *states]:
        check(flattener, state)


@given(state=STATES)
@settings(max_examples=100, deadline=None)
def test_of_the_same_state_only_values_are_collected(state: dict[Any, Any]) -> None:
    flattener = Flattener()
    first = flattener.flattened(state)
    second = flattener.flattened(dict(state))
    if first is not None and second is not None:
        assert second[1] is first[1]
        assert all(value is first[0][fqn] for fqn, value in second[0].items())


T = torch.zeros(1)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": T}, {"b": T}),
        ({"a": T}, {"a": {"b": T}}),
        ({"a": {"b": T}}, {"a": T}),
        ({"a": {"b": T}}, {"a": [T]}),
        ({"a": [T]}, {"a": {0: T}}),
        ({"a": [T]}, {"a": [T, T]}),
        ({"a": [T, T]}, {"a": [T]}),
        ({"a": [T]}, {"a": [1]}),
        ({"a": [1]}, {"a": [T]}),
        ({"a": [T, 1]}, {"a": [T, [T]]}),
        ({"a": T, "b": T}, {"b": T, "a": T}),
        ({"a": {0: T}}, {"a": {"0": T}}),
    ],
)
def test_what_is_built_otherwise_is_flattened_anew(before: dict[str, Any], after: dict[str, Any]) -> None:
    flattener = Flattener()
    check(flattener, before)
    check(flattener, after)
    check(flattener, before)
