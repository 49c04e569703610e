"""FSDP2 training that may be killed at any moment and goes on with whatever number of ranks it gets.

It resumes from the newest checkpoint under ``--checkpoints``, trains to ``--last`` and saves after every
step. ``--kill-in STEP`` plays the accident: rank 1 dies by SIGKILL between ``backward()`` and
``optimizer.step()``. Rank 0 prints a digest of all parameters and state after every load and save::

    torchrun --nproc-per-node 2 fsdp2_resume.py --checkpoints /tmp/run --last 4 --kill-in 3
    torchrun --nproc-per-node 3 fsdp2_resume.py --checkpoints /tmp/run --last 4
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import swapckpt


def build() -> tuple[nn.Module, torch.optim.Optimizer, swapckpt.StateManager]:
    torch.manual_seed(0)
    # 7 rows do not divide by any number of ranks: shards are uneven, with 4 ranks and more some are empty.
    model = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 7))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, swapckpt.StateManager(model, optimizer, swapckpt.SwapConfig(min_numel=16))


def newest(checkpoints: Path) -> int:
    """The last step whose checkpoint is complete (DCP writes ``.metadata`` last), or 0."""
    return max((int(found.parent.name) for found in checkpoints.glob("*/.metadata")), default=0)


def digest(model: nn.Module, manager: swapckpt.StateManager) -> str:
    """Of every bit of parameters and state, whichever way they are sharded."""
    state = manager.state_dict()["state"]
    assert isinstance(state, dict)
    values = dict(model.named_parameters())
    values |= {f"{name}.{key}": value for name, entry in state.items() for key, value in entry.items()}
    total = hashlib.sha256()
    for name in sorted(values):
        value = values[name].detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        total.update(name.encode() + whole.contiguous().numpy().tobytes())
    return total.hexdigest()


def train(arguments: argparse.Namespace) -> None:
    model, optimizer, manager = build()
    done = newest(arguments.checkpoints)
    if done:
        parameters = get_model_state_dict(model)
        states = {"model": parameters, "optimizer": manager}
        dcp.load(states, checkpoint_id=arguments.checkpoints / str(done))
        set_model_state_dict(model, parameters)
        report(f"loaded {done} {digest(model, manager)}")
    for step in range(done + 1, arguments.last + 1):
        optimizer.zero_grad()
        data = torch.Generator().manual_seed(step)
        model(torch.randn(16, 33, generator=data)).square().mean().backward()
        if step == arguments.kill_in and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        states = {"model": get_model_state_dict(model), "optimizer": manager}
        dcp.save(states, checkpoint_id=arguments.checkpoints / str(step))
        report(f"saved {step} {digest(model, manager)}")


def report(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--last", type=int, required=True)
    parser.add_argument("--kill-in", type=int)
    dist.init_process_group("gloo")
    train(parser.parse_args())
    dist.barrier()  # a rank that leaves early can abort the others at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
