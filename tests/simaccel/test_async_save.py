"""Asynchronous saves of a swapped optimizer on an accelerator, through every stager that torch has.

The mirrors are host memory already: what a stager copies is complete when ``step`` has returned, whatever the
compute stream still has to do. (Device tensors in the same save are the caller's to order.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from tests import simaccel as sim
from tests.manager.test_exchange import always
from tests.manager.training import assert_same_bits, contents, train
from tests.simaccel.test_resume import build
from tests.simaccel.test_stock_torch import NO_STAGING, STAGING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=["cpu:gloo,sim:gloo", "sim:gloo"])
def _one_rank(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """A group of one, once with and once without a CPU backend."""
    dist.init_process_group(request.param, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("schedule", [sim.EAGER, sim.LAZY], ids=str)
@pytest.mark.parametrize("options", STAGING.values(), ids=STAGING)
@pytest.mark.filterwarnings("ignore:Ignoring pin_memory flag:UserWarning")  # torch pins by CUDA's own calls
@pytest.mark.usefixtures("_one_rank")
def test_an_asynchronous_save_holds_the_step_it_was_made_at(
    tmp_path: Path, options: dict[str, bool], schedule: sim.Schedule
) -> None:
    sim.use(schedule)
    model, optimizer, manager = build("AdamW-fused", "swapped")
    train(model, optimizer, steps=range(2), use_spare=always)
    torch.accelerator.synchronize()
    group = dist.new_group(backend="gloo")  # DCP's own: the trainer's must stay free, and may have no CPU
    stager = DefaultStager(StagingOptions(**NO_STAGING | options))
    state = {"model": model.state_dict(), "optimizer": manager}
    saved = dcp.async_save(state, checkpoint_id=tmp_path / "2", async_stager=stager, process_group=group)
    if options.get("use_async_staging"):
        saved.staging_completion.result()  # type: ignore[union-attr]
        saved = saved.upload_completion  # type: ignore[union-attr]
    train(model, optimizer, steps=range(2, 4), use_spare=always)
    saved.result()  # type: ignore[union-attr]
    stager.close()

    resumed, resumed_optimizer, target = build("AdamW-fused", "swapped")
    dcp.load(
        {"model": resumed.state_dict(), "optimizer": target},
        checkpoint_id=tmp_path / "2",
        process_group=group,
    )
    train(resumed, resumed_optimizer, steps=range(2, 4), use_spare=always)
    assert_same_bits(contents(resumed, resumed_optimizer), contents(model, optimizer))
