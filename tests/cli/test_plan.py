"""``swapckpt plan`` must foretell, from shapes alone, what adoption then reports and holds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import swapckpt
from swapckpt.cli.plan import PlanRequest, measure_bandwidth, plan_report
from swapckpt.config import SwapConfig
from swapckpt.demo.model import Llama, LlamaShape
from swapckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.conftest import Result
    from tests.multirank import RankRunner

    Cli = Callable[..., Result]

SHAPE = LlamaShape(dim=64, layers=2, heads=1, ffn=192)
CONFIG = SwapConfig(swap_times=5, staging_buffers=2, min_numel=100)


def request(
    *, optimizer: str = "adamw", ranks: int = 1, dtype: str = "fp32", config: SwapConfig = CONFIG
) -> PlanRequest:
    return PlanRequest(shape=SHAPE, optimizer=optimizer, dtype=dtype, ranks=ranks, config=config)


def adopted(
    optimizer: str, *, dtype: torch.dtype = torch.float32, config: SwapConfig = CONFIG
) -> tuple[swapckpt.SwapReport, swapckpt.MemoryStats]:
    """The report of a real manager before its first step, and what it holds after it."""
    model = Llama(SHAPE, max_time=8).to(dtype)
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    params = [param for param in model.parameters() if optimizer != "Muon" or param.dim() == 2]
    real = getattr(torch.optim, optimizer)(params, **options)
    manager = swapckpt.StateManager(model, real, config)
    report = manager.report(gbps=10)
    model(torch.randint(256, (1, 8))).sum().backward()
    real.step()
    return report, manager.memory()


def check_memory(planned: swapckpt.SwapReport, memory: swapckpt.MemoryStats) -> None:
    """What was planned holds what was needed; mirrors lie in slabs, which are larger than they are."""
    assert 0 < memory.device_peak_nbytes <= planned.staging_peak_nbytes
    assert planned.host_nbytes <= memory.host_nbytes


def test_masters_are_planned_for() -> None:
    config = replace(CONFIG, master_weights=True)
    planned = plan_report(request(dtype="bf16", config=config), gbps=10)
    without = plan_report(request(dtype="bf16"), gbps=10)
    report, memory = adopted("AdamW", dtype=torch.bfloat16, config=config)
    assert planned == report
    assert planned.device_freed_nbytes > 2.9 * without.device_freed_nbytes  # 12 bytes instead of 4
    assert planned.master_grads_peak_nbytes > 0
    assert without.master_grads_peak_nbytes == 0
    assert 0 < memory.device_peak_nbytes <= planned.staging_peak_nbytes + planned.master_grads_peak_nbytes


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adafactor", "NAdam"])
def test_plan_is_the_report_of_the_adopted_optimizer(optimizer: str) -> None:
    planned = plan_report(request(optimizer=optimizer.lower()), gbps=10)
    report, memory = adopted(optimizer)
    assert planned == report
    check_memory(planned, memory)


def rank_report() -> tuple[swapckpt.SwapReport, swapckpt.MemoryStats]:
    return adopted("AdamW")


def gathering_report() -> tuple[swapckpt.SwapReport, swapckpt.MemoryStats]:
    return adopted("Muon", config=replace(CONFIG, gather_matrices=True))


def test_whole_matrices_are_planned_for(run_ranks: RankRunner) -> None:
    config = replace(CONFIG, gather_matrices=True)
    planned = plan_report(request(optimizer="muon", ranks=3, config=config), gbps=10)
    report, memory = run_ranks(3, gathering_report)[0]
    assert planned == report
    assert planned.largest_gathered_nbytes == 3 * 4 * 256 * SHAPE.dim  # the embedding
    assert 0 < memory.device_peak_nbytes <= planned.staging_peak_nbytes + planned.gathered_peak_nbytes
    alone = plan_report(request(optimizer="muon", config=config), gbps=10)
    assert alone.largest_gathered_nbytes == 0
    assert plan_report(request(ranks=3, config=config), gbps=10).largest_gathered_nbytes == 0


def test_plan_is_the_report_of_rank_0_under_fsdp(run_ranks: RankRunner) -> None:
    """64 rows over 3 ranks: 22, 22 and 20."""
    planned = plan_report(request(ranks=3), gbps=10)
    report, memory = run_ranks(3, rank_report)[0]
    assert planned == report
    check_memory(planned, memory)


def test_lower_precision_halves_the_state() -> None:
    full, half = (plan_report(request(dtype=dtype), gbps=10) for dtype in ("fp32", "bf16"))
    assert half.device_freed_nbytes == full.device_freed_nbytes / 2


def test_bandwidth_sets_the_time() -> None:
    slow, fast = (plan_report(request(), gbps=gbps) for gbps in (1.0, 4.0))
    assert slow.step_secs == pytest.approx(4 * fast.step_secs)
    assert slow.step_secs >= slow.device_freed_nbytes / 1e9


def test_measured_bandwidth_is_a_rate() -> None:
    assert 0.01 < measure_bandwidth() < 10_000


def test_eight_billion_are_planned_without_their_memory(cli: Cli) -> None:
    result = cli("plan", "--params", "8B", "--ranks", "8", "--bandwidth", "25")
    assert result.code == 0, result.stderr
    assert "34 layers x 4096 wide" in result.stdout
    assert "adamw, bf16, 8 FSDP shards" in result.stdout
    assert "3.68 GiB" in result.stdout


def test_json_holds_request_and_report(cli: Cli) -> None:
    result = cli(
        "plan", "--params", "10M", "--dtype", "fp32", "--bandwidth", "20", "--swap-times", "4", "--json"
    )
    plan = json.loads(result.stdout)
    assert plan["request"]["params"] == pytest.approx(10**7, rel=0.01)
    assert plan["request"]["shape"]["vocab"] == 256
    assert plan["request"]["params_nbytes"] == 4 * plan["request"]["params"]
    assert plan["report"]["num_batches"] == 4
    assert plan["report"]["gbps"] == 20
    assert plan["report"]["device_freed_nbytes"] == pytest.approx(8 * plan["request"]["params"], rel=0.01)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--optimizer", "lbfgs"], "optimizer must be one of adadelta, adafactor"),
        (["--dtype", "int8"], "dtype must be one of fp32, bf16, fp16, got 'int8'"),
        (["--ranks", "0"], "ranks must be an integer >= 1"),
        (["--bandwidth", "0"], "bandwidth must be a positive finite number"),
        (["--swap-times", "0"], "swap_times must be an integer >= 1"),
        (["--staging-buffers", "1"], "staging_buffers must be an integer >= 2"),
        (["--params", "lots"], "A model size is a positive number"),
        (["--params", "10M", "--vocab", "128256"], "the nearest has"),
    ],
)
def test_wrong_option_is_one_message_and_code_2(cli: Cli, options: list[str], says: str) -> None:
    result = cli("plan", *options)
    assert result.code == 2
    assert result.stderr.startswith("error: ")
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_request_with_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="got 'AdamW'"):
        request(optimizer="AdamW")
