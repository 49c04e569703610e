"""The pure part of a step: cuts, layouts, the order of operations, the virtual clock."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swapckpt.errors import PlanError, SwapCkptError
from swapckpt.plan import (
    REGION_ALIGNMENT_NBYTES,
    Op,
    OpKind,
    Region,
    SegmentLayout,
    StateId,
    StepPlan,
    TensorSpec,
    align_up,
    coalesce,
    lay_out,
    partition,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

LOAD, UPDATE, OFFLOAD = OpKind.LOAD, OpKind.UPDATE, OpKind.OFFLOAD

# ------------------------------------------------------------------------------------------------ partition


@pytest.mark.parametrize(
    ("costs", "max_batches", "sums"),
    [
        ([16, 16, 16, 16, 16, 1, 16, 16, 4, 2, 4, 2], 4, [32, 32, 33, 28]),
        ([512, 16, 16], 2, [512, 32]),
        ([16, 16, 16], 8, [16, 16, 16]),
        ([], 4, []),
        ([7], 1, [7]),
        ([5, 5, 5, 5], 1, [20]),
    ],
)
def test_partition_balances_sums(costs: list[int], max_batches: int, sums: list[int]) -> None:
    assert [sum(costs[cut.start : cut.stop]) for cut in partition(costs, max_batches)] == sums


@pytest.mark.parametrize(
    ("costs", "max_batches", "lengths"),
    [
        ([0, 0, 0, 0], 2, [2, 2]),
        ([1000, 1, 1, 1, 1, 1], 3, [1, 2, 3]),
        ([1, 1, 1, 1, 1000], 3, [3, 1, 1]),
    ],
)
def test_partition_of_the_extremes(costs: list[int], max_batches: int, lengths: list[int]) -> None:
    assert [len(cut) for cut in partition(costs, max_batches)] == lengths


@given(st.lists(st.integers(0, 1 << 40), max_size=40), st.integers(1, 50))
def test_partition_covers_everything_once_in_order(costs: list[int], max_batches: int) -> None:
    cuts = partition(costs, max_batches)
    assert [index for cut in cuts for index in cut] == list(range(len(costs)))
    assert all(len(cut) > 0 for cut in cuts)
    assert len(cuts) == min(max_batches, len(costs))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 40))
def test_partition_is_balanced_up_to_one_item(costs: list[int], max_batches: int) -> None:
    """A batch ends where one more item would take it further from the average of what remains; only one that
    must leave an item for each later batch ends earlier."""
    cuts = partition(costs, max_batches)
    for position, cut in enumerate(cuts[:-1]):
        remaining, left = sum(costs[cut.start :]), len(cuts) - position
        taken = sum(costs[cut.start : cut.stop])
        fair = remaining / left
        assert taken - fair <= max(costs[cut.start : cut.stop])
        must_stop = cut.stop == len(costs) - left + 1
        assert must_stop or fair - taken <= costs[cut.stop]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=20), st.integers(1, 20), st.integers(1, 1 << 50))
def test_partition_does_not_depend_on_the_unit(costs: list[int], max_batches: int, unit: int) -> None:
    costs = [cost + 1 for cost in costs]  # zero counts as one
    assert partition([cost * unit for cost in costs], max_batches) == partition(costs, max_batches)


@pytest.mark.parametrize(("costs", "max_batches"), [([1, -1], 2), ([1], 0), ([], -1)])
def test_partition_refuses_nonsense(costs: list[int], max_batches: int) -> None:
    with pytest.raises(PlanError, match="partition needs max_batches >= 1 and costs >= 0") as caught:
        partition(costs, max_batches)
    assert isinstance(caught.value, SwapCkptError)
    assert isinstance(caught.value, ValueError)


# -------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize(
    ("nbytes", "aligned"), [(0, 0), (1, 512), (511, 512), (512, 512), (513, 1024), (1500, 1536)]
)
def test_align_up(nbytes: int, aligned: int) -> None:
    assert align_up(nbytes) == aligned
    assert align_up(nbytes, 1) == nbytes


@given(st.lists(st.integers(0, 5000), max_size=30))
def test_a_layout_is_disjoint_aligned_and_tight(sizes: list[int]) -> None:
    layout = lay_out(sizes)
    assert [region.nbytes for region in layout.regions] == sizes
    assert all(region.offset_nbytes % REGION_ALIGNMENT_NBYTES == 0 for region in layout.regions)
    for region, following in pairwise(layout.regions):
        assert following.offset_nbytes == align_up(region.end_nbytes)
    assert layout.nbytes == sum(map(align_up, sizes))


@pytest.mark.parametrize(
    ("regions", "nbytes", "message"),
    [
        ((Region(0, 100), Region(50, 10)), 1000, "begins before byte 100"),
        ((Region(512, 1), Region(0, 1)), 1000, "begins before byte 513"),
        ((Region(0, -1),), 1000, "overlap or run backwards"),
        ((Region(0, 100),), 99, "beyond the segment's 99 bytes"),
    ],
)
def test_an_impossible_layout_is_refused(regions: tuple[Region, ...], nbytes: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        SegmentLayout(regions, nbytes)


def test_coalesce_joins_neighbours_only() -> None:
    first, second, third, fourth = lay_out([512, 100, 512, 8]).regions
    assert coalesce([first, second, third, fourth]) == [Region(0, 3 * 512 + 8)]
    assert coalesce([first, third]) == [first, third]
    assert coalesce([first, second, fourth]) == [Region(0, 612), fourth]
    assert coalesce([]) == []


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.sets(st.integers(0, 11)))
def test_coalesced_runs_hold_exactly_the_regions_and_alignment(sizes: list[int], chosen: set[int]) -> None:
    layout = lay_out(sizes)
    regions = [region for index, region in enumerate(layout.regions) if index in chosen]
    left_out = [region for index, region in enumerate(layout.regions) if index not in chosen]
    runs = coalesce(regions)
    for region in regions:
        assert (
            sum(
                run.offset_nbytes <= region.offset_nbytes and region.end_nbytes <= run.end_nbytes
                for run in runs
            )
            == 1
        )
    for region in left_out:
        assert all(
            run.end_nbytes <= region.offset_nbytes or region.end_nbytes <= run.offset_nbytes for run in runs
        )
    for run, following in pairwise(runs):
        assert align_up(run.end_nbytes) < following.offset_nbytes


def test_specs_and_names_print_shortly() -> None:
    spec = TensorSpec((3, 5), (5, 1), torch.bfloat16)
    assert (spec.numel, spec.nbytes, str(spec)) == (15, 30, "[3, 5] bfloat16")
    assert TensorSpec((), (), torch.float64).nbytes == 8
    assert str(StateId("layers.0.weight", "exp_avg")) == "layers.0.weight.exp_avg"
    assert StateId("a", "b") < StateId("a", "z") < StateId("b", "a")


def test_the_values_of_a_spec_do_not_depend_on_strides() -> None:
    spec = TensorSpec((3, 5), (5, 1), torch.float32)
    assert spec.same_values(TensorSpec((3, 5), (1, 3), torch.float32))
    assert not spec.same_values(TensorSpec((5, 3), (3, 1), torch.float32))
    assert not spec.same_values(TensorSpec((3, 5), (5, 1), torch.float64))


# ------------------------------------------------------------------------------------------------ the step


def short(ops: Sequence[Op]) -> list[str]:
    """``load1<offload0``: kind and batch, and what has to be behind it."""
    return [
        f"{op.kind.value}{op.batch}" + "".join(f"<{kind.value}{batch}" for kind, batch in op.after)
        for op in ops
    ]


GOLDEN = {
    (0, 3): "",
    (1, 3): "load0 update0<load0 offload0<update0",
    (2, 3): "load0 load1 update0<load0 offload0<update0 update1<load1 offload1<update1",
    (3, 2): """load0 load1 update0<load0 offload0<update0 load2<offload0 update1<load1 offload1<update1
        update2<load2 offload2<update2""",
    (4, 3): """load0 load1 load2 update0<load0 offload0<update0 load3<offload0 update1<load1
        offload1<update1 update2<load2 offload2<update2 update3<load3 offload3<update3""",
}


@pytest.mark.parametrize(("num_batches", "staging_buffers"), GOLDEN)
def test_golden_sequences(num_batches: int, staging_buffers: int) -> None:
    ops = StepPlan(num_batches, staging_buffers).operations()
    assert short(ops) == GOLDEN[num_batches, staging_buffers].split()


@given(st.integers(0, 30), st.integers(1, 6))
def test_every_operation_follows_what_it_depends_on(num_batches: int, staging_buffers: int) -> None:
    plan = StepPlan(num_batches, staging_buffers)
    ops = plan.operations()
    seen: set[tuple[OpKind, int]] = set()
    last_user: dict[int, tuple[OpKind, int]] = {}
    for op in ops:
        assert set(op.after) <= seen
        buffer = plan.buffer_of(op.batch)
        if op.kind is LOAD and buffer in last_user:
            assert op.after == (last_user[buffer],)  # the offload that used the buffer last
            assert last_user[buffer][0] is OFFLOAD
        if op.kind is not LOAD:
            assert last_user[buffer] in op.after
        last_user[buffer] = op.key
        seen.add(op.key)
    assert seen == {(kind, index) for kind in OpKind for index in range(num_batches)}
    assert len(ops) == len(seen)


@pytest.mark.parametrize(("num_batches", "staging_buffers"), [(-1, 3), (1, 0)])
def test_an_impossible_plan_is_refused(num_batches: int, staging_buffers: int) -> None:
    with pytest.raises(PlanError, match="num_batches >= 0 and staging_buffers >= 1"):
        StepPlan(num_batches, staging_buffers)


@pytest.mark.parametrize(
    ("staging_buffers", "load", "update", "offload", "batches", "secs"),
    [
        (3, 1.0, 0.0, 1.0, 16, 17.0),  # full duplex: one direction, and one batch more
        (2, 1.0, 0.0, 1.0, 16, 17.0),
        (1, 1.0, 0.0, 1.0, 16, 32.0),  # nothing overlaps
        (3, 1.0, 1.0, 1.0, 16, 18.0),
        (2, 1.0, 1.0, 1.0, 16, 25.0),  # two buffers hold two of the three stages
        (3, 1.0, 5.0, 1.0, 4, 22.0),  # the update hides the transfers
        (3, 2.0, 0.5, 1.0, 3, 7.5),
        (3, 1.0, 1.0, 1.0, 0, 0.0),
    ],
)
def test_makespan_on_the_virtual_clock(
    staging_buffers: int, load: float, update: float, offload: float, batches: int, secs: float
) -> None:
    durations = {LOAD: load, UPDATE: update, OFFLOAD: offload}
    plan = StepPlan(batches, staging_buffers)
    assert plan.makespan_secs(lambda op: durations[op.kind]) == pytest.approx(secs)


@given(
    st.lists(st.tuples(*[st.floats(0, 10)] * 3), min_size=1, max_size=12),
    st.integers(1, 5),
)
def test_a_step_takes_at_least_its_busiest_stream_and_at_most_everything_in_a_row(
    durations: list[tuple[float, float, float]], staging_buffers: int
) -> None:
    order = (LOAD, UPDATE, OFFLOAD)
    plan = StepPlan(len(durations), staging_buffers)
    secs = plan.makespan_secs(lambda op: durations[op.batch][order.index(op.kind)])
    busiest = max(map(sum, zip(*durations, strict=True)))
    total = sum(map(sum, durations))
    assert busiest <= secs or math.isclose(busiest, secs)
    assert secs <= total or math.isclose(secs, total)
    more = StepPlan(len(durations), staging_buffers + 1)
    faster = more.makespan_secs(lambda op: durations[op.batch][order.index(op.kind)])
    assert faster <= secs or math.isclose(faster, secs)
