"""The same training in one parallel layout after the other: unswapped, then swapped with a restart midway.

Rank 0 prints the loss and a digest of all parameters and state after every step: they are the same in both.
The swapped run saves every step in the background, to ``<checkpoints>/<layout>``, and is left and begun again
after two steps. ``--load`` only says what a checkpoint of any layout holds, read into this one::

    torchrun --nproc-per-node 4 layouts.py fsdp2-tp hsdp --checkpoints /tmp/run
    torchrun --nproc-per-node 2 layouts.py fsdp2 --load /tmp/run/hsdp
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import swapckpt

LAYOUTS = ("plain", "fsdp2", "fsdp2-muon", "fsdp2-tp", "hsdp", "ddp")
SHARED_STATE = ("hsdp", "ddp")  # each value is kept by one of the replicas
LAST, RESTART = 4, 2
TIMEOUT_SECS = 60


class Job:
    def __init__(self, layout: str, *, swap: bool) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(nn.Linear(33, 64), nn.GELU(), nn.Linear(64, 7))
        self.batch = dist.get_rank()  # ranks of one tensor-parallel group need the same data
        if layout == "fsdp2-tp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(self.model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            fully_shard(self.model, mesh=mesh["dp"])
            self.batch = mesh["dp"].get_local_rank()
        elif layout == "hsdp":
            fully_shard(self.model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))
        elif layout == "ddp":
            self.model = DistributedDataParallel(self.model)
        elif layout.startswith("fsdp2"):
            fully_shard(self.model)
        self.optimizers = self._optimizers(with_muon=layout.endswith("muon"))
        config = swapckpt.SwapConfig(
            swap_times=3, min_numel=16, shard_replicas=layout in SHARED_STATE, timeout_secs=TIMEOUT_SECS
        )
        self.manager = swapckpt.StateManager(self.model, self.optimizers, config if swap else None)

    def _optimizers(self, *, with_muon: bool) -> dict[str, torch.optim.Optimizer]:
        params = list(self.model.parameters())
        if not with_muon:
            return {"adamw": torch.optim.AdamW(params, lr=1e-2, foreach=False)}
        return {
            "muon": torch.optim.Muon([param for param in params if param.ndim == 2], lr=1e-2),
            "adamw": torch.optim.AdamW(
                [param for param in params if param.ndim != 2], lr=1e-2, foreach=False
            ),
        }

    def checkpointer(self, folder: Path) -> swapckpt.Checkpointer:
        states = {"model": self.model, "optimizer": self.manager}
        return swapckpt.Checkpointer(folder, states, swapckpt.CheckpointConfig(timeout_secs=TIMEOUT_SECS))

    def step(self, step: int) -> str:
        data = torch.Generator().manual_seed(1000 * step + self.batch)
        loss = self.model(torch.randn(16, 33, generator=data)).square().mean()
        loss.backward()
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        return f"step {step} {loss.item().hex()} {self.digest()}"

    def digest(self) -> str:
        """Of every bit of parameters and state, however they are spread over the ranks."""
        values: dict[str, torch.Tensor] = dict(get_model_state_dict(self.model))
        total = hashlib.sha256()
        with self.manager.full_state() as full:  # what other replicas own is here too
            state = full["state"]
            assert isinstance(state, dict)
            for name, entry in state.items():
                values |= {f"{name}.{key}": value for key, value in entry.items()}
            for name in sorted(values):
                value = values[name].detach()
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                total.update(name.encode() + whole.contiguous().numpy().tobytes())
        return total.hexdigest()

    def holders(self) -> int:
        """Parameters whose state lies here, summed over the ranks."""
        count = torch.tensor(
            sum(bool(state) for each in self.optimizers.values() for state in each.state.values())
        )
        dist.all_reduce(count)
        return int(count)


def swapped(layout: str, folder: Path, *, last: int) -> list[str]:
    """From the newest checkpoint, or from scratch, to ``last``."""
    job = Job(layout, swap=True)
    with job.checkpointer(folder) as checkpointer:
        lines, done = [], checkpointer.load() or 0
        for step in range(done + 1, last + 1):
            lines.append(job.step(step))
            checkpointer.save(step)  # returns at once; the next step waits for nothing but its own copies
    report(f"{layout} holders {job.holders()}")
    return lines


def compare(layout: str, folder: Path) -> None:
    job = Job(layout, swap=False)
    for step in range(1, LAST + 1):
        report(f"{layout} unswapped {job.step(step)}")
    first_half = swapped(layout, folder, last=RESTART)
    for line in first_half + swapped(layout, folder, last=LAST):
        report(f"{layout} swapped {line}")


def load(layout: str, folder: Path) -> None:
    job = Job(layout, swap=True)
    with job.checkpointer(folder) as checkpointer:
        report(f"{layout} loaded {checkpointer.load()} {job.digest()}")


def report(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("layouts", nargs="+", choices=LAYOUTS)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--checkpoints", type=Path)
    what.add_argument("--load", type=Path)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    for layout in arguments.layouts:
        if arguments.load:
            load(layout, arguments.load)
        else:
            compare(layout, arguments.checkpoints / layout)
    dist.barrier()  # a rank that leaves early can abort the others at exit
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads at times outlive their group, and then the interpreter's exit aborts


if __name__ == "__main__":
    main()
