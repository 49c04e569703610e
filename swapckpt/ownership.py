"""PURE: who owns a replicated parameter, and how tensors are packed to travel between ranks.

Every rank computes all of it from the same numbers and gets the same answer: nothing here communicates.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swapckpt.errors import ConfigError, PlanError
from swapckpt.plan import REGION_ALIGNMENT_NBYTES, Region, align_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Coordinate = tuple[int, ...]
"""A place in a grid of ranks: one index per dimension."""


def assign_owners(
    numels: Sequence[int],
    grid: Sequence[int],
    *,
    held_numel: Mapping[Coordinate, int] | None = None,
) -> tuple[Coordinate, ...]:
    """The coordinate that owns each item: largest item first, to the coordinate that holds least.

    Items of one size are taken in order, and of coordinates that hold equally much the smallest gets the
    item. No coordinate ends up with more than the lightest one and the largest item together.

    Args:
        numels: Elements of each item, the same numbers on every rank: global ones for sharded parameters.
        grid: Size of each dimension that items are spread over: the replicate dimensions of a mesh, or
            those and the shard dimensions where whole matrices are gathered for their update.
        held_numel: Elements that coordinates hold already, from earlier calls.

    Returns:
        A coordinate of ``grid`` for every item.

    Raises:
        PlanError: A size is negative, or the grid has an empty dimension.
    """
    if any(numel < 0 for numel in numels) or any(size < 1 for size in grid):
        msg = f"Owners need sizes >= 0 and dimensions >= 1, got {list(numels)} and a grid of {list(grid)}."
        raise PlanError(msg)
    loads = dict.fromkeys(itertools.product(*map(range, grid)), 0) | dict(held_numel or {})
    owners: dict[int, Coordinate] = {}
    for index in sorted(range(len(numels)), key=lambda each: (-numels[each], each)):
        owner = min(loads, key=lambda coordinate: (loads[coordinate], coordinate))
        loads[owner] += numels[index]
        owners[index] = owner
    return tuple(owners[index] for index in range(len(numels)))


def split_ranks(ranks: Sequence[int], group_size: int | None) -> tuple[tuple[int, ...], ...]:
    """Replicas in consecutive groups, each of which holds all state once. None: one group.

    Raises:
        ConfigError: ``group_size`` does not divide the number of replicas.
    """
    size = len(ranks) if group_size is None else group_size
    if size < 1 or len(ranks) % size:
        divisors = [each for each in range(1, len(ranks) + 1) if len(ranks) % each == 0]
        msg = (
            f"replica_group_size={size} does not divide the {len(ranks)} replicas of a parameter (ranks "
            f"{list(ranks)}). Use one of {divisors}."
        )
        raise ConfigError(msg)
    return tuple(tuple(ranks[start : start + size]) for start in range(0, len(ranks), size))


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of one item, and where it lies in the buffer it travels in."""

    item: int
    start_nbytes: int  # inside the item
    region: Region  # inside the buffer


@dataclass(frozen=True, slots=True)
class Parcel:
    """What travels at once. ``nbytes`` is the length of the buffer that is sent."""

    pieces: tuple[Piece, ...]
    nbytes: int


def pack(sizes_nbytes: Sequence[int], max_nbytes: int) -> tuple[Parcel, ...]:
    """Items in order, each padded to 512 bytes, in as few parcels of at most ``max_nbytes`` as that allows.

    An item that is larger than a parcel goes in pieces, in parcels of its own; an empty one does not travel.

    Raises:
        PlanError: ``max_nbytes`` does not hold one aligned piece, or a size is negative.
    """
    room_nbytes = max_nbytes - max_nbytes % REGION_ALIGNMENT_NBYTES
    if room_nbytes < REGION_ALIGNMENT_NBYTES or any(nbytes < 0 for nbytes in sizes_nbytes):
        msg = f"Parcels need max_nbytes >= {REGION_ALIGNMENT_NBYTES} and sizes >= 0, got {max_nbytes}."
        raise PlanError(msg)
    parcels: list[Parcel] = []
    open_pieces: list[Piece] = []
    end_nbytes = 0
    for item, nbytes in enumerate(sizes_nbytes):
        for start in range(0, nbytes, room_nbytes):
            length = min(room_nbytes, nbytes - start)
            if open_pieces and end_nbytes + align_up(length) > room_nbytes:
                parcels.append(Parcel(tuple(open_pieces), end_nbytes))
                open_pieces, end_nbytes = [], 0
            open_pieces.append(Piece(item, start, Region(end_nbytes, length)))
            end_nbytes += align_up(length)
    if open_pieces:
        parcels.append(Parcel(tuple(open_pieces), end_nbytes))
    return tuple(parcels)


def take_turns(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Pairs of queue and position in it: the first of every queue, then the second of every queue, ..."""
    for position in range(max(lengths, default=0)):
        for queue, length in enumerate(lengths):
            if position < length:
                yield queue, position
