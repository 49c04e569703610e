"""State that was never created stays absent through every kind of checkpoint: zeros are not the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import swapckpt
from swapckpt.absence import is_marked, mark_not_created
from tests.manager.test_exchange import StockOptimizer
from tests.manager.training import CONFIG, OPTIMIZERS, Net, assert_same_bits, contents, train

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.optim import Optimizer

DIFFERENT_FROM_ZERO = ["SGD-dampening", "NAdam", "Rprop", "ASGD"]
"""Optimizers whose next step differs between absent state and state that is all zeros.

(Adagrad's does too, but its state exists from construction on, for parameters without gradients as well.)
"""


def build(
    kind: str, config: swapckpt.SwapConfig | None = CONFIG
) -> tuple[Net, Optimizer, swapckpt.StateManager]:
    model = Net()
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    return model, optimizer, swapckpt.StateManager(model, optimizer, config)


def from_step_2(step: int) -> bool:
    return step >= 2


def uninterrupted(kind: str, steps: int) -> dict[str, object]:
    model = Net()
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    train(model, optimizer, steps=range(steps), use_spare=from_step_2)
    return contents(model, optimizer)


# ------------------------------------------------------------------ C2: before any step


def export_only(manager: swapckpt.StateManager, path: Path) -> None:
    manager.state_dict()


def load_own_export(manager: swapckpt.StateManager, path: Path) -> None:
    manager.load_state_dict(manager.state_dict())


def save_and_load(manager: swapckpt.StateManager, path: Path) -> None:
    dcp.save({"optimizer": manager}, checkpoint_id=path)
    dcp.load({"optimizer": manager}, checkpoint_id=path)


def torch_save_and_load(manager: swapckpt.StateManager, path: Path) -> None:
    torch.save(manager.state_dict(), path / "state.pt")
    manager.load_state_dict(torch.load(path / "state.pt", weights_only=True))


def flat_save_and_load(manager: swapckpt.StateManager, path: Path) -> None:
    manager.flat = True
    save_and_load(manager, path)


def flat_then_nested(manager: swapckpt.StateManager, path: Path) -> None:
    manager.flat = True
    exported = manager.state_dict()
    torch.save(exported, path / "state.pt")
    manager.flat = False
    manager.load_state_dict(torch.load(path / "state.pt", weights_only=True))


ROUNDTRIPS = [
    export_only,
    load_own_export,
    save_and_load,
    torch_save_and_load,
    flat_save_and_load,
    flat_then_nested,
]


@pytest.mark.parametrize("roundtrip", ROUNDTRIPS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_c2_export_before_the_first_step_changes_nothing(
    tmp_path: Path, kind: str, roundtrip: Callable[[swapckpt.StateManager, Path], None]
) -> None:
    """Stock: step becomes 1, moments get decay, and the hooks of the optimizer run."""
    model, optimizer, manager = build(kind)
    hooked: list[object] = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: hooked.append("pre")),
        optimizer.register_step_post_hook(lambda *_: hooked.append("post")),
    ]
    before = contents(model, optimizer)
    roundtrip(manager, tmp_path)
    assert not hooked
    assert all(param.grad is None for param in model.parameters())
    assert_same_bits(contents(model, optimizer), before)
    for handle in handles:
        handle.remove()
    train(model, optimizer, steps=range(3), use_spare=from_step_2)
    assert_same_bits(contents(model, optimizer), uninterrupted(kind, 3))


@pytest.mark.parametrize("roundtrip", ROUNDTRIPS)
@pytest.mark.parametrize("kind", DIFFERENT_FROM_ZERO)
def test_c2_the_same_for_an_optimizer_that_is_managed_but_not_swapped(
    tmp_path: Path, kind: str, roundtrip: Callable[[swapckpt.StateManager, Path], None]
) -> None:
    model, optimizer, manager = build(kind, None)
    roundtrip(manager, tmp_path)
    train(model, optimizer, steps=range(3), use_spare=from_step_2)
    assert_same_bits(contents(model, optimizer), uninterrupted(kind, 3))


@pytest.mark.parametrize("kind", DIFFERENT_FROM_ZERO)
def test_the_difference_is_real(kind: str) -> None:
    """A run that starts from zeros, as a reader that does not know the mark would, ends elsewhere."""
    model, optimizer, manager = build(kind)
    state = manager.state_dict()["state"]
    assert isinstance(state, dict)
    for param_name, values in state.items():
        optimizer.state[model.get_parameter(param_name)] = {
            key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value
            for key, value in values.items()
        }
    train(model, optimizer, steps=range(3), use_spare=from_step_2)
    found, expected = contents(model, optimizer), uninterrupted(kind, 3)
    with pytest.raises(AssertionError):
        assert_same_bits(found, expected)


# ------------------------------------------------------------------ C4: parameters without gradients


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_c4_a_parameter_that_was_never_used_resumes(tmp_path: Path, kind: str, flat: bool) -> None:
    """Stock: Missing key in checkpoint state_dict: optimizer.state.spare.weight.step."""
    model, optimizer, manager = build(kind)
    manager.flat = flat
    train(model, optimizer, steps=range(2), use_spare=from_step_2)
    dcp.save({"model": model, "optimizer": manager}, checkpoint_id=tmp_path)

    model, optimizer, manager = build(kind)
    manager.flat = flat
    dcp.load({"model": model.state_dict(), "optimizer": manager}, checkpoint_id=tmp_path)
    train(model, optimizer, steps=range(2, 4), use_spare=from_step_2)
    assert_same_bits(contents(model, optimizer), uninterrupted(kind, 4))


@pytest.mark.parametrize("kind", DIFFERENT_FROM_ZERO)
def test_loading_makes_state_absent_that_was_created_since(tmp_path: Path, kind: str) -> None:
    model, optimizer, manager = build(kind)
    train(model, optimizer, steps=range(2), use_spare=from_step_2)
    dcp.save({"model": model, "optimizer": manager}, checkpoint_id=tmp_path)
    train(model, optimizer, steps=range(2, 5), use_spare=from_step_2)
    mirrors = _pointers(optimizer.state[model.spare.weight])
    assert mirrors
    dcp.load({"model": model.state_dict(), "optimizer": manager}, checkpoint_id=tmp_path)
    assert model.spare.weight not in optimizer.state
    train(model, optimizer, steps=range(2, 4), use_spare=from_step_2)
    assert_same_bits(contents(model, optimizer), uninterrupted(kind, 4))
    assert _pointers(optimizer.state[model.spare.weight]) == mirrors  # their memory was kept for this


def _pointers(values: dict[str, torch.Tensor]) -> dict[str, int]:
    return {key: value.data_ptr() for key, value in values.items()}


def test_c4_a_stock_file_without_the_parameter_resumes_with_a_partial_load(tmp_path: Path) -> None:
    """A plain ``dcp.load`` cannot: DCP insists on every key of the destination."""
    model = Net()
    optimizer = OPTIMIZERS["NAdam"](list(model.parameters()))
    train(model, optimizer, steps=range(2), use_spare=from_step_2)
    stock = get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": stock}, checkpoint_id=tmp_path)

    model, optimizer, manager = build("NAdam")
    dcp.load(
        {"model": model.state_dict(), "optimizer": manager},
        checkpoint_id=tmp_path,
        planner=swapckpt.StrictLoadPlanner(allow_partial=True),
    )
    assert model.spare.weight not in optimizer.state
    train(model, optimizer, steps=range(2, 4), use_spare=from_step_2)
    assert_same_bits(contents(model, optimizer), uninterrupted("NAdam", 4))


def test_c4_a_state_dict_without_the_parameter_needs_allow_missing() -> None:
    model, optimizer, manager = build("NAdam")
    other = Net()
    other_optimizer = OPTIMIZERS["NAdam"](list(other.parameters()))
    train(other, other_optimizer, steps=range(2), use_spare=from_step_2)
    stock = get_optimizer_state_dict(other, other_optimizer)
    with pytest.raises(swapckpt.errors.SchemaError, match=r"spare\.weight: no state"):
        manager.load_state_dict(stock)
    assert not optimizer.state
    model.load_state_dict(other.state_dict())
    manager.load_state_dict(stock, allow_missing=True)
    train(model, optimizer, steps=range(2, 4), use_spare=from_step_2)
    assert_same_bits(contents(model, optimizer), uninterrupted("NAdam", 4))


def test_frozen_parameters_are_not_exported_but_their_state_is_accepted_and_kept() -> None:
    """Trained, then frozen: the moments stay, in the run and through a state dict."""
    model, optimizer, manager = build("AdamW")
    train(model, optimizer, steps=range(2), use_spare=lambda _: True)
    model.spare.requires_grad_(False)
    train(model, optimizer, steps=range(2, 3))
    saved = {"model": model.state_dict(), "optimizer": manager.state_dict()}

    resumed, resumed_optimizer, resumed_manager = build("AdamW")
    resumed.spare.requires_grad_(False)
    fresh = resumed_manager.state_dict()["state"]
    assert isinstance(fresh, dict)
    assert not any(name.startswith("spare") for name in fresh)
    resumed.load_state_dict(saved["model"])
    resumed_manager.load_state_dict(saved["optimizer"])
    assert_same_bits(contents(resumed, resumed_optimizer), contents(model, optimizer))
    for net, each in ((model, optimizer), (resumed, resumed_optimizer)):
        net.spare.requires_grad_(True)
        train(net, each, steps=range(3, 5), use_spare=lambda _: True)
    assert_same_bits(contents(resumed, resumed_optimizer), contents(model, optimizer))


def test_state_of_frozen_parameters_is_checked() -> None:
    model, optimizer, manager = build("AdamW")
    train(model, optimizer, steps=range(1), use_spare=lambda _: True)
    saved: dict[str, Any] = manager.state_dict()
    saved["state"]["spare.bias"]["exp_avg"] = torch.ones(7)
    resumed, resumed_optimizer, target = build("AdamW")
    resumed.spare.requires_grad_(False)
    with pytest.raises(
        swapckpt.errors.SchemaError, match=r"spare\.bias\.exp_avg: expected shape \[6\], found \[7\]"
    ):
        target.load_state_dict(saved)
    assert not resumed_optimizer.state


# ------------------------------------------------------------------ the mark


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (5, 3)])
def test_the_mark_is_negative_zero_and_zero_is_not_the_mark(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    assert not is_marked(tensor)
    mark_not_created(tensor)
    assert is_marked(tensor)
    assert torch.equal(tensor, torch.zeros(shape, dtype=dtype))
    tensor.view(-1)[-1] = 0.0
    assert not is_marked(tensor)


def test_the_mark_is_recognised_in_tensors_that_are_not_contiguous() -> None:
    marked = torch.full((), -0.0)
    other = torch.tensor([[-0.0, 1.0], [-0.0, 1.0]])
    assert is_marked(marked.expand(3, 2))
    assert is_marked(other[:, 0])
    assert not is_marked(other[0])
    assert is_marked(torch.full((3, 4), -0.0).t())


def test_bf16_state_stays_absent_through_a_checkpoint(tmp_path: Path) -> None:
    def make() -> tuple[Net, Optimizer, swapckpt.StateManager]:
        model = Net(dtype=torch.bfloat16)
        optimizer = OPTIMIZERS["SGD-dampening"](list(model.parameters()))
        return model, optimizer, swapckpt.StateManager(model, optimizer, CONFIG)

    model, optimizer, manager = make()
    train(model, optimizer, steps=range(2), use_spare=from_step_2)
    dcp.save({"model": model, "optimizer": manager}, checkpoint_id=tmp_path)
    resumed, resumed_optimizer, manager = make()
    dcp.load({"model": resumed.state_dict(), "optimizer": manager}, checkpoint_id=tmp_path)
    assert resumed.spare.weight not in resumed_optimizer.state
    train(model, optimizer, steps=range(2, 4), use_spare=from_step_2)
    train(resumed, resumed_optimizer, steps=range(2, 4), use_spare=from_step_2)
    assert_same_bits(contents(resumed, resumed_optimizer), contents(model, optimizer))


def test_values_that_a_reader_wrote_are_not_taken_for_the_mark() -> None:
    """One element that is not a negative zero, anywhere in a parameter's state, means it was created."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    manager = swapckpt.StateManager(model, optimizer, CONFIG)
    exported = manager.state_dict()
    state = exported["state"]
    assert isinstance(state, dict)
    state["weight"]["exp_avg_sq"][3, 3] = 1.0
    manager.load_state_dict(exported)
    assert optimizer.state[model.weight]["exp_avg_sq"][3, 3] == 1.0


# ------------------------------------------------------------------ stock's helpers on an adopted optimizer


@pytest.mark.parametrize("kind", ["AdamW", "NAdam", "SGD-dampening"])
def test_stock_get_on_an_adopted_fresh_optimizer_is_undone(kind: str) -> None:
    model, optimizer, _ = build(kind)
    exported = get_optimizer_state_dict(model, optimizer)
    assert exported["state"].keys() == dict(model.named_parameters()).keys()
    assert all(
        torch.equal(value, torch.zeros_like(value)) for value in exported["state"]["head.bias"].values()
    )
    train(model, optimizer, steps=range(3), use_spare=from_step_2)
    assert_same_bits(contents(model, optimizer), uninterrupted(kind, 3))


@pytest.mark.parametrize("kind", ["AdamW", "NAdam", "SGD-dampening"])
def test_stock_set_on_an_adopted_fresh_optimizer_ends_in_the_right_state(kind: str) -> None:
    source = Net()
    source_optimizer = OPTIMIZERS[kind](list(source.parameters()))
    train(source, source_optimizer, steps=range(2), use_spare=from_step_2)
    stock = get_optimizer_state_dict(source, source_optimizer)

    model, optimizer, _ = build(kind)
    model.load_state_dict(source.state_dict())
    # Not strict: the state dict has nothing for the parameter that was never used.
    set_optimizer_state_dict(model, optimizer, stock, options=StateDictOptions(strict=False))
    train(model, optimizer, steps=range(2, 4), use_spare=from_step_2)
    assert_same_bits(contents(model, optimizer), uninterrupted(kind, 4))


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("kind", ["AdamW", "NAdam", "SGD-dampening"])
def test_stocks_recipe_for_resuming_works_on_an_adopted_optimizer(
    tmp_path: Path, kind: str, flat: bool
) -> None:
    """get, ``dcp.load`` into what it returned, set: what training loops do that know nothing of swapping."""
    model, optimizer, manager = build(kind)
    manager.flat = flat
    train(model, optimizer, steps=range(2), use_spare=from_step_2)
    dcp.save({"model": model, "optimizer": manager}, checkpoint_id=tmp_path)

    model, optimizer, _ = build(kind)
    destination = {"model": model.state_dict(), "optimizer": StockOptimizer(model, optimizer, flat=flat)}
    dcp.load(destination, checkpoint_id=tmp_path)
    train(model, optimizer, steps=range(2, 4), use_spare=from_step_2)
    assert_same_bits(contents(model, optimizer), uninterrupted(kind, 4))


def test_stocks_fake_step_moves_no_parameter_and_no_scheduler() -> None:
    model, optimizer, _ = build("AdamW")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    before = contents(model, optimizer)
    get_optimizer_state_dict(model, optimizer)
    assert_same_bits({name: param.detach() for name, param in model.named_parameters()}, before)
    assert scheduler.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 0.01
