"""C5: settings of groups survive: lr, betas, custom keys, what schedulers keep there, and empty groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.optim.lr_scheduler import LRScheduler, StepLR

import swapckpt
from swapckpt.errors import SchemaError
from tests.manager.training import CONFIG, Net, assert_same_bits, backward, contents, train

if TYPE_CHECKING:
    from pathlib import Path

    from torch.optim import Optimizer


def build(
    config: swapckpt.SwapConfig | None,
    *,
    lr: float | torch.Tensor = 0.01,
    custom: str = "",
    empty_lr: float = 0.5,
) -> tuple[Net, Optimizer, swapckpt.StateManager]:
    model = Net()
    params = list(model.parameters())
    groups = [
        {"params": params[3:], "lr": lr, "weight_decay": 0.3},
        {"params": [], "lr": empty_lr},
        {"params": params[:3], "betas": (0.8, 0.9), "name": custom},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    return model, optimizer, swapckpt.StateManager(model, optimizer, config)


def settings(optimizer: Optimizer) -> list[dict[str, object]]:
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


def scheduled_steps(model: Net, optimizer: Optimizer, scheduler: LRScheduler, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step, use_spare=True)
        optimizer.step()
        scheduler.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("config", [CONFIG, None], ids=["swapped", "managed"])
def test_c5_groups_resume_with_their_settings_and_schedule(
    tmp_path: Path, config: swapckpt.SwapConfig | None
) -> None:
    """Stock loses ``initial_lr``, so the next learning rate of a resumed schedule is wrong."""
    model, optimizer, manager = build(config, custom="from the saved run")
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
    scheduled_steps(model, optimizer, scheduler, range(3))
    states = {"model": model.state_dict(), "optimizer": manager, "scheduler": scheduler}
    dcp.save(states, checkpoint_id=tmp_path)

    resumed, resumed_optimizer, target = build(config, lr=7.0, custom="other", empty_lr=9.0)
    resumed_scheduler = StepLR(resumed_optimizer, step_size=2, gamma=0.1)
    states = {"model": resumed.state_dict(), "optimizer": target, "scheduler": resumed_scheduler}
    dcp.load(states, checkpoint_id=tmp_path)
    assert settings(resumed_optimizer) == settings(optimizer)
    assert [group["initial_lr"] for group in resumed_optimizer.param_groups] == [0.01, 0.5, 0.02]
    assert [group["name"] for group in resumed_optimizer.param_groups if "name" in group] == [
        "from the saved run"
    ]
    for net, each, schedule in (
        (model, optimizer, scheduler),
        (resumed, resumed_optimizer, resumed_scheduler),
    ):
        scheduled_steps(net, each, schedule, range(3, 6))
    assert settings(resumed_optimizer) == settings(optimizer)
    assert_same_bits(contents(resumed, resumed_optimizer), contents(model, optimizer))


def test_c5_the_flat_layout_restores_all_groups_that_have_parameters(tmp_path: Path) -> None:
    model, optimizer, manager = build(CONFIG, custom="saved")
    manager.flat = True
    train(model, optimizer, steps=range(2))
    dcp.save({"optimizer": manager}, checkpoint_id=tmp_path)
    _, resumed_optimizer, target = build(CONFIG, lr=7.0, custom="other", empty_lr=9.0)
    target.flat = True
    dcp.load({"optimizer": target}, checkpoint_id=tmp_path)
    saved, loaded = settings(optimizer), settings(resumed_optimizer)
    assert [loaded[0], loaded[2]] == [saved[0], saved[2]]
    assert loaded[1]["lr"] == 9.0  # the flat layout has settings per parameter, so none for this group


def test_a_setting_that_the_state_dict_lacks_keeps_its_value() -> None:
    """A newer torch adds settings; files of an older one do not have them."""
    model, optimizer, manager = build(CONFIG)
    train(model, optimizer, steps=range(1))
    state: dict[str, Any] = manager.state_dict()
    for group in state["param_groups"]:
        del group["maximize"]
    optimizer.param_groups[0]["maximize"] = True
    manager.load_state_dict(state)
    assert [group["maximize"] for group in optimizer.param_groups] == [True, False, False]


def test_tensor_settings_are_written_in_place() -> None:
    """Whoever holds the tensor (a captured graph, a scheduler) sees the loaded value."""
    lr = torch.tensor(0.01)
    model, optimizer, manager = build(CONFIG, lr=lr)
    train(model, optimizer, steps=range(1))
    saved = manager.state_dict()
    saved["param_groups"][0]["lr"] = torch.tensor(0.125)
    manager.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.125


def test_groups_are_matched_by_their_parameters_not_by_their_place() -> None:
    model = Net()
    first, *rest = model.parameters()
    optimizer = torch.optim.AdamW([{"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.2}])
    saved = swapckpt.StateManager(model, optimizer).state_dict()
    other = torch.optim.AdamW([{"params": rest, "lr": 7.0}, {"params": [first], "lr": 8.0}])
    swapckpt.StateManager(model, other, CONFIG).load_state_dict(saved)
    assert [group["lr"] for group in other.param_groups] == [0.2, 0.1]


def test_one_group_is_split_but_two_with_different_settings_are_not_merged() -> None:
    model = Net()
    first, *rest = model.parameters()

    def manager_of(*groups: dict[str, object]) -> swapckpt.StateManager:
        return swapckpt.StateManager(model, torch.optim.AdamW(list(groups)))

    one = manager_of({"params": [first, *rest], "lr": 0.3})
    two = manager_of({"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.2})
    with pytest.raises(SchemaError) as caught:
        one.load_state_dict(two.state_dict())
    assert "are one group here, but have different settings" in str(caught.value)
    assert one.optimizers["optimizer"].param_groups[0]["lr"] == 0.3
    two.load_state_dict(one.state_dict())
    assert [group["lr"] for group in two.optimizers["optimizer"].param_groups] == [0.3, 0.3]


def test_settings_are_copies() -> None:
    """A list among the settings must not be shared with the state dict it came from."""
    model = Net()
    optimizer = torch.optim.AdamW([{"params": model.parameters(), "milestones": [1, 2]}])
    manager = swapckpt.StateManager(model, optimizer, CONFIG)
    saved: dict[str, Any] = manager.state_dict()
    saved["param_groups"][0]["milestones"] = [3, 4]
    manager.load_state_dict(saved)
    saved["param_groups"][0]["milestones"].append(5)
    assert optimizer.param_groups[0]["milestones"] == [3, 4]
