"""Saving and loading 2 GB: our storage beside stock DCP's and the device's limit.

Tensors of 1 KB to 100 MB, in the host memory of a swapped optimizer. Everything is durable: files and folders
are synced. "raw" moves the same bytes between the same memory and files by direct I/O, without a format or
checksums. Cold is without any of the files in the page cache, warm with all of them. "an eighth" is what one
of 8 ranks needs of each tensor that one rank saved. All that is compared runs in turn, in one process.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

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
from swapckpt.storage import open_checkpoint, open_files

if TYPE_CHECKING:
    from collections.abc import Sequence

RANKS, RANK = 8, 3


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
    timings = interleave(
        cases, repetitions=repetitions, warm_ups=min(1, repetitions - 1), before=lambda _: saver.next_folder()
    )
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
        warm_ups=min(1, repetitions - 1),
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
        warm_ups=min(1, repetitions - 1),
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
    entries = open_checkpoint(open_files(ours.parent), ours.name).metadata.state_dict_metadata
    mirrors = Mirrors([(entry.size[0] // RANKS, *entry.size[1:]) for entry in entries.values()])
    local = dict(zip(entries, mirrors.tensors, strict=True))
    for tensor in mirrors.tensors:
        tensor.zero_()
    wanted = mirrors.nbytes
    loads = {"ours": lambda state: load_ours(state, ours), "stock": lambda state: load_stock(state, stock)}
    runs: dict[str, list[tuple[float, int]]] = {way: [] for way in loads}
    # No other rank takes part in a load: a group that sends nothing is enough.
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    state = {
        fqn.removeprefix("state."): DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)
        for fqn, tensor in local.items()
    }
    for _ in range(repetitions):
        for way, load in loads.items():
            drop(every)
            before, begin = _device_nbytes(), time.perf_counter()
            load({"state": state})
            runs[way].append((time.perf_counter() - begin, _device_nbytes() - before))
    dist.destroy_process_group()
    assert all(tensor.any() for tensor in local.values()), "nothing was loaded"
    secs = {way: statistics.median(run[0] for run in each) for way, each in runs.items()}
    read = {way: statistics.median(run[1] for run in each) for way, each in runs.items()}
    print(f"\nan eighth of each tensor, cold: {wanted / 1e6:.0f} MB")
    rows = [(way, millis(secs[way]), f"{read[way] / 1e6:.0f}", f"{read[way] / wanted:.2f}") for way in loads]
    print_table(("", "wall ms", "MB read", "of wanted"), rows)
    return {
        "part_read_over_wanted": Ratio(read["ours"] / wanted, 1.2),
        "part_faster_than_stock": Ratio(secs["stock"] / secs["ours"], 5.0, "higher"),
    }


def _device_nbytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--folder", type=Path, help="where to write (default: the temporary folder)")
    options = arguments.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    print_load()
    mirrors = Mirrors(shapes(quick=options.quick))
    repetitions = 1 if options.quick else 3
    print(f"{mirrors.nbytes / 1e9:.2f} GB in {len(mirrors.tensors)} tensors; medians of {repetitions}")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder)
        ratios = measure_saves(root, mirrors, repetitions=repetitions)
        ratios |= measure_loads(root, mirrors, repetitions=repetitions)
    finish(ratios, options.json)


if __name__ == "__main__":
    main()
