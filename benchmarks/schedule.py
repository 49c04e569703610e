"""Length of a step on a virtual clock, against four other schedules.

The parameters are those of a 7 B Llama. Streams run in order and beside each other; a copy takes bytes /
bandwidth, an update its bytes times the compute/transfer ratio. Every schedule moves the same batches, and
the bound is the own time of what is busiest, loads or updates: no schedule can be shorter.

The others are what optimizers with host state do elsewhere: one tensor after the other (serial); a batch of
tensors at a time, drained before the next (batch-drain); two buffers and one copy stream for both directions
(one-stream A/B); two copy streams, where a load waits for all offloads before it (chunked).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from benchmarks._cases import Case, llama
from benchmarks._harness import Ratio, finish, parser, print_table
from swapckpt.config import SwapConfig
from swapckpt.plan import Op, OpKind, StepPlan, partition

if TYPE_CHECKING:
    from collections.abc import Sequence

GOAL = 1.10
COMPUTE_RATIOS = (
    0.05,
    0.3,
    1.0,
    3.0,
)  # seconds of update per second of load; fused AdamW on a GPU: 0.05 to 0.3

Batches = list[list[float]]  # seconds of load of every tensor, batch by batch


class Clock:
    """Streams that run in order; ``run`` returns when the operation ends."""

    def __init__(self) -> None:
        self._free: dict[str, float] = {}

    def run(self, stream: str, secs: float, *after: float) -> float:
        end = max(self._free.get(stream, 0.0), *after, 0.0) + secs
        self._free[stream] = end
        return end

    @property
    def secs(self) -> float:
        return max(self._free.values())


def serial(batches: Batches, compute: float) -> float:
    clock = Clock()
    for batch in batches:
        for secs in batch:
            clock.run("main", secs)
            clock.run("main", secs * compute)
            clock.run("main", secs)
    return clock.secs


def batch_drain(batches: Batches, compute: float) -> float:
    clock, drained = Clock(), 0.0
    for batch in batches:
        loaded = [clock.run("load", secs, drained) for secs in batch]
        for secs, ready in zip(batch, loaded, strict=True):
            updated = clock.run("update", secs * compute, ready)
            drained = clock.run("offload", secs, updated)
    return clock.secs


def one_stream(batches: Batches, compute: float) -> float:
    clock, sizes = Clock(), [sum(batch) for batch in batches]
    loaded = [clock.run("copy", secs) for secs in sizes[:2]]
    for index, secs in enumerate(sizes):
        updated = clock.run("update", secs * compute, loaded[index])
        offloaded = clock.run("copy", secs, updated)
        if index + 2 < len(sizes):
            loaded.append(clock.run("copy", sizes[index + 2], offloaded))
    return clock.secs


def chunked(batches: Batches, compute: float) -> float:
    clock, sizes = Clock(), [sum(batch) for batch in batches]
    loaded, offloaded = [clock.run("load", sizes[0])], [0.0]
    for index, secs in enumerate(sizes):
        if index + 1 < len(sizes):
            loaded.append(clock.run("load", sizes[index + 1], offloaded[-1]))
        updated = clock.run("update", secs * compute, loaded[index])
        offloaded.append(clock.run("offload", secs, updated))
    return clock.secs


def ours(batches: Batches, compute: float) -> float:
    sizes = [sum(batch) for batch in batches]

    def duration_secs(op: Op) -> float:
        return sizes[op.batch] * (compute if op.kind is OpKind.UPDATE else 1.0)

    return StepPlan(len(sizes), SwapConfig().staging_buffers).makespan_secs(duration_secs)


Schedule = Callable[[Batches, float], float]

OTHERS: dict[str, tuple[Schedule, int]] = {  # and how many batches are on the device at once
    "batch-drain": (batch_drain, 1),
    "one-stream A/B": (one_stream, 2),
    "chunked": (chunked, 2),
}


def cut(sizes: Sequence[int], swap_times: int) -> Batches:
    """Batches of ``partition``, in units of the one-direction transfer time of everything."""
    total = sum(sizes)
    return [[sizes[index] / total for index in batch] for batch in partition(sizes, swap_times)]


def over_bound(schedule: Schedule, batches: Batches, compute: float) -> float:
    return schedule(batches, compute) / max(1.0, compute)


def row(name: str, schedule: Schedule, batches: Batches, *, device: float) -> tuple[str, ...]:
    figures = (f"{over_bound(schedule, batches, compute):.2f}" for compute in COMPUTE_RATIOS)
    return (name, str(len(batches)), f"{device:.1%}", *figures)


def largest(batches: Batches) -> float:
    return max(sum(batch) for batch in batches)


def rows(sizes: Sequence[int], swap_times: int) -> list[tuple[str, ...]]:
    batches, finer = cut(sizes, swap_times), cut(sizes, 3 * swap_times)
    others = [
        row(name, schedule, batches, device=buffers * largest(batches))
        for name, (schedule, buffers) in OTHERS.items()
    ]
    return [
        row("serial", serial, batches, device=max(map(max, batches))),
        *others,
        row("ours", ours, batches, device=3 * largest(batches)),
        row("ours, finer", ours, finer, device=3 * largest(finer)),
    ]


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    case = Case("Llama 7 B", llama(layers=32, dim=4096, hidden=11_008, vocabulary=32_000).shapes)
    print(f"{case.title}: step over bound, by seconds of update per second of load")
    header = ("", "batches", "on device", *map(str, COMPUTE_RATIOS))
    for swap_times in (16,) if options.quick else (8, 16, 32):
        print()
        print_table(header, rows(case.sizes, swap_times))
    print(
        "\nBeside the first load and the last offload nothing runs: at ratio 1, n whole"
        "\nbatches cost at least 1 + 2 / n. Finer ones come closer, in less memory."
    )
    batches = cut(case.sizes, SwapConfig().swap_times)
    ratios = {
        f"schedule_over_bound_at_{compute}": Ratio(over_bound(ours, batches, compute), GOAL)
        for compute in COMPUTE_RATIOS
    }
    best_other = min(over_bound(schedule, batches, 0.3) for schedule, _ in OTHERS.values())
    ratios["best_other_over_ours_at_0.3"] = Ratio(best_other / over_bound(ours, batches, 0.3), 1.0, "higher")
    finish(ratios, options.json)


if __name__ == "__main__":
    main()
