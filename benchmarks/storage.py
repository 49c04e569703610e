"""Saving and loading 2 GB: our storage beside stock DCP's and the device's limit.

Tensors of 1 KB to 100 MB, in the host memory of a swapped optimizer. Everything is durable: files and folders
are synced. "raw" moves the same bytes between the same memory and files by direct I/O, without a format or
checksums. Cold is without any of the files in the page cache, warm with all of them. "an eighth" is what one
of 8 ranks needs of each tensor that one rank saved. All that is compared runs in turn, in one process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks._harness import Ratio, Timing, finish, interleave, millis, parser, print_load, print_table
from benchmarks._pagecache import cached_nbytes, drop
from benchmarks._storage import (
    Mirrors,
    Saver,
    files_of,
    load_ours,
    load_stock,
    peak_nbytes,
    raw_read,
    raw_write,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks._storage import State

RANKS, RANK = 8, 3

Figures = dict[str, float]


def shapes(*, quick: bool) -> list[tuple[int, ...]]:
    """Rows of 1,024 floats, except in the smallest: 2.1 GB, or 45 MB."""
    rows = {16: 64, 64: 32, 256: 16, 4096: 1} if quick else {16: 256, 64: 256, 256: 128, 4096: 32, 25_600: 13}
    made: list[tuple[int, ...]] = [(256,)] * 256
    for count, number in rows.items():
        made += [(count, 1024)] * number
    return made


def rows_of(timings: dict[str, Timing], nbytes: int) -> list[tuple[str, ...]]:
    return [
        (
            name,
            millis(timing.wall_secs),
            f"{nbytes / timing.wall_secs / 1e9:.2f}",
            millis(timing.cpu_secs),
            f"{timing.spread:.0%}",
        )
        for name, timing in timings.items()
    ]


def print_timings(title: str, timings: dict[str, Timing], nbytes: int) -> None:
    print(f"\n{title}")
    print_table(("", "wall ms", "GB/s", "CPU ms", "spread"), rows_of(timings, nbytes))


# ------------------------------------------------------------------------------------------------ saving


def measure_saves(root: Path, mirrors: Mirrors, *, repetitions: int) -> dict[str, Ratio]:
    saver = Saver(root, mirrors.state())
    cases = {
        "raw": lambda: raw_write(saver.folder, mirrors.slabs),
        "ours": saver.ours,
        "stock": saver.stock,
        "torch.save": saver.torch_save,
        "safetensors": saver.safetensors,
    }
    # What is deleted must not be trimmed while the next one is timed.
    timings = interleave(cases, repetitions=repetitions, warm_ups=1, before=lambda _: saver.next_folder())
    print_timings("durable save", timings, mirrors.nbytes)
    saver.next_folder()
    memory = peak_nbytes(saver.ours)
    cached = sum(map(cached_nbytes, files_of(saver.folder))) / mirrors.nbytes
    saver.next_folder()
    stock_memory = peak_nbytes(saver.stock)
    stock_cached = sum(map(cached_nbytes, files_of(saver.folder))) / mirrors.nbytes
    print(f"host memory: {memory / 1e6:.0f} MB, stock {stock_memory / 1e6:.0f} MB")
    print(f"left in the page cache: {cached:.1%} of the state, stock {stock_cached:.0%}")
    saver.next_folder()
    ours, stock, raw = timings["ours"], timings["stock"], timings["raw"]
    return {
        "save_of_raw_speed": Ratio(raw.wall_secs / ours.wall_secs, 0.95, "higher"),
        "save_faster_than_stock": Ratio(stock.wall_secs / ours.wall_secs, 2.0, "higher"),
        "save_cpu_over_stock": Ratio(ours.cpu_secs / stock.cpu_secs, 0.25),
        "save_host_memory_mb": Ratio(max(memory, 1) / 1e6, 64.0),
        "save_page_cache_over_state": Ratio(max(cached, 1e-4), 0.05),
    }


# ------------------------------------------------------------------------------------------------ loading


def measure_loads(root: Path, mirrors: Mirrors, *, repetitions: int) -> dict[str, Ratio]:
    state = mirrors.state()
    saver, stock_saver = Saver(root / "ours", state), Saver(root / "stock", state)
    saver.ours()
    stock_saver.stock()
    raw = root / "raw"
    raw_write(raw, mirrors.slabs)
    ours, stock = saver.folder, stock_saver.folder
    every = [*files_of(ours), *files_of(stock), *files_of(raw)]
    cold = interleave(
        {
            "raw": lambda: raw_read(raw, mirrors.slabs),
            "ours": lambda: load_ours(state, ours),
            "stock": lambda: load_stock(state, stock),
        },
        repetitions=repetitions,
        warm_ups=1,
        before=lambda _: drop(every),
    )
    print_timings("cold load, ours verified", cold, mirrors.nbytes)
    drop(every)
    memory = peak_nbytes(lambda: load_ours(state, ours))
    cached = sum(map(cached_nbytes, files_of(ours))) / mirrors.nbytes
    print(f"host memory: {memory / 1e6:.0f} MB; left in the page cache: {cached:.1%} of the state")
    warm = interleave(
        {"ours": lambda: load_ours(state, stock), "stock": lambda: load_stock(state, stock)},
        repetitions=repetitions,
        warm_ups=1,
        before=lambda _: [path.read_bytes() for path in files_of(stock)],
    )
    print_timings("warm load of what stock wrote", warm, mirrors.nbytes)
    return {
        "cold_load_of_raw_speed": Ratio(cold["raw"].wall_secs / cold["ours"].wall_secs, 0.95, "higher"),
        "cold_load_faster_than_stock": Ratio(cold["stock"].wall_secs / cold["ours"].wall_secs, 1.4, "higher"),
        "warm_load_faster_than_stock": Ratio(warm["stock"].wall_secs / warm["ours"].wall_secs, 3.5, "higher"),
        "load_host_memory_mb": Ratio(max(memory, 1) / 1e6, 64.0),
        "load_page_cache_over_state": Ratio(max(cached, 1e-4), 0.05),
        **measure_parts(ours, stock, every, repetitions=repetitions),
    }


# ------------------------------------------------------------------------------------------------ an eighth


def measure_parts(ours: Path, stock: Path, every: Sequence[Path], *, repetitions: int) -> dict[str, Ratio]:
    runs: dict[str, list[Figures]] = {"ours": [], "stock": []}
    for _ in range(repetitions):
        for way, folder in (("ours", ours), ("stock", stock)):
            drop(every)
            command = [sys.executable, "-m", "benchmarks.storage", "--part-of", str(folder), "--way", way]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            runs[way].append(json.loads(done.stdout))
    medians = {
        way: {name: statistics.median(run[name] for run in each) for name in each[0]}
        for way, each in runs.items()
    }
    print(f"\nan eighth of each tensor, cold: {medians['ours']['wanted'] / 1e6:.0f} MB")
    rows = [
        (way, millis(each["secs"]), f"{each['read'] / 1e6:.0f}", f"{each['read'] / each['wanted']:.2f}")
        for way, each in medians.items()
    ]
    print_table(("", "wall ms", "MB read", "of wanted"), rows)
    wanted = medians["ours"]["wanted"]
    return {
        "part_read_over_wanted": Ratio(medians["ours"]["read"] / wanted, 1.2),
        "part_faster_than_stock": Ratio(medians["stock"]["secs"] / medians["ours"]["secs"], 5.0, "higher"),
    }


def run_part(folder: Path, way: str) -> Figures:
    """In a process of its own: load what rank 3 of 8 needs. Bytes read are the device's."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from swapckpt.storage import open_checkpoint, open_files

    # No other rank takes part in a load: a group that sends nothing is enough.
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    entries = open_checkpoint(open_files(folder.parent), folder.name).metadata.state_dict_metadata
    locals_ = {fqn: torch.zeros(entry.size[0] // RANKS, *entry.size[1:]) for fqn, entry in entries.items()}
    state: State = {
        "state": {
            fqn.removeprefix("state."): DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            for fqn, local in locals_.items()
        }
    }
    before, begin = _device_nbytes(), time.perf_counter()
    (load_ours if way == "ours" else load_stock)(state, folder)
    secs, read = time.perf_counter() - begin, _device_nbytes() - before
    assert all(local.any() for local in locals_.values()), "nothing was loaded"
    dist.destroy_process_group()
    return {"secs": secs, "read": read, "wanted": sum(local.nbytes for local in locals_.values())}


def _device_nbytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--folder", type=Path, help="where to write (default: the temporary folder)")
    arguments.add_argument("--part-of", type=Path, help=argparse.SUPPRESS)
    arguments.add_argument("--way", choices=("ours", "stock"), help=argparse.SUPPRESS)
    options = arguments.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    if options.part_of is not None:
        print(json.dumps(run_part(options.part_of, options.way)))
        return
    print_load()
    mirrors = Mirrors(shapes(quick=options.quick))
    repetitions = 1 if options.quick else 5
    print(f"{mirrors.nbytes / 1e9:.2f} GB in {len(mirrors.tensors)} tensors; medians of {repetitions}")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder)
        ratios = measure_saves(root, mirrors, repetitions=repetitions)
        ratios |= measure_loads(root, mirrors, repetitions=repetitions)
    finish(ratios, options.json)


if __name__ == "__main__":
    main()
