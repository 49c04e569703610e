"""Who owns what, and what travels together: for any sizes and any grid."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swapckpt.errors import ConfigError, PlanError
from swapckpt.ownership import assign_owners, pack, split_ranks, take_turns
from swapckpt.plan import REGION_ALIGNMENT_NBYTES

NUMELS = st.lists(st.integers(0, 5000), max_size=40)
GRIDS = st.lists(st.integers(1, 4), min_size=1, max_size=3)


def loads_of(numels: list[int], owners: tuple[tuple[int, ...], ...]) -> Counter[tuple[int, ...]]:
    loads: Counter[tuple[int, ...]] = Counter()
    for numel, owner in zip(numels, owners, strict=True):
        loads[owner] += numel
    return loads


@given(numels=NUMELS, grid=GRIDS)
def test_every_item_has_an_owner_in_the_grid(numels: list[int], grid: list[int]) -> None:
    owners = assign_owners(numels, grid)
    assert len(owners) == len(numels)
    assert all(0 <= index < size for owner in owners for index, size in zip(owner, grid, strict=True))
    assert owners == assign_owners(list(numels), tuple(grid))


@given(numels=NUMELS, grid=GRIDS)
def test_no_owner_holds_more_than_the_lightest_and_the_largest_item(
    numels: list[int], grid: list[int]
) -> None:
    loads = loads_of(numels, assign_owners(numels, grid))
    lightest = min(loads.values()) if len(loads) == math.prod(grid) else 0
    assert max(loads.values(), default=0) <= lightest + max(numels, default=0)


@given(first=NUMELS, second=NUMELS, grid=GRIDS)
def test_what_comes_later_fills_up_what_is_light(
    first: list[int], second: list[int], grid: list[int]
) -> None:
    held = loads_of(first, assign_owners(first, grid))
    added = loads_of(second, assign_owners(second, grid, held_numel=held))
    loads = held + added
    lightest = min(loads.values()) if len(loads) == math.prod(grid) else 0
    assert max(loads.values(), default=0) <= lightest + max(first + second, default=0)


@pytest.mark.parametrize(
    ("numels", "grid", "owners"),
    [
        ([1, 1, 1, 1], [2], [(0,), (1,), (0,), (1,)]),
        ([10, 1, 9, 2], [2], [(0,), (0,), (1,), (1,)]),  # 10 | 9 2 | 1: 11 and 11
        ([5, 5, 5], [2, 2], [(0, 0), (0, 1), (1, 0)]),  # the fourth coordinate owns nothing
        ([0, 7, 0], [3], [(1,), (0,), (1,)]),  # ties go to the smallest: an empty item weighs nothing
        ([], [4], []),
        ([3, 4], [1], [(0,), (0,)]),
    ],
)
def test_owners_by_hand(numels: list[int], grid: list[int], owners: list[tuple[int, ...]]) -> None:
    assert list(assign_owners(numels, grid)) == owners


def test_owners_of_nonsense() -> None:
    with pytest.raises(PlanError, match=r"got \[-1\] and a grid of \[2\]"):
        assign_owners([-1], [2])
    with pytest.raises(PlanError, match=r"a grid of \[0\]"):
        assign_owners([1], [0])


def test_replicas_are_split_into_consecutive_groups() -> None:
    assert split_ranks([0, 2, 4, 6], None) == ((0, 2, 4, 6),)
    assert split_ranks([0, 2, 4, 6], 2) == ((0, 2), (4, 6))
    assert split_ranks([0, 2, 4, 6], 1) == ((0,), (2,), (4,), (6,))
    with pytest.raises(ConfigError, match=r"=3 does not divide the 4 replicas .* \[1, 2, 4\]"):
        split_ranks([0, 2, 4, 6], 3)


@given(
    sizes=st.lists(st.integers(0, 6000), max_size=25),
    max_nbytes=st.integers(REGION_ALIGNMENT_NBYTES, 4 * REGION_ALIGNMENT_NBYTES),
)
@example(sizes=[512, 512, 1], max_nbytes=1024)
def test_parcels_carry_every_byte_once(sizes: list[int], max_nbytes: int) -> None:
    parcels = pack(sizes, max_nbytes)
    carried: list[tuple[int, int]] = []
    for parcel in parcels:
        assert 0 < parcel.nbytes <= max_nbytes
        end = 0
        for piece in parcel.pieces:
            assert piece.region.offset_nbytes == end
            assert piece.region.nbytes > 0
            end = -(-piece.region.end_nbytes // REGION_ALIGNMENT_NBYTES) * REGION_ALIGNMENT_NBYTES
            first = piece.start_nbytes
            carried += [(piece.item, byte) for byte in range(first, first + piece.region.nbytes)]
        assert parcel.nbytes == end
    assert carried == [(item, byte) for item, nbytes in enumerate(sizes) for byte in range(nbytes)]


@given(sizes=st.lists(st.integers(0, 1024), max_size=25))
def test_neighbouring_parcels_would_not_fit_into_one(sizes: list[int]) -> None:
    parcels = pack(sizes, 1024)
    for first, second in itertools.pairwise(parcels):
        start = second.pieces[0].region.nbytes
        assert first.nbytes + -(-start // REGION_ALIGNMENT_NBYTES) * REGION_ALIGNMENT_NBYTES > 1024


def test_parcels_of_nonsense() -> None:
    with pytest.raises(PlanError, match="max_nbytes >= 512"):
        pack([1], 511)
    with pytest.raises(PlanError, match="sizes >= 0"):
        pack([-1], 512)


def test_queues_take_turns() -> None:
    assert list(take_turns([2, 0, 3])) == [(0, 0), (2, 0), (0, 1), (2, 1), (2, 2)]
    assert list(take_turns([])) == []
