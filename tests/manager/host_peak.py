"""Run as a program by test_host_peak.py: ``save PATH`` or ``load PATH`` of 384 MB of optimizer state.

Prints how far the peak of resident memory rose meanwhile, in bytes, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import swapckpt

NUM_PARAMS, NUMEL = 24, 2 << 20  # DCP reads one tensor at a time, through up to three copies of it
STATE_NBYTES = 2 * 4 * NUM_PARAMS * NUMEL


def build() -> tuple[nn.ParameterList, torch.optim.Optimizer, swapckpt.StateManager]:
    model = nn.ParameterList(nn.Parameter(torch.full((NUMEL,), 0.5)) for _ in range(NUM_PARAMS))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return model, optimizer, swapckpt.StateManager(model, optimizer, swapckpt.SwapConfig())


def fill(manager: swapckpt.StateManager) -> None:
    """Make state without a step, whose gradients and temporaries would raise the peak before the save."""
    exported = manager.state_dict()
    state = exported["state"]
    assert isinstance(state, dict)
    for number, values in enumerate(state.values()):
        for value in values.values():
            value.fill_(1 + number)
    manager.load_state_dict(exported)


def warm_up(path: str) -> None:
    """The first save and load import modules; their size has nothing to do with that of the state."""
    tiny = {"tiny": torch.ones(1)}
    dcp.save(tiny, checkpoint_id=path)
    dcp.load(tiny, checkpoint_id=path)


def reset_peak() -> None:
    """Let the peak be what is resident now: importing and filling may have had more at some time."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_nbytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def main(action: str, path: str) -> None:
    model, optimizer, manager = build()
    if action == "save":
        fill(manager)
    warm_up(f"{path}-warm-up")
    reset_peak()
    resident, peak = psutil.Process().memory_info().rss, peak_nbytes()
    if action == "save":
        dcp.save({"optimizer": manager}, checkpoint_id=path)
    else:
        dcp.load({"optimizer": manager}, checkpoint_id=path)
    sums = [optimizer.state[param]["exp_avg"].double().sum().item() for param in model]
    stats = manager.memory()
    figures = {
        "resident_nbytes": resident,
        "peak_before_nbytes": peak,
        "peak_after_nbytes": peak_nbytes(),
        "device_nbytes": stats.device_nbytes,
        "device_peak_nbytes": stats.device_peak_nbytes,
        "sums": sums,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
