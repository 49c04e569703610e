"""PURE: what a step does, computed without a device, a stream or a tensor.

Parameters are cut into consecutive *batches*; the state of a batch lies in one or more host *segments*;
a *step plan* is the ordered list of LOAD, UPDATE and OFFLOAD operations with what each of them has to wait
for. The runtime obeys. Everything here is a frozen record, validated once, and testable on its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from swapckpt.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

REGION_ALIGNMENT_NBYTES = 512
"""Regions start at multiples of this: direct I/O and vectorised kernels both accept it."""


def align_up(nbytes: int, alignment: int = REGION_ALIGNMENT_NBYTES) -> int:
    """The smallest multiple of ``alignment`` that is >= ``nbytes``."""
    return -(-nbytes // alignment) * alignment


@dataclass(frozen=True, slots=True, order=True)
class StateId:
    """Identity of one optimizer-state tensor on every rank and on disk: parameter name (FQN) and state
    key."""

    param: str
    key: str

    def __str__(self) -> str:
        return f"{self.param}.{self.key}"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Geometry of one dense local tensor. ``stride`` is in elements, as in torch."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def same_values(self, other: TensorSpec) -> bool:
        """True when a tensor of one can be copied into the other without a cast."""
        return self.shape == other.shape and self.dtype == other.dtype

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class Region:
    """Where one state tensor lies inside its segment."""

    offset_nbytes: int
    nbytes: int

    @property
    def end_nbytes(self) -> int:
        return self.offset_nbytes + self.nbytes


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Regions of one segment in order; ``nbytes`` includes alignment."""

    regions: tuple[Region, ...]
    nbytes: int

    def __post_init__(self) -> None:
        end = 0
        for region in self.regions:
            if region.offset_nbytes < end or region.nbytes < 0:
                msg = f"Regions overlap or run backwards: {region} begins before byte {end}."
                raise PlanError(msg)
            end = region.end_nbytes
        if end > self.nbytes:
            msg = f"Regions end at byte {end}, beyond the segment's {self.nbytes} bytes."
            raise PlanError(msg)


def lay_out(sizes_nbytes: Iterable[int]) -> SegmentLayout:
    """Put tensors of the given sizes one after the other, each at an aligned offset."""
    regions = []
    end = 0
    for nbytes in sizes_nbytes:
        regions.append(Region(end, nbytes))
        end = align_up(end + nbytes)
    return SegmentLayout(tuple(regions), end)


def coalesce(regions: Iterable[Region]) -> list[Region]:
    """Merge neighbours (separated by alignment only) into maximal runs: one copy each when packed."""
    runs: list[Region] = []
    for region in regions:
        if runs and align_up(runs[-1].end_nbytes) == region.offset_nbytes:
            first = runs[-1].offset_nbytes
            runs[-1] = Region(first, region.end_nbytes - first)
        else:
            runs.append(region)
    return runs


def partition(costs: Sequence[int], max_batches: int) -> tuple[range, ...]:
    """Cut ``costs`` into at most ``max_batches`` consecutive, non-empty, balanced ranges.

    Each batch takes items until taking one more would move its sum further from the average of what
    remains. Integer arithmetic only, so every rank that sees the same costs gets the same cut.

    Raises:
        PlanError: A cost is negative, or ``max_batches`` is below one.
    """
    if max_batches < 1 or any(cost < 0 for cost in costs):
        msg = f"partition needs max_batches >= 1 and costs >= 0, got {max_batches} and {list(costs)}."
        raise PlanError(msg)
    weights = [max(1, cost) for cost in costs]
    batches = []
    start, remaining = 0, sum(weights)
    for left in range(min(max_batches, len(weights)), 0, -1):
        end = _batch_end(weights, start=start, remaining=remaining, left=left)
        batches.append(range(start, end))
        remaining -= sum(weights[start:end])
        start = end
    return tuple(batches)


def _batch_end(weights: Sequence[int], *, start: int, remaining: int, left: int) -> int:
    if left == 1:
        return len(weights)
    last = len(weights) - left + 1  # every later batch needs at least one item
    end, taken = start + 1, weights[start]
    while end < last and abs(remaining - taken * left) > abs(remaining - (taken + weights[end]) * left):
        taken += weights[end]
        end += 1
    return end


SLICE_ALIGNMENT = 1024
"""Elements. Slices begin at multiples of this. Torch's vectorised CPU kernels take up to 32 elements at a
time and round what is left over differently (measured); only the last slice may end in such a rest."""


