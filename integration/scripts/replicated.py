"""Replicated training, swapped beside unswapped: the same bits, before and after a resume.

``--layout ddp`` copies the model on every rank. ``--layout hsdp`` shards it over half of the ranks and
replicates the shards on the other half (4 ranks: 2 x 2). Every replica holds optimizer state; a checkpoint
holds each value once. Rank 0 prints a line for every comparison it has made::

    torchrun --nproc-per-node 4 replicated.py --layout hsdp --checkpoint /tmp/run
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import swapckpt

CONFIG = swapckpt.SwapConfig(min_numel=16, swap_times=3)


def build(layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 7))
    if layout == "ddp":
        model = DistributedDataParallel(model)
    else:
        shape = (2, dist.get_world_size() // 2)
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        data = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        model(torch.randn(16, 33, generator=data)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def assert_same_bits(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    other: nn.Module,
    other_optimizer: torch.optim.Optimizer,
) -> None:
    for param, other_param in zip(model.parameters(), other.parameters(), strict=True):
        state, other_state = optimizer.state[param], other_optimizer.state[other_param]
        assert state.keys() == other_state.keys()
        for value, expected in ((param, other_param), *((state[key], other_state[key]) for key in state)):
            assert torch.equal(local(value), local(expected))


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def compare(layout: str, checkpoint: Path) -> None:
    plain, plain_optimizer = build(layout)
    model, optimizer = build(layout)
    manager = swapckpt.StateManager(model, optimizer, CONFIG)
    train(plain, plain_optimizer, range(3))
    train(model, optimizer, range(3))
    assert_same_bits(model, optimizer, plain, plain_optimizer)
    report(f"swapped equals unswapped after 3 steps, {manager.memory().device_nbytes} bytes on the device")
    dcp.save({"model": get_model_state_dict(model), "optimizer": manager}, checkpoint_id=checkpoint)

    resumed, resumed_optimizer = build(layout)
    resumed_manager = swapckpt.StateManager(resumed, resumed_optimizer, CONFIG)
    parameters = get_model_state_dict(resumed)
    dcp.load({"model": parameters, "optimizer": resumed_manager}, checkpoint_id=checkpoint)
    set_model_state_dict(resumed, parameters)
    train(plain, plain_optimizer, range(3, 5))
    train(resumed, resumed_optimizer, range(3, 5))
    assert_same_bits(resumed, resumed_optimizer, plain, plain_optimizer)
    report("resumed equals uninterrupted after 5 steps")


def report(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=["ddp", "hsdp"], required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    compare(arguments.layout, arguments.checkpoint)
    dist.barrier()  # a rank that leaves early can abort the others at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
