"""After a step that failed midway nothing is exported or saved, until parameters and state are restored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp

import swapckpt
from swapckpt.errors import PhaseError, StateFailedError, StepError
from tests.manager.training import CONFIG, Net, assert_same_bits, backward, contents, train

if TYPE_CHECKING:
    from pathlib import Path

    from torch.optim import Optimizer


class Flaky(torch.optim.AdamW):
    """Raises in its n-th call for a batch from now."""

    _fail_in = 0

    @torch.no_grad()
    def step(self, closure: object = None) -> object:
        self._fail_in -= 1
        if self._fail_in == 0:
            error = "the update failed"
            raise RuntimeError(error)
        return super().step(closure)


def build() -> tuple[Net, Flaky, swapckpt.StateManager]:
    model = Net()
    optimizer = Flaky(model.parameters(), lr=0.01)
    return model, optimizer, swapckpt.StateManager(model, optimizer, CONFIG)


def fail_midway(model: Net, optimizer: Flaky) -> None:
    backward(model, 9)
    optimizer._fail_in = 2
    with pytest.raises(StepError):
        optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def failed(tmp_path: Path) -> tuple[Net, Flaky, swapckpt.StateManager]:
    """A run of two steps with a checkpoint of the second, whose third step fails in its second batch."""
    model, optimizer, manager = build()
    train(model, optimizer, steps=range(2))
    dcp.save({"model": model, "optimizer": manager}, checkpoint_id=tmp_path)
    fail_midway(model, optimizer)
    return model, optimizer, manager


def uninterrupted() -> dict[str, object]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, steps=range(4))
    return contents(model, optimizer)


def test_everything_refuses_and_names_the_cause(
    tmp_path: Path, failed: tuple[Net, Flaky, swapckpt.StateManager]
) -> None:
    model, optimizer, manager = failed
    before = contents(model, optimizer)
    for refused in (
        manager.state_dict,
        lambda: manager.load_state_dict({}),
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}),
        optimizer.step,
        lambda: swapckpt.release(optimizer),
        lambda: dcp.save({"optimizer": manager}, checkpoint_id=tmp_path / "torn"),
        lambda: dcp.load({"optimizer": manager}, checkpoint_id=tmp_path),
    ):
        with pytest.raises(StateFailedError, match="the update failed") as caught:
            refused()
        assert isinstance(caught.value.__cause__, StepError)
    assert not (tmp_path / "torn").exists()
    assert_same_bits(contents(model, optimizer), before)


def test_recovery_with_a_plain_dcp_load(
    tmp_path: Path, failed: tuple[Net, Flaky, swapckpt.StateManager]
) -> None:
    model, optimizer, manager = failed
    with manager.recovery():
        dcp.load({"model": model.state_dict(), "optimizer": manager}, checkpoint_id=tmp_path)
    train(model, optimizer, steps=range(2, 4))
    assert_same_bits(contents(model, optimizer), uninterrupted())


def test_accept_parameters_clears_the_failure_in_one_call(
    failed: tuple[Net, Flaky, swapckpt.StateManager],
) -> None:
    model, optimizer, manager = failed
    source, source_optimizer, source_manager = build()
    train(source, source_optimizer, steps=range(2))
    model.load_state_dict(source.state_dict())
    with pytest.raises(StateFailedError):
        manager.load_state_dict(source_manager.state_dict())
    manager.load_state_dict(source_manager.state_dict(), accept_parameters=True)
    train(model, optimizer, steps=range(2, 4))
    assert_same_bits(contents(model, optimizer), uninterrupted())


def test_recovery_without_a_load_recovers_nothing(failed: tuple[Net, Flaky, swapckpt.StateManager]) -> None:
    _, optimizer, manager = failed
    with manager.recovery(), pytest.raises(PhaseError):
        optimizer.step()
    with pytest.raises(StateFailedError, match="the update failed"):
        manager.state_dict()


def test_recovery_by_a_load_that_does_not_fit_recovers_nothing(
    failed: tuple[Net, Flaky, swapckpt.StateManager],
) -> None:
    _, optimizer, manager = failed
    with pytest.raises(swapckpt.errors.SchemaError), manager.recovery():
        manager.load_state_dict({"state": {}, "param_groups": []})
    with pytest.raises(StateFailedError, match="the update failed"):
        optimizer.step()


def test_recovery_when_the_very_first_step_failed(tmp_path: Path) -> None:
    """Some state was created, some never: the checkpoint decides about all of it."""
    source, source_optimizer, source_manager = build()
    train(source, source_optimizer, steps=range(2))
    dcp.save({"model": source, "optimizer": source_manager}, checkpoint_id=tmp_path)
    model, optimizer, manager = build()
    fail_midway(model, optimizer)
    with manager.recovery():
        dcp.load({"model": model.state_dict(), "optimizer": manager}, checkpoint_id=tmp_path)
    train(model, optimizer, steps=range(2, 4))
    assert_same_bits(contents(model, optimizer), uninterrupted())


def test_one_failed_optimizer_of_several_stops_the_export_of_all() -> None:
    model = Net()
    good = torch.optim.AdamW(model.blocks.parameters())
    bad = Flaky([*model.head.parameters(), *model.spare.parameters()])
    manager = swapckpt.StateManager(model, {"good": good, "bad": bad}, CONFIG)
    backward(model, 0, use_spare=True)
    good.step()
    bad._fail_in = 2
    with pytest.raises(StepError):
        bad.step()
    with pytest.raises(StateFailedError):
        manager.state_dict()
    good.step()  # its own state is whole


def test_export_inside_a_step_is_refused() -> None:
    model = Net()
    refused: list[str] = []

    class Nosy(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure: object = None) -> object:
            for call in (manager.state_dict, lambda: manager.load_state_dict({})):
                with pytest.raises(PhaseError) as caught:
                    call()
                refused.append(str(caught.value))
            return super().step(closure)

    optimizer: Optimizer = Nosy(model.parameters())
    manager = swapckpt.StateManager(model, optimizer, CONFIG)
    train(model, optimizer, steps=range(1), use_spare=lambda _: True)
    assert len(refused) == 6  # two calls in each of three batches
    assert all("while the optimizer is stepping" in message for message in refused)
    assert manager.state_dict()["state"]
