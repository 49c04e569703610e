"""Checkpoints for the tests of the command line."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import swapckpt
from tests.storage.stores import save

if TYPE_CHECKING:
    from pathlib import Path


def state(seed: int = 0) -> dict[str, Any]:
    """Tensors of several sizes and dtypes, empty and scalar ones, and values."""
    torch.manual_seed(seed)
    return {
        "model": {
            "w": torch.randn(300, 100),
            "half": torch.randn(7, 3).to(torch.bfloat16),
            "ids": torch.arange(11) + seed,
            "none": torch.empty(0, 4),
            "step": torch.tensor(5.0),
        },
        "lr": 0.1,
        "names": ["a", "b"],
        "betas": (0.9, 0.999),
    }


def training(path: str, *, steps: int) -> None:
    """A checkpoint of a swapped AdamW after some steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    manager = swapckpt.StateManager(model, optimizer, swapckpt.SwapConfig(swap_times=2, min_numel=1))
    for _ in range(steps):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
    save({"model": model.state_dict(), "optimizer": manager}, path)


def save_sharded(path: str, world_size: int, dim: int) -> None:
    """``state()``, its largest tensor sharded; called on every rank."""
    full = state()
    mesh = init_device_mesh("cpu", (world_size,))
    full["model"]["w"] = distribute_tensor(full["model"]["w"], mesh, [Shard(dim)])
    save(full, path)


def flip(path: Path, at: int) -> None:
    """Turn one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def place_of(checkpoint: Path, fqn: str) -> tuple[Path, int, int]:
    """Data file, start and length of an entry."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == fqn)
    return checkpoint / place.relative_path, place.offset, place.length


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self._made = made

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._made),)


def with_evil_metadata(checkpoint: Path, made: Path) -> None:
    """Put code into the metadata of a stock checkpoint."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    metadata.planner_data = Evil(made)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
