"""Saving and loading 20,000 tensors of 4 KB: our storage beside stock DCP's.

At this size a checkpoint is Python: planning, a record of metadata and an archive for each tensor. "first" is
a save of a planner and writer that are new; "later" one of a layout that they have saved before; "raw write"
is direct I/O of the elements alone, which a disk takes as long for at least. Files are durable, and warm when
they are loaded.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

from benchmarks._harness import Ratio, Timing, finish, interleave, millis, parser, print_load, print_table
from benchmarks._storage import Mirrors, Saver, load_ours, load_stock, raw_write

NUM_TENSORS, QUICK_TENSORS = 20_000, 500


def rows_of(timings: dict[str, Timing]) -> list[tuple[str, ...]]:
    return [
        (name, millis(timing.wall_secs), millis(timing.cpu_secs), f"{timing.spread:.0%}")
        for name, timing in timings.items()
    ]


def metadata_nbytes(saver: Saver) -> int:
    return (saver.folder / ".metadata").stat().st_size


def measure(root: Path, mirrors: Mirrors, *, repetitions: int) -> dict[str, Ratio]:
    state = mirrors.state()
    kept, stock = Saver(root / "kept", state), Saver(root / "stock", state)
    raw = Saver(root / "raw", state)

    def make_room() -> None:
        kept.next_folder()
        stock.next_folder()
        raw.next_folder().parent.mkdir(exist_ok=True)
        Saver(root / "first", state).clear()

    timings = interleave(
        {
            "first save": lambda: Saver(root / "first", state).ours(),
            "later save": kept.ours,
            "save, stock": stock.stock,
            "raw write": lambda: raw_write(raw.folder, mirrors.slabs),
        },
        repetitions=repetitions,
        warm_ups=1,
        before=lambda _: make_room(),
    )
    make_room()
    kept.ours()
    stock.stock()
    metadata = metadata_nbytes(kept) / metadata_nbytes(stock)
    timings |= interleave(
        {
            "load": lambda: load_ours(state, kept.folder),
            "load, stock": lambda: load_stock(state, stock.folder),
        },
        repetitions=repetitions,
        warm_ups=1,
    )
    print_table(("", "wall ms", "CPU ms", "spread"), rows_of(timings))
    print(f"metadata: {metadata:.2f} of stock's")
    stock_secs = timings["save, stock"].wall_secs
    return {
        "first_save_faster_than_stock": Ratio(stock_secs / timings["first save"].wall_secs, 2.5, "higher"),
        "later_save_faster_than_stock": Ratio(stock_secs / timings["later save"].wall_secs, 20.0, "higher"),
        "load_faster_than_stock": Ratio(
            timings["load, stock"].wall_secs / timings["load"].wall_secs, 3.0, "higher"
        ),
        "metadata_over_stock": Ratio(metadata, 1.0),
    }


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--folder", type=Path, help="where to write (default: the temporary folder)")
    options = arguments.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    print_load()
    mirrors = Mirrors([(1024,)] * (QUICK_TENSORS if options.quick else NUM_TENSORS))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        finish(measure(Path(folder), mirrors, repetitions=2 if options.quick else 5), options.json)


if __name__ == "__main__":
    main()
