"""Host memory and time of loading a checkpoint into a fresh optimizer.

Each way runs in a process of its own, which makes a model and a fresh AdamW and then loads its state. Growth
of the resident set is read from VmHWM, reset just before (Linux). "stock" is get_optimizer_state_dict, which
steps the optimizer to have state to load into, dcp.load and set_optimizer_state_dict; "ours" is dcp.load into
a StateManager. Both read the same checkpoint, written once by stock.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from benchmarks._harness import Ratio, finish, parser, print_load, print_table
from swapckpt import StateManager, SwapConfig

WIDTH = 1000
LAYERS, QUICK_LAYERS = 50, 8  # each has 8 MB of moments: 400 MB, 64 MB


def fresh(layers: int) -> tuple[nn.Module, torch.optim.AdamW]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def stock(model: nn.Module, optimizer: torch.optim.AdamW, path: Path) -> None:
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def ours(model: nn.Module, optimizer: torch.optim.AdamW, path: Path) -> None:
    dcp.load({"optimizer": StateManager(model, optimizer, SwapConfig())}, checkpoint_id=path)


WAYS = {"stock": stock, "ours": ours}


def save(layers: int, path: Path) -> None:
    """A checkpoint of an optimizer that has stepped once, by stock."""
    model, optimizer = fresh(layers)
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)


def run_way(way: str, layers: int, path: Path) -> dict[str, float]:
    """In a process of its own: load, and say what it took. Megabytes and seconds."""
    model, optimizer = fresh(layers)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from the present resident set
    before = resident("VmRSS")
    begin = time.perf_counter()
    WAYS[way](model, optimizer, path)
    secs = time.perf_counter() - begin
    moments = [optimizer.state[param]["exp_avg"] for param in model.parameters()]
    assert all(torch.all(moment > 0) for moment in moments), "the state was not loaded"
    return {"peak": resident("VmHWM") - before, "after": resident("VmRSS") - before, "secs": secs}


def resident(field: str) -> float:
    """A field of this process's memory status in megabytes (10^6 bytes)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6


def in_process(way: str, layers: int, path: Path) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.load",
        "--way",
        way,
        "--layers",
        str(layers),
        "--path",
        str(path),
    ]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    arguments.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    if options.way is not None:
        print(json.dumps(run_way(options.way, options.layers, options.path)))
        return
    print_load()
    compare(
        QUICK_LAYERS if options.quick else LAYERS, repetitions=1 if options.quick else 5, path=options.json
    )


def compare(layers: int, *, repetitions: int, path: Path | None) -> None:
    state = layers * WIDTH * WIDTH * 8 / 1e6
    with tempfile.TemporaryDirectory() as folder:
        save(layers, Path(folder))
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(repetitions):
            for way in WAYS:
                runs[way].append(in_process(way, layers, Path(folder)))
    figures = {
        way: {name: median(run[name] for run in runs[way]) for name in ("peak", "after", "secs")}
        for way in WAYS
    }
    print(f"\n{state:.0f} MB of state in {2 * layers} moments; medians of {repetitions}")
    rows = [
        (
            way,
            f"{each['peak']:.0f}",
            f"{each['peak'] / state:.2f}",
            f"{each['after']:.0f}",
            f"{each['secs']:.2f}",
        )
        for way, each in figures.items()
    ]
    print_table(("", "peak MB", "of state", "afterwards MB", "seconds"), rows)
    finish(
        {
            "load_peak_over_state": Ratio(figures["ours"]["peak"] / state, 1.15),
            "load_secs_over_stock": Ratio(figures["ours"]["secs"] / figures["stock"]["secs"], 1.0),
        },
        path,
    )


if __name__ == "__main__":
    main()
