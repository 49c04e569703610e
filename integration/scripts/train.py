"""Train a small FSDP2 model on gloo ranks; rank 0 prints each loss, bit for bit.

With ``--load`` it continues from a checkpoint, with ``--save`` it writes one at the end: stock DCP calls, and
the optimizer's state goes through ``StateManager``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

import swapckpt


def build(*, swapped: bool) -> tuple[nn.Module, torch.optim.Optimizer, swapckpt.StateManager]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 65), nn.GELU(), nn.Linear(65, 7))
    for layer in (*model, model):
        if not isinstance(layer, nn.GELU):
            fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = swapckpt.SwapConfig(swap_times=3, min_numel=16) if swapped else None
    return model, optimizer, swapckpt.StateManager(model, optimizer, config)


def train(arguments: argparse.Namespace) -> None:
    model, optimizer, manager = build(swapped=arguments.swap)
    if arguments.load:
        parameters = model.state_dict()
        dcp.load({"model": parameters, "optimizer": manager}, checkpoint_id=arguments.load)
        model.load_state_dict(parameters)
    for step in range(arguments.first, arguments.last + 1):
        data = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        loss = model(torch.randn(16, 33, generator=data)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(step, loss.item().hex(), flush=True)
    if arguments.save:
        dcp.save({"model": model.state_dict(), "optimizer": manager}, checkpoint_id=arguments.save)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--last", type=int, required=True)
    parser.add_argument("--swap", action="store_true")
    parser.add_argument("--load", type=Path)
    parser.add_argument("--save", type=Path)
    dist.init_process_group("gloo")
    train(parser.parse_args())
    dist.barrier()  # a rank that leaves early can abort the others at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
