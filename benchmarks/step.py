"""Time of one step on the CPU device, against native and the bound.

The bound is measured in the same run: max(update, copies, CPU seconds of both / cores). "update" is native
fused AdamW on the same parameters, "copies" moves the same bytes in both directions at once, on two threads
and nothing else. "swapped" steps every parameter whole; "in slices" steps those that are larger than a batch,
the embeddings of the Llama, slice by slice. The row "at once" runs update and copies together without any
order between them: on a CPU they share the memory bus, which the bound does not know of.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks._cases import Case, llama, many_small
from benchmarks._harness import Ratio, Timing, finish, interleave, millis, parser, print_load, print_table
from swapckpt import SwapConfig, swap_optimizer
from swapckpt.memory import HostArena
from swapckpt.optimizer import swap_of
from swapckpt.plan import Region

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from torch.optim import Optimizer

GOAL = 1.35  # with whole tensors
SLICED_GOAL = 1.2  # with large tensors in slices


class Copies:
    """Both directions of one step's traffic, each on a thread of its own, batch after batch."""

    def __init__(self, optimizer: Optimizer) -> None:
        swap = swap_of(optimizer)
        arena = HostArena(swap.device)
        segments = [
            arena.allocate(segment.layout) for batch in swap.table.batches for segment in batch.segments
        ]
        whole = [segment.bytes(Region(0, segment.nbytes)).numpy() for segment in segments]
        batch_nbytes = -(-sum(host.nbytes for host in whole) // swap.config.swap_times)
        self._hosts = [
            host[start : start + batch_nbytes]
            for host in whole
            for start in range(0, host.nbytes, batch_nbytes)
        ]
        largest_nbytes = max(host.nbytes for host in self._hosts)
        self._staging = [np.ones(largest_nbytes, dtype=np.uint8) for _ in range(swap.config.staging_buffers)]
        self._pool = ThreadPoolExecutor(2)

    def _load(self) -> None:
        for index, host in enumerate(self._hosts):
            np.copyto(self._buffer(index)[: host.nbytes], host)

    def _offload(self) -> None:
        # Half the batches ahead: a segment that the other thread has just read would still be in its cache.
        half = len(self._hosts) // 2
        for index, host in enumerate(self._hosts[half:] + self._hosts[:half]):
            np.copyto(host, self._buffer(index + 1)[: host.nbytes])

    def _buffer(self, index: int) -> npt.NDArray[np.uint8]:
        return self._staging[index % len(self._staging)]

    def __call__(self, meanwhile: Callable[[], object] | None = None) -> None:
        running = [self._pool.submit(self._load), self._pool.submit(self._offload)]
        if meanwhile is not None:
            meanwhile()
        for future in running:
            future.result()


def adamw(case: Case) -> torch.optim.AdamW:
    return torch.optim.AdamW(case.params(), lr=1e-6, fused=True)


def measure(case: Case, *, repetitions: int) -> dict[str, Timing]:
    native, swapped, sliced = adamw(case), adamw(case), adamw(case)
    # The step counters stay.
    swap_optimizer(swapped, SwapConfig(min_numel=2, split_oversized=False))
    swap_optimizer(sliced, SwapConfig(min_numel=2))
    for each in (swapped, sliced):
        each.step()
    copies = Copies(sliced)
    return interleave(
        {
            "native": native.step,
            "copies": copies,
            "at once": lambda: copies(native.step),
            "swapped": swapped.step,
            "in slices": sliced.step,
        },
        repetitions=repetitions,
    )


def bound_secs(timings: dict[str, Timing]) -> float:
    native, copies, together = timings["native"], timings["copies"], timings["at once"]
    # Copies alone can be slowed down by each other's caches; they cannot need more than copies and update.
    copies_secs = min(copies.wall_secs, together.wall_secs)
    cpu_secs = min(native.cpu_secs + copies.cpu_secs, together.cpu_secs)
    return max(native.wall_secs, copies_secs, cpu_secs / (os.cpu_count() or 1))


def print_case(case: Case, timings: dict[str, Timing]) -> None:
    bound = bound_secs(timings)
    print(f"\n{case.title}: {case.numel / 1e6:.1f} M parameters in {len(case.shapes)} tensors")
    rows = [
        (
            name,
            millis(timing.wall_secs),
            millis(timing.cpu_secs),
            f"{timing.wall_secs / timings['native'].wall_secs:.2f}",
            f"{timing.wall_secs / bound:.2f}",
            f"{timing.spread:.0%}",
        )
        for name, timing in timings.items()
    ]
    print_table(("", "wall ms", "CPU ms", "of native", "of bound", "spread"), rows)


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--threads", type=int, default=1, help="intra-op threads of torch (default 1)")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    print_load()
    quick = {"small": many_small(layers=4), "llama": llama(vocabulary=4_000, layers=2)}
    cases = quick if options.quick else {"small": many_small(), "llama": llama()}
    ratios = {}
    for name, case in cases.items():
        timings = measure(case, repetitions=3 if options.quick else 15)
        print_case(case, timings)
        bound = bound_secs(timings)
        ratios[f"step_{name}_over_bound"] = Ratio(timings["swapped"].wall_secs / bound, GOAL)
        if name == "llama":
            ratios["step_llama_in_slices_over_bound"] = Ratio(
                timings["in slices"].wall_secs / bound, SLICED_GOAL
            )
    finish(ratios, options.json)


if __name__ == "__main__":
    main()
