"""Oversized parameters under a manager: sharded, reported, planned for."""

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
from tests.manager.training import OPTIMIZERS, Net, assert_same_bits, train

if TYPE_CHECKING:
    from pathlib import Path

    from tests.multirank import RankRunner

SLICED = swapckpt.SwapConfig(swap_times=8, min_numel=16, min_slice_numel=1)


def sharded(width: int = 64) -> Net:
    return fully_shard(Net(width), mesh=init_device_mesh("cpu", (2,)))  # type: ignore[return-value]


def assert_sharded_parity(kinds: list[str]) -> None:
    for kind in kinds:
        plain, model = sharded(), sharded()
        plain_optimizer = OPTIMIZERS[kind](list(plain.parameters()))
        optimizer = OPTIMIZERS[kind](list(model.parameters()))
        manager = swapckpt.StateManager(model, optimizer, SLICED)
        for net, each in ((plain, plain_optimizer), (model, optimizer)):
            train(net, each, steps=range(4), use_spare=lambda step: step > 1)
        assert any(cut.slices for cut in swap_of(optimizer).cuts())
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert_same_bits({"param": param.data}, {"param": other.data})
            assert_same_bits(optimizer.state[param], plain_optimizer.state[other])
            assert isinstance(next(v for v in optimizer.state[param].values() if v.dim()), DTensor)
        assert manager.memory().device_nbytes == 0


def test_local_shards_are_sliced(run_ranks: RankRunner) -> None:
    run_ranks(2, assert_sharded_parity, ["AdamW", "AdamW-fused", "SGD-dampening", "NAdam"])


def assert_replicated_parity() -> None:
    """Slices of a parameter that one replica owns, sent to the other when the last one is done."""
    models = [DistributedDataParallel(Net(64), find_unused_parameters=True) for _ in range(2)]
    plain, model = models
    plain_optimizer = OPTIMIZERS["AdamW"](list(plain.parameters()))
    optimizer = OPTIMIZERS["AdamW"](list(model.parameters()))
    config = replace(SLICED, shard_replicas=True, replica_bucket_nbytes=1 << 14)
    swapckpt.StateManager(model, optimizer, config)
    for net, each in ((plain, plain_optimizer), (model, optimizer)):
        for step in range(3):
            each.zero_grad()
            data = torch.Generator().manual_seed(100 * step + dist.get_rank())
            net(torch.randn(4, 64, generator=data)).square().mean().backward()
            each.step()
    assert any(cut.slices for cut in swap_of(optimizer).cuts())
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same_bits({"param": param.data}, {"param": other.data})


def test_an_owner_sends_a_sliced_parameter_when_it_is_whole(run_ranks: RankRunner) -> None:
    run_ranks(2, assert_replicated_parity)


def embedding_first() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 1024, bias=False), *(nn.Linear(64, 128, bias=False) for _ in range(8)))


def reported(optimizer_class: type[torch.optim.AdamW], config: swapckpt.SwapConfig) -> swapckpt.SwapReport:
    model = embedding_first()
    optimizer = optimizer_class(model.parameters())
    manager = swapckpt.StateManager(model, optimizer, config)
    report = manager.report(gbps=10)
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert manager.memory().device_peak_nbytes == report.staging_peak_nbytes
    assert manager.report(gbps=10) == report
    return report


def test_the_report_says_what_is_sliced_and_what_whole_parameters_cost() -> None:
    class Mine(torch.optim.AdamW):
        pass

    config = replace(SLICED, swap_times=16)
    layer_nbytes = 2 * 4 * 64 * 128
    sliced = reported(torch.optim.AdamW, config)
    assert (sliced.num_sliced, sliced.oversized) == (1, ())
    assert sliced.largest_batch_nbytes == layer_nbytes
    assert sliced.staging_peak_nbytes == config.staging_buffers * layer_nbytes
    assert "stepped in slices          1 parameters larger than a batch" in str(sliced)
    whole = reported(Mine, config)
    assert whole.num_sliced == 0
    assert whole.largest_batch_nbytes == 8 * layer_nbytes
    reason = "Mine is not known to update each element on its own"
    assert whole.oversized == (("0.weight", reason, 8 * layer_nbytes),)
    assert f"stepped whole              0.weight: 512 KiB in one batch, since {reason}" in str(whole)
    never = reported(torch.optim.AdamW, replace(config, split_oversized=False))
    assert never.oversized == (("0.weight", "split_oversized=False", 8 * layer_nbytes),)


def test_a_resumed_run_may_slice_otherwise(tmp_path: Path) -> None:
    runs = []
    for first, second in ((None, False), (False, None), (None, None)):
        model = embedding_first()
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.01)
        state: dict[str, object] | None = None
        for split in (first, second):
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            config = replace(SLICED, split_oversized=split)
            manager = swapckpt.StateManager(model, optimizer, config)
            if state is not None:
                manager.load_state_dict(state)
            for step in range(2):
                for index, param in enumerate(model.parameters()):
                    generator = torch.Generator().manual_seed(10 * step + index)
                    param.grad = torch.randn(param.shape, generator=generator)
                optimizer.step()
            state = manager.state_dict()
        runs.append({name: param.detach().clone() for name, param in model.named_parameters()})
    assert_same_bits(runs[0], runs[2])
    assert_same_bits(runs[1], runs[2])
