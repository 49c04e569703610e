"""StrictLoadPlanner plans what stock's planner does, for whatever was saved and whatever it is read into."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from swapckpt import StrictLoadPlanner
from swapckpt.storage import SwapStorageReader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

SHAPES = {"even": (4, 6), "uneven": (5, 3), "short": (1, 2), "row": (7,), "scalar": (), "empty": (0, 3)}


def plain() -> dict[str, Any]:
    tensors = {
        name: torch.arange(float(torch.Size(shape).numel())).view(shape) for name, shape in SHAPES.items()
    }
    return {
        **tensors,
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "value": {"n": 3},
        "list": [torch.ones(2)],
    }


def sharded(mesh: DeviceMesh, dim: int) -> dict[str, Any]:
    def placed(tensor: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(tensor, mesh, [Shard(dim) if tensor.dim() > dim else Replicate()])

    return {name: placed(each) if name in SHAPES else each for name, each in plain().items()}


def states(mesh: DeviceMesh) -> dict[str, dict[str, Any]]:
    return {"plain": plain(), "rows": sharded(mesh, 0), "columns": sharded(mesh, 1)}


def plan_of(planner: LoadPlanner, state: dict[str, Any], reader: SwapStorageReader) -> LoadPlan:
    planner.set_up_planner({"state": state}, reader.read_metadata(), is_coordinator=False)
    return planner.create_local_plan()


def place(tensor: torch.Tensor) -> tuple[object, ...]:
    steps = [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tensor.data_ptr(), tensor.shape, steps, tensor.dtype


def check_plans(folder: str) -> int:
    mesh = init_device_mesh("cpu", (2,))
    compared = 0
    for saved, content in states(mesh).items():
        dcp_save({"state": content}, checkpoint_id=f"{folder}/{saved}")
        for state in states(mesh).values():
            reader = SwapStorageReader(f"{folder}/{saved}")
            ours, stock = StrictLoadPlanner(), DefaultLoadPlanner()
            found, expected = plan_of(ours, state, reader), plan_of(stock, state, reader)
            assert found.items == expected.items
            for item in expected.items:
                if item.type.name == "TENSOR":
                    here, there = ours.resolve_tensor(item), stock.resolve_tensor(item)
                    assert place(here) == place(there), item
                    compared += 1
    return compared


def test_plans_are_those_of_stock(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    compared = run_ranks(2, check_plans, str(tmp_path))
    assert min(compared) > 50, compared
