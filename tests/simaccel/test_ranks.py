"""Two ranks with devices of their own: collectives, FSDP2, and a stock checkpoint of its shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import swapckpt
from tests import simaccel as sim

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.tensor import DTensor

    from tests.multirank import RankRunner


def use_device(scratch: Path, backend: str = "cpu:gloo,sim:gloo") -> None:
    """Gives this rank a device, and the default group, which has started on the CPU, a backend for it."""
    sim.load()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.accelerator.set_device_index(rank)
    dist.destroy_process_group()
    dist.init_process_group(
        backend, init_method=f"file://{scratch}/{backend}", rank=rank, world_size=world_size
    )


def collectives(scratch: Path, backend: str) -> dict[str, list[float]]:
    use_device(scratch, backend)
    rank = dist.get_rank()
    sim.use(sim.LAZY)
    mine = torch.zeros(2, device="sim").add_(rank + 1)  # pending when the collective starts
    results: dict[str, list[float]] = {}
    summed = mine.clone()
    dist.all_reduce(summed)
    results["all_reduce"] = summed.tolist()
    gathered = torch.empty(4, device="sim")
    dist.all_gather_into_tensor(gathered, mine)
    results["all_gather"] = gathered.tolist()
    scattered = torch.empty(1, device="sim")
    dist.reduce_scatter_tensor(scattered, mine)
    results["reduce_scatter"] = scattered.tolist()
    sent = mine.clone()
    dist.broadcast(sent, src=1)
    results["broadcast"] = sent.tolist()
    swapped = torch.empty(2, device="sim")
    dist.all_to_all_single(swapped, mine)
    results["all_to_all"] = swapped.tolist()
    received = torch.empty(2, device="sim")
    requests = [dist.isend(mine, 1 - rank), dist.irecv(received, 1 - rank)]
    for request in requests:
        request.wait()  # type: ignore[union-attr]
    results["send_recv"] = received.tolist()
    return results


@pytest.mark.parametrize("backend", ["cpu:gloo,sim:gloo", "sim:gloo"])
def test_collectives_take_device_tensors(run_ranks: RankRunner, tmp_path: Path, backend: str) -> None:
    for rank, results in enumerate(run_ranks(2, collectives, tmp_path, backend)):
        assert results == {
            "all_reduce": [3, 3],
            "all_gather": [1, 1, 2, 2],
            "reduce_scatter": [3],
            "broadcast": [2, 2],
            "all_to_all": [1, 2],
            "send_recv": [2 - rank] * 2,
        }


class Training:
    """A sharded model, trained for three steps. Every rank has its own data."""

    def __init__(self, device: str, *, swapped: bool = False) -> None:
        torch.manual_seed(0)
        self.input, self.output = nn.Linear(16, 32), nn.Linear(32, 4)
        self.model = nn.Sequential(self.input, nn.ReLU(), self.output).to(device)
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for layer in (self.input, self.output, self.model):
            fully_shard(layer, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        if swapped:
            config = swapckpt.SwapConfig(swap_times=3, min_numel=0)
            swapckpt.swap_optimizer(self.optimizer, config)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            inputs = torch.randn(8, 16, generator=generator).to(device)
            self.model(inputs).square().mean().backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def values(self) -> list[torch.Tensor]:
        """Whole parameters, and this rank's part of the state."""
        params = list(self.model.parameters())
        whole = [cast("DTensor", param).full_tensor() for param in params]
        shards = [self.optimizer.state[param]["exp_avg"].to_local() for param in params]
        return [value.detach().cpu().clone() for value in (*whole, *shards)]


def train_on_cpu() -> list[torch.Tensor]:
    return Training("cpu").values()


def train_on_device(scratch: Path) -> dict[str, list[torch.Tensor]]:
    """One training per schedule, plain and swapped."""
    use_device(scratch)
    results = {}
    for schedule in sim.each([sim.EAGER, sim.LAZY, *sim.seeds(2)]):
        results[f"plain {schedule}"] = Training("sim").values()
        results[f"swapped {schedule}"] = Training("sim", swapped=True).values()
    return results


def test_fsdp2_equals_the_cpu_bitwise_in_every_schedule_also_swapped(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    by_rank = zip(run_ranks(2, train_on_device, tmp_path), run_ranks(2, train_on_cpu), strict=True)
    for results, expected in by_rank:
        for name, values in results.items():
            assert all(map(torch.equal, values, expected)), name


def load_over_spoiled_values(scratch: Path) -> list[list[torch.Tensor]]:
    use_device(scratch)
    sim.use(sim.LAZY)
    training = Training("sim")
    trained = training.values()
    model_state, optimizer_state = get_state_dict(training.model, training.optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=scratch / "step")
    with torch.no_grad():
        for param in training.model.parameters():
            param.zero_()
            training.optimizer.state[param]["exp_avg"].zero_()
    spoiled = training.values()
    model_state, optimizer_state = get_state_dict(training.model, training.optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=scratch / "step")
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
    )
    return [trained, spoiled, training.values()]


def test_a_stock_checkpoint_of_shards_restores_them(run_ranks: RankRunner, tmp_path: Path) -> None:
    for trained, spoiled, loaded in run_ranks(2, load_over_spoiled_values, tmp_path):
        assert not any(map(torch.equal, spoiled, trained))
        assert all(map(torch.equal, loaded, trained))
