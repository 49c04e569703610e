"""Checkpoints travel between stock torch, a managed optimizer and a swapped one, in every direction.

Each run is: train three steps, write, read in a fresh run, train two more; then all bits must equal those of
a run that did five steps and never wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import swapckpt
from tests.manager.training import CONFIG, DEFAULT_CONFIG, OPTIMIZERS, Net, assert_same_bits, contents, train

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.optim import Optimizer


class StockOptimizer:
    """An optimizer as stock torch saves and loads it: the recipe of its documentation."""

    def __init__(self, model: Net, optimizer: Optimizer, *, flat: bool) -> None:
        self.model, self.optimizer = model, optimizer
        self.options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=self.options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state_dict, options=self.options)


SIDES = ["stock", "managed", "swapped", "swapped-large"]


def stateful(
    side: str, model: Net, optimizer: Optimizer, *, flat: bool
) -> StockOptimizer | swapckpt.StateManager:
    if side == "stock":
        return StockOptimizer(model, optimizer, flat=flat)
    config = {"managed": None, "swapped": CONFIG, "swapped-large": DEFAULT_CONFIG}[side]
    return swapckpt.StateManager(model, optimizer, config, flat=flat)


def always(step: int) -> bool:
    return True


def uninterrupted(make: Callable[[Net], Optimizer], **net: object) -> dict[str, object]:
    model = Net(**net)
    optimizer = make(model)
    train(model, optimizer, steps=range(5), use_spare=always)
    return contents(model, optimizer)


def exchange(
    path: Path, make: Callable[[Net], Optimizer], *, writer: str, reader: str, flat: bool, **net: object
) -> dict[str, object]:
    """Contents at the end of a run that ``writer`` began and ``reader`` finished."""
    model = Net(**net)
    optimizer = make(model)
    source = stateful(writer, model, optimizer, flat=flat)
    train(model, optimizer, steps=range(3), use_spare=always)
    dcp.save({"model": model, "optimizer": source}, checkpoint_id=path)

    model = Net(**net)
    optimizer = make(model)
    target = stateful(reader, model, optimizer, flat=flat)
    states = {"model": model.state_dict(), "optimizer": target}
    dcp.load(states, checkpoint_id=path)
    train(model, optimizer, steps=range(3, 5), use_spare=always)
    return contents(model, optimizer)


def make_named(name: str) -> Callable[[Net], Optimizer]:
    return lambda model: OPTIMIZERS[name](list(model.parameters()))


def tensor_lr(model: Net) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))


def two_groups(model: Net) -> Optimizer:
    first, *rest = model.named_parameters()
    groups = [{"params": rest, "weight_decay": 0.2}, {"params": [first], "betas": (0.8, 0.9)}]
    return torch.optim.AdamW(groups, lr=0.01)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("reader", SIDES)
@pytest.mark.parametrize("writer", SIDES)
def test_adamw_in_every_direction(tmp_path: Path, writer: str, reader: str, flat: bool) -> None:
    make = make_named("AdamW")
    assert_same_bits(exchange(tmp_path, make, writer=writer, reader=reader, flat=flat), uninterrupted(make))


@pytest.mark.parametrize(("writer", "reader"), [("stock", "swapped"), ("swapped", "stock")])
@pytest.mark.parametrize("kind", [*OPTIMIZERS, "tensor_lr", "two_groups"])
def test_every_optimizer_between_stock_and_swapped(
    tmp_path: Path, kind: str, writer: str, reader: str
) -> None:
    make = {"tensor_lr": tensor_lr, "two_groups": two_groups}.get(kind) or make_named(kind)
    assert_same_bits(exchange(tmp_path, make, writer=writer, reader=reader, flat=False), uninterrupted(make))


@pytest.mark.parametrize(
    ("writer", "reader"), [("stock", "swapped"), ("swapped", "stock"), ("swapped", "swapped")]
)
def test_bf16_parameters(tmp_path: Path, writer: str, reader: str) -> None:
    make = make_named("AdamW")
    assert_same_bits(
        exchange(tmp_path, make, writer=writer, reader=reader, flat=False, dtype=torch.bfloat16),
        uninterrupted(make, dtype=torch.bfloat16),
    )


# ------------------------------------------------------------------ plain torch.save


@pytest.mark.parametrize("reader", ["stock", "managed", "swapped"])
@pytest.mark.parametrize("writer", ["stock", "managed", "swapped"])
@pytest.mark.parametrize("kind", ["AdamW", "AdamW-fused", "SGD-dampening", "Adafactor", "two_groups"])
def test_plain_torch_save_of_the_optimizers_own_state_dict(
    tmp_path: Path, kind: str, writer: str, reader: str
) -> None:
    make = {"two_groups": two_groups}.get(kind) or make_named(kind)
    file = tmp_path / "run.pt"
    model = Net()
    optimizer = make(model)
    stateful(writer, model, optimizer, flat=False)
    train(model, optimizer, steps=range(3), use_spare=always)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)

    model = Net()
    optimizer = make(model)
    stateful(reader, model, optimizer, flat=False)
    saved = torch.load(file, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(model, optimizer, steps=range(3, 5), use_spare=always)
    assert_same_bits(contents(model, optimizer), uninterrupted(make))


@pytest.mark.parametrize("saved_flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("own_flat", [False, True], ids=["to-nested", "to-flat"])
def test_torch_save_of_the_managers_state_dict_loads_into_either_layout(
    tmp_path: Path, saved_flat: bool, own_flat: bool
) -> None:
    make = make_named("AdamW")
    model = Net()
    optimizer = make(model)
    manager = swapckpt.StateManager(model, optimizer, CONFIG, flat=saved_flat)
    train(model, optimizer, steps=range(3), use_spare=always)
    torch.save((model.state_dict(), manager.state_dict()), tmp_path / "run.pt")

    model = Net()
    optimizer = make(model)
    manager = swapckpt.StateManager(model, optimizer, CONFIG, flat=own_flat)
    parameters, state = torch.load(tmp_path / "run.pt", weights_only=True)
    model.load_state_dict(parameters)
    manager.load_state_dict(state)
    for tensor in state.values() if saved_flat else state["state"]["head.weight"].values():
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(float("nan"))  # what was loaded is a copy
    train(model, optimizer, steps=range(3, 5), use_spare=always)
    assert_same_bits(contents(model, optimizer), uninterrupted(make))


# ------------------------------------------------------------------ several optimizers


def test_several_optimizers_share_one_file_with_stock(tmp_path: Path) -> None:
    for writer, reader in (("stock", "swapped"), ("swapped", "stock"), ("swapped", "swapped")):
        found = _muon_and_adamw(tmp_path / f"{writer}-{reader}", writer=writer, reader=reader)
        assert_same_bits(found, _muon_and_adamw(None, writer="stock", reader="stock"))


def _muon_and_adamw(path: Path | None, *, writer: str, reader: str) -> dict[str, object]:
    model, optimizers = _net_with_two_optimizers()
    source = _stateful_of_two(writer, model, optimizers)
    _train_two(model, optimizers, steps=range(3))
    if path is not None:
        dcp.save({"model": model, "optimizer": source}, checkpoint_id=path)
        model, optimizers = _net_with_two_optimizers()
        target = _stateful_of_two(reader, model, optimizers)
        dcp.load({"model": model.state_dict(), "optimizer": target}, checkpoint_id=path)
    _train_two(model, optimizers, steps=range(3, 5))
    return contents(model, optimizers[0]) | contents(model, optimizers[1])


def _net_with_two_optimizers() -> tuple[Net, tuple[Optimizer, Optimizer]]:
    model = Net()
    rest = [param for param in model.parameters() if param.ndim != 2]
    return model, (OPTIMIZERS["Muon"](list(model.parameters())), torch.optim.AdamW(rest, lr=0.01))


def _stateful_of_two(
    side: str, model: Net, optimizers: tuple[Optimizer, Optimizer]
) -> StockOptimizer | swapckpt.StateManager:
    if side == "stock":
        return StockOptimizer(model, optimizers, flat=False)
    return swapckpt.StateManager(model, {"muon": optimizers[0], "adamw": optimizers[1]}, CONFIG)


def _train_two(model: Net, optimizers: tuple[Optimizer, Optimizer], *, steps: range) -> None:
    for step in steps:
        model.zero_grad()
        model(torch.full((2, 6), 0.1 * (step + 1)), use_spare=True).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    model.zero_grad()
