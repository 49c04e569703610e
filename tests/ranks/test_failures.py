"""A rank that fails, dies or stays away is an error on every rank, and never a hang."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

import swapckpt
from swapckpt.errors import GradientError, ReplicaError, StateFailedError, StepError, SwapCkptError
from swapckpt.optimizer import swap_of
from tests.manager.training import same_bits
from tests.ranks.training import CONFIG, backward, build

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.multirank import RankRunner


class Failing(torch.optim.AdamW):
    """Fails in the second batch of a step on the rank it is told to."""

    trouble: Callable[[], object] | None = None

    def step(self, closure: object = None) -> object:  # type: ignore[override]
        if self.trouble is not None and any(param.ndim == 2 for param in self.param_groups[0]["params"]):
            self.trouble()
        return super().step(closure)


def trainer(layout: str, **options: object) -> tuple[torch.nn.Module, Failing, swapckpt.StateManager]:
    model, net, _ = build(layout, "AdamW")
    optimizer = Failing(net.parameters(), lr=0.01)
    manager = swapckpt.StateManager(model, optimizer, replace(CONFIG, **options))  # type: ignore[arg-type]
    backward(model, net, 0)
    optimizer.step()
    backward(model, net, 1)
    return model, optimizer, manager


def error_of(call: Callable[[], object]) -> tuple[type[SwapCkptError], str] | None:
    try:
        call()
    except SwapCkptError as error:
        return type(error), str(error)
    return None


def run_out() -> None:
    raise torch.OutOfMemoryError("no room")


def fail_in_the_update(layout: str, path: Path) -> tuple[object, object, int]:
    """The step fails, a checkpoint is loaded, and the step is taken again: as if nothing had happened."""
    model, optimizer, manager = trainer(layout)
    other_model, other, _ = trainer(layout)
    other.step()
    with swapckpt.Checkpointer(path, {"model": model, "optimizer": manager}) as service:
        service.save(1).wait()
        if dist.get_rank() == 2:
            optimizer.trouble = run_out
        step, export = error_of(optimizer.step), error_of(manager.state_dict)
        device_nbytes = manager.memory().device_nbytes
        optimizer.trouble = None
        assert service.load() == 1
    optimizer.step()
    for param, expected in zip(model.parameters(), other_model.parameters(), strict=True):
        assert same_bits(param.data, expected.data)
        state, other_state = optimizer.state.get(param, {}), other.state.get(expected, {})
        assert state.keys() == other_state.keys()
        assert all(same_bits(state[key], other_state[key]) for key in state)
    return step, export, device_nbytes


@pytest.mark.parametrize("layout", ["hsdp", "ddp"])
def test_a_failed_update_fails_the_step_everywhere(
    run_ranks: RankRunner, tmp_path: Path, layout: str
) -> None:
    ranks = run_ranks(4, fail_in_the_update, layout, tmp_path / "checkpoints")
    for rank, (step, export, device_nbytes) in enumerate(ranks):
        assert step[0] is (StepError if rank == 2 else ReplicaError)
        assert ("no room" if rank == 2 else "The step failed on rank 2.") in step[1]
        assert "restore both from a checkpoint" in step[1]
        assert export[0] is StateFailedError
        assert device_nbytes == 0


def fail_before_the_update() -> list[object]:
    model, optimizer, _ = trainer("ddp")
    param = next(iter(swap_of(optimizer).table.entries))
    if dist.get_rank() == 1:
        param.grad = torch.zeros_like(param).to_sparse()
    before = [each.detach().clone() for each in model.parameters()]
    failed = error_of(optimizer.step)
    unchanged = all(map(torch.equal, before, model.parameters()))
    optimizer.zero_grad()
    optimizer.step()  # not failed: the next step is taken by all ranks again
    return [failed, unchanged]


def test_a_gradient_that_one_rank_cannot_use_stops_all_before_the_update(run_ranks: RankRunner) -> None:
    for rank, (failed, unchanged) in enumerate(run_ranks(4, fail_before_the_update)):
        assert failed[0] is (GradientError if rank == 1 else ReplicaError)
        assert rank == 1 or failed[1] == "Rank 1 could not begin the step. Nothing was updated, on any rank."
        assert unchanged


def lose_a_rank(how: str, path: Path) -> list[object]:
    _, optimizer, manager = trainer("ddp", timeout_secs=3.0)
    if dist.get_rank() == 3:
        if how == "stays away":
            while len(list(path.iterdir())) < 3:
                time.sleep(0.05)
            os._exit(0)
        optimizer.trouble = lambda: os.kill(os.getpid(), signal.SIGKILL)
    errors: list[object] = [error_of(optimizer.step), error_of(manager.state_dict)]
    (path / f"{dist.get_rank()}").touch()
    return errors


@pytest.mark.parametrize("how", ["dies", "stays away"])
def test_a_lost_rank_is_an_error_on_the_others(run_ranks: RankRunner, tmp_path: Path, how: str) -> None:
    (tmp_path / "told").mkdir()
    for outcome in run_ranks.outcomes(4, lose_a_rank, how, tmp_path / "told")[:3]:
        assert outcome.value is not None, outcome.error
        step, export = outcome.value
        assert step[0] in (ReplicaError, StepError)
        assert "could not exchange data with other ranks" in step[1]
        if how == "dies":  # in the update; a rank that stays away is missed before it
            assert export[0] is StateFailedError
        else:
            assert export is None
