"""Values taken apart for DCP and put together again: what stays one value, what names do not tell."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from types import MappingProxyType
from typing import Any

import pytest
import torch

from swapckpt.checkpointer.trees import Whole, leaves, packed, rebuilt

TENSOR = torch.ones(2)
SHARDED = torch.ones(2)
SHARDED.local_shards = list  # type: ignore[attr-defined] # all that tells a ShardedTensor from others


class Own(dict):  # type: ignore[type-arg]
    """A kind of dict that no checkpoint keeps."""


@pytest.mark.parametrize(
    "value",
    [
        *({1: 2}, {"a": 1, 2: TENSOR}, {1: TENSOR}, {}, [], [1, {"a": 2}]),
        *(Counter("a"), OrderedDict(a=1), defaultdict(list, a=[1])),
    ],
    ids=repr,
)
def test_what_names_would_change_is_one_value(value: Any) -> None:
    found = packed(value)
    assert isinstance(found, Whole)
    assert found.value is value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Own(a=1), {"a": 1}),
        (Own({1: 2}), Whole({1: 2})),
        (MappingProxyType({"a": 1}), {"a": 1}),
        (defaultdict(lambda: 0, {1: 2}), Whole({1: 2})),
    ],
)
def test_kinds_that_no_checkpoint_keeps_are_saved_as_dicts(value: Any, expected: Any) -> None:
    found = packed(value)
    assert found == expected
    assert type(found.value if isinstance(found, Whole) else found) is dict


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 1}}),
        (OrderedDict(a=TENSOR), {"a": TENSOR}),
        (OrderedDict(a={"b": TENSOR}), {"a": {"b": TENSOR}}),
        ({1: SHARDED}, {"1": SHARDED}),
        ({1: [(SHARDED,)]}, {"1": [(SHARDED,)]}),
        ([TENSOR, 1], [TENSOR, 1]),
        ([(1, TENSOR)], [(1, TENSOR)]),
    ],
    ids=["strings", "state dict", "below", "sharded", "sharded below", "list", "tuple in a list"],
)
def test_what_has_a_name_is_taken_apart(value: Any, expected: Any) -> None:
    assert packed(value) == expected


def test_leaves_have_their_paths() -> None:
    value = {"a": [TENSOR, {"b": 1}], "c": Whole([])}
    assert list(leaves(value, ("s",))) == [
        (("s", "a", 0), TENSOR),
        (("s", "a", 1, "b"), 1),
        (("s", "c"), Whole([])),
    ]


@pytest.mark.parametrize(
    ("found", "like", "expected"),
    [
        ([((), Whole({1: 2}))], {}, {1: 2}),
        ([((), 3)], {}, 3),
        ([((1,), "b"), ((0,), "a")], [], ["a", "b"]),
        ([((0,), "a")], ["x", "y"], ["a"]),
        ([((0, "1"), 5)], [Counter({1: 0})], [Counter({1: 5})]),
        ([(("1",), 10), (("-3",), 30), (("x",), 1)], {1: 0}, {1: 10, -3: 30, "x": 1}),
        ([(("1",), 10)], {}, {"1": 10}),
        ([(("1",), 10)], {"a": 0}, {"1": 10}),
        ([(("(1, 2)",), 5), (("None",), 6)], {(1, 2): 0, None: 0}, {(1, 2): 5, None: 6}),
        ([(("a", "1"), 5)], {"a": {1: 0}}, {"a": {1: 5}}),
        ([(("a",), 1)], OrderedDict(), OrderedDict(a=1)),
        ([(("a",), 1)], Own(), {"a": 1}),
    ],
)
def test_what_names_do_not_tell_is_as_in_the_live_value(found: Any, like: Any, expected: Any) -> None:
    again = rebuilt(found, like)
    assert again == expected
    assert type(again) is type(expected)
    if isinstance(expected, list):
        assert list(map(type, again)) == list(map(type, expected))


def test_a_value_of_which_nothing_was_saved_stays() -> None:
    like = [1]
    assert rebuilt([], like) is like