def cut_slices(numel: int, max_numel: int, *, min_numel: int = 1) -> tuple[range, ...]:
    """Cut ``numel`` elements into equal aligned ranges of about ``max_numel``, but at least ``min_numel``.

    A single range means: not worth cutting.
    """
    wanted = max(1, -(-numel // max(1, max_numel)))
    size = align_up(max(-(-numel // wanted), min_numel, 1), SLICE_ALIGNMENT)
    starts = list(range(0, max(1, numel), size))
    if len(starts) > 1 and numel - starts[-1] < min_numel:
        starts.pop()
    return tuple(range(start, end) for start, end in zip(starts, [*starts[1:], numel], strict=True))


@dataclass(frozen=True, slots=True)
class Item:
    """One parameter, as batches are cut: what it costs, and whether it may be stepped in slices."""

    numel: int
    nbytes: int
    divisible: bool = False


@dataclass(frozen=True, slots=True)
class Cut:
    """A batch: consecutive items, or the slices of a single one (ranges of elements)."""

    items: range
    slices: tuple[range, ...] = ()


def cut_batches(items: Sequence[Item], max_batches: int, *, min_slice_numel: int = 1) -> tuple[Cut, ...]:
    """Batches as ``partition`` makes them, with divisible items that are larger than a batch in slices.

    Where there are such items, no batch costs more than a ``max_batches``-th of all items, or than its only
    item; so there may be up to twice as many batches.
    """
    costs = [item.nbytes for item in items]
    budget = max(1, -(-sum(costs) // max(1, max_batches)))
    slices = {
        index: ranges
        for index, item in enumerate(items)
        if item.divisible and item.nbytes > budget
        if len(
            ranges := cut_slices(item.numel, item.numel * budget // item.nbytes, min_numel=min_slice_numel)
        )
        > 1
    }
    if not slices:
        return tuple(Cut(cut) for cut in partition(costs, max_batches)) if items else ()
    cuts: list[Cut] = []
    start = 0
    for index in (*slices, len(items)):
        cuts += [Cut(cut) for cut in _filled(costs, range(start, index), budget)]
        if index < len(items):
            cuts.append(Cut(range(index, index + 1), slices[index]))
        start = index + 1
    return tuple(cuts)


def _filled(costs: Sequence[int], items: range, budget: int) -> Iterator[range]:
    """Consecutive ranges, each as long as its costs stay within the budget (one item is always taken)."""
    start, taken = items.start, 0
    for index in items:
        if index > start and taken + costs[index] > budget:
            yield range(start, index)
            start, taken = index, 0
        taken += costs[index]
    if start < items.stop:
        yield range(start, items.stop)


def cut_nbytes(cut: Cut, items: Sequence[Item]) -> int:
    """Bytes of the parameters that one batch of ``cut`` steps at a time."""
    if not cut.slices:
        return sum(items[index].nbytes for index in cut.items)
    item = items[cut.items.start]
    return max(map(len, cut.slices)) * item.nbytes // item.numel


class OpKind(Enum):
    """What an operation does and on which stream it runs."""

    LOAD = "load"  # host segment -> staging buffer, load stream
    UPDATE = "update"  # the optimizer's own step on the batch, compute stream
    OFFLOAD = "offload"  # staging buffer -> host segment, offload stream


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a step. ``after`` names the operations it has to be ordered behind."""

    kind: OpKind
    batch: int
    after: tuple[tuple[OpKind, int], ...] = ()

    @property
    def key(self) -> tuple[OpKind, int]:
        return (self.kind, self.batch)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The operations of one step in submission order.

    Two copy directions run full duplex: ``LOAD i + staging_buffers`` waits only for ``OFFLOAD i``, the last
    user of its staging buffer. Batch ``i`` uses buffer ``i % staging_buffers``.
    """

    num_batches: int
    staging_buffers: int

    def __post_init__(self) -> None:
        if self.num_batches < 0 or self.staging_buffers < 1:
            msg = f"A plan needs num_batches >= 0 and staging_buffers >= 1, got {self}."
            raise PlanError(msg)

    def buffer_of(self, batch: int) -> int:
        """Index of the staging buffer that ``batch`` travels through."""
        return batch % self.staging_buffers

    def operations(self) -> tuple[Op, ...]:
        """LOAD, UPDATE and OFFLOAD of every batch, each after everything it depends on."""
        ops = [Op(OpKind.LOAD, batch) for batch in range(min(self.staging_buffers, self.num_batches))]
        for batch in range(self.num_batches):
            ops.append(Op(OpKind.UPDATE, batch, ((OpKind.LOAD, batch),)))
            ops.append(Op(OpKind.OFFLOAD, batch, ((OpKind.UPDATE, batch),)))
            reload = batch + self.staging_buffers
            if reload < self.num_batches:
                ops.append(Op(OpKind.LOAD, reload, ((OpKind.OFFLOAD, batch),)))
        return tuple(ops)

    def makespan_secs(self, duration_secs: Callable[[Op], float]) -> float:
        """Length of the step on a virtual clock: streams run in order, different streams in parallel.

        ``duration_secs`` gives the seconds of one operation. Used by the report's prediction and by the
        schedule benchmark.
        """
        end: dict[tuple[OpKind, int], float] = {}
        stream_end = dict.fromkeys(OpKind, 0.0)
        for op in self.operations():
            begin = max([stream_end[op.kind], *(end[key] for key in op.after)])
            end[op.key] = stream_end[op.kind] = begin + duration_secs(op)
        return max(stream_end.values())
