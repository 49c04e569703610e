"""Replicated training on four ranks: the model, its layouts, and an unswapped twin to compare with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import swapckpt
from swapckpt.optimizer import swap_of
from tests.manager.training import Net, same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor
    from torch.optim import Optimizer

CONFIG = swapckpt.SwapConfig(
    min_numel=1, swap_times=3, shard_replicas=True, replica_bucket_nbytes=1024, timeout_secs=30
)
"""Many small parcels: the largest parameters travel in pieces."""

WIDTH = 12

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
    "AdamW-amsgrad": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True, foreach=True),
    "AdamW-fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "SGD-momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.5),
    "Muon": lambda params: torch.optim.Muon([each for each in params if each.ndim == 2], lr=0.01),
}


class SpareNet(Net):
    """``spare`` is used only while ``use_spare`` is set: a field, because DDP passes no keywords on."""

    use_spare = False

    def forward(self, x: Tensor, *, use_spare: bool = False) -> Tensor:
        return super().forward(x, use_spare=use_spare or self.use_spare)


def build(
    layout: str, kind: str, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, SpareNet, Optimizer]:
    """The module to call, the net in it, and its optimizer. All ranks have the same parameters."""
    net = SpareNet(WIDTH, dtype=dtype)
    model: nn.Module = net
    if layout == "ddp":
        model = DistributedDataParallel(net, find_unused_parameters=True)
    elif layout == "hsdp":
        shape = (2, dist.get_world_size() // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return model, net, OPTIMIZERS[kind](list(net.parameters()))


class Twins:
    """The same training twice: unswapped, and with owners."""

    def __init__(
        self, layout: str, kind: str, *, dtype: torch.dtype = torch.float32, **options: object
    ) -> None:
        self.plain_model, self.plain_net, self.plain = build(layout, kind, dtype)
        self.model, self.net, self.optimizer = build(layout, kind, dtype)
        config = replace(CONFIG, **options)  # type: ignore[arg-type]
        self.manager = swapckpt.StateManager(self.model, self.optimizer, config)

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            for model, net, optimizer in (
                (self.plain_model, self.plain_net, self.plain),
                (self.model, self.net, self.optimizer),
            ):
                backward(model, net, step)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                optimizer.step()

    def pairs(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name and both parameters, of those that are optimized."""
        optimized = {param for group in self.optimizer.param_groups for param in group["params"]}
        others = dict(self.plain_net.named_parameters())
        for name, param in self.net.named_parameters():
            if param in optimized:
                yield name, param, others[name]

    def assert_same(self) -> None:
        """Parameters everywhere, and the state of what this rank owns; of the rest there is none."""
        owners = swap_of(self.optimizer).sharing.replicas
        for name, param, other in self.pairs():
            assert same_bits(param.data, other.data), name
            state, expected = self.optimizer.state.get(param, {}), self.plain.state.get(other, {})
            assert state.keys() == (expected.keys() if owners.owns(param) else set()), name
            assert all(same_bits(state[key], expected[key]) for key in state), name

    def owned(self) -> list[str]:
        owners = swap_of(self.optimizer).sharing.replicas
        return [name for name, param, _ in self.pairs() if owners.owns(param)]


def backward(model: nn.Module, net: SpareNet, step: int, *, scale: float = 1.0) -> None:
    """Gradients of one step: other data on every rank. ``spare`` is used in odd steps from 3 on."""
    net.zero_grad()
    net.use_spare = step >= 3 and step % 2 == 1
    data = torch.Generator().manual_seed(100 * step + dist.get_rank())
    loss = model(torch.randn(4, WIDTH, generator=data).to(net.head.weight.dtype)).square().mean()
    (loss * scale).backward()


def local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
