"""FSDP2 training that goes on by itself when torchrun starts it again, from its newest checkpoint.

It saves every step in the background and keeps the newest three. Rank 0 prints the loss of each step, and at
the end a digest of all ranks' parameters and state. The variable gives each start a store of its own: in the
shared one gloo finds the addresses of ranks that are dead::

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nproc-per-node 2 --max-restarts 1 elastic.py --checkpoints /tmp/run --last 12
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import swapckpt

CONFIG = swapckpt.CheckpointConfig(keep_latest=3, timeout_secs=60)
WIDTH = 768  # 14 MB per rank and checkpoint: long enough to be killed while it is written


def train(folder: Path, *, last: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    manager = swapckpt.StateManager(model, optimizer, swapckpt.SwapConfig(swap_times=3, timeout_secs=60))
    with swapckpt.Checkpointer(folder, {"model": model, "optimizer": manager}, CONFIG) as checkpointer:
        done = checkpointer.load() or 0
        report(f"begin after {done}")
        for step in range(done + 1, last + 1):
            data = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            loss = model(torch.randn(4, WIDTH, generator=data)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report(f"step {step} {loss.item().hex()}")
            checkpointer.save(step)
    report(f"end {digest(model, optimizer)}")


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    total = hashlib.sha256()
    for param in model.parameters():
        for value in (param, *optimizer.state[param].values()):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            total.update(whole.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


def report(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--last", type=int, required=True)
    arguments = parser.parse_args()
    # When one rank fails, torchrun ends the others by SIGTERM (30 s later by SIGKILL): let them say first
    # what became of their save.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("gloo")
    train(arguments.checkpoints, last=arguments.last)
    dist.barrier()  # a rank that leaves early can abort the others at exit
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads at times outlive their group, and then the interpreter's exit aborts


if __name__ == "__main__":
    main()
