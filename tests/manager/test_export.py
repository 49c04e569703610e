"""``state_dict()`` hands out the mirrors themselves, in the layouts of stock ``get_optimizer_state_dict``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import swapckpt
from swapckpt.errors import FqnError
from swapckpt.optimizer import swap_of
from tests.manager.training import CONFIG, DEFAULT_CONFIG, OPTIMIZERS, Net, matrices, same_bits, train

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn
    from torch.optim import Optimizer


def tensors_in(value: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from tensors_in(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from tensors_in(inner, f"{path}.{index}")


def assert_equal_layout(found: object, expected: object, path: str = "state_dict") -> None:
    """Same nesting, same keys in the same order, same values."""
    assert type(found) is type(expected), path
    if isinstance(found, dict) and isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key in expected:
            assert_equal_layout(found[key], expected[key], f"{path}.{key}")
    elif isinstance(found, list) and isinstance(expected, list):
        assert len(found) == len(expected), path
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal_layout(one, other, f"{path}.{index}")
    else:
        assert same_bits(found, expected), path


def ledger_counts(optimizer: Optimizer) -> tuple[object, ...]:
    return dataclasses.astuple(swap_of(optimizer).device.ledger)


# ------------------------------------------------------------------ aliases


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("config", [CONFIG, DEFAULT_CONFIG, None])
def test_exported_tensors_are_the_live_ones(config: swapckpt.SwapConfig | None, flat: bool) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    manager = swapckpt.StateManager(model, optimizer, config, flat=flat)
    train(model, optimizer, steps=range(2))
    live = {
        f"{name}.{key}": value.data_ptr()
        for name, param in model.named_parameters()
        for key, value in optimizer.state.get(param, {}).items()
    }
    assert len(live) == 3 * 8
    exported = {path.removeprefix(".state."): t.data_ptr() for path, t in tensors_in(manager.state_dict())}
    assert {path: pointer for path, pointer in exported.items() if "spare" not in path} == live


def test_export_moves_nothing() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    manager = swapckpt.StateManager(model, optimizer, CONFIG)
    train(model, optimizer, steps=range(2), use_spare=lambda _: True)
    before = ledger_counts(optimizer)
    assert any(before)
    first, second = manager.state_dict(), manager.state_dict()
    assert ledger_counts(optimizer) == before
    assert [t.data_ptr() for _, t in tensors_in(first)] == [t.data_ptr() for _, t in tensors_in(second)]


def test_export_before_the_first_step_allocates_its_templates_once_and_binds_nothing() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    manager = swapckpt.StateManager(model, optimizer, CONFIG)
    first = manager.state_dict()
    after_first = ledger_counts(optimizer)
    second = manager.state_dict()
    assert ledger_counts(optimizer) == after_first
    assert [t.data_ptr() for _, t in tensors_in(first)] == [t.data_ptr() for _, t in tensors_in(second)]
    assert not optimizer.state
    train(model, optimizer, steps=range(1), use_spare=lambda _: True)
    # The first step uses what the export reserved.
    assert [t.data_ptr() for _, t in tensors_in(manager.state_dict())] == [
        t.data_ptr() for _, t in tensors_in(first)
    ]


def test_exported_storages_have_the_size_of_their_tensors() -> None:
    """Stock's writer clones a tensor whose storage is larger, and keeps the clone until the file closes."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    manager = swapckpt.StateManager(model, optimizer, CONFIG)
    for _ in range(2):  # templates, then real state
        exported = list(tensors_in(manager.state_dict()))
        assert exported
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for _, tensor in exported)
        train(model, optimizer, steps=range(1))


# ------------------------------------------------------------------ layouts


def plain(make: Callable[[list[nn.Parameter]], Optimizer]) -> Callable[[Net], Optimizer]:
    return lambda model: make(list(model.parameters()))


def named(model: Net) -> Optimizer:
    return torch.optim.AdamW(model.named_parameters(), lr=0.01)


def named_groups(model: Net) -> Optimizer:
    weights = [(name, param) for name, param in model.named_parameters() if param.ndim == 2]
    biases = [(name, param) for name, param in model.named_parameters() if param.ndim == 1]
    return torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=0.01)


def groups_with_custom_keys(model: Net) -> Optimizer:
    params = list(model.parameters())
    groups = [
        {"params": params[3:], "lr": 0.02, "name": "late", "milestones": [1, 2]},
        {"params": []},
        {"params": params[:3], "betas": (0.8, 0.99)},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def tensor_lr(model: Net) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))


def frozen(model: Net) -> Optimizer:
    model.blocks[0].requires_grad_(False)
    return torch.optim.AdamW(model.parameters())


LAYOUTS = {name: plain(make) for name, make in OPTIMIZERS.items()} | {
    make.__name__: make for make in (named, named_groups, groups_with_custom_keys, tensor_lr, frozen)
}


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_layout_is_stocks(kind: str, flat: bool) -> None:
    stock_model, model = Net(), Net()
    stock_optimizer, optimizer = LAYOUTS[kind](stock_model), LAYOUTS[kind](model)
    manager = swapckpt.StateManager(model, optimizer, CONFIG, flat=flat)
    train(stock_model, stock_optimizer, steps=range(2), use_spare=lambda _: True)
    train(model, optimizer, steps=range(2), use_spare=lambda _: True)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    expected = get_optimizer_state_dict(stock_model, stock_optimizer, options=options)
    assert expected
    exported = manager.state_dict()
    if flat:  # one mapping: stock's order of keys has no meaning
        exported, expected = dict(sorted(exported.items())), dict(sorted(expected.items()))
    assert_equal_layout(exported, expected)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_unswapped_manager_exports_the_same(flat: bool) -> None:
    exports = []
    for config in (CONFIG, None):
        model = Net()
        optimizer = groups_with_custom_keys(model)
        manager = swapckpt.StateManager(model, optimizer, config, flat=flat)
        train(model, optimizer, steps=range(2))
        exports.append(manager.state_dict())
        assert swapckpt.is_swapped(optimizer) == (config is not None)
    assert_equal_layout(exports[0], exports[1])


# ------------------------------------------------------------------ several optimizers


def muon_and_adamw(model: Net) -> dict[str, Optimizer]:
    rest = [param for param in model.parameters() if param.ndim != 2]
    return {
        "muon": torch.optim.Muon(matrices(model.parameters()), lr=0.02),
        "adamw": torch.optim.AdamW(rest, lr=0.01),
    }


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_several_optimizers_are_one_stock_layout(flat: bool) -> None:
    stock_model, model = Net(), Net()
    stock, ours = muon_and_adamw(stock_model), muon_and_adamw(model)
    manager = swapckpt.StateManager(model, ours, CONFIG, flat=flat)
    for net, optimizers in ((stock_model, stock), (model, ours)):
        for step in range(2):
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            net(torch.full((2, 6), step + 1.0), use_spare=True).square().sum().backward()
            for optimizer in optimizers.values():
                optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    expected = get_optimizer_state_dict(stock_model, tuple(stock.values()), options=options)
    exported = manager.state_dict()
    if flat:
        exported, expected = dict(sorted(exported.items())), dict(sorted(expected.items()))
    assert_equal_layout(exported, expected)


def test_optimizers_that_share_parameters_are_refused_with_both_names() -> None:
    model = Net()
    optimizers = {
        "head": torch.optim.AdamW(model.head.parameters()),
        "all": torch.optim.SGD(model.parameters()),
    }
    with pytest.raises(FqnError) as caught:
        swapckpt.StateManager(model, optimizers, CONFIG)
    lines = str(caught.value).splitlines()
    assert lines[1:] == [
        "  - head.bias: held by optimizers 'head' and 'all'",
        "  - head.weight: held by optimizers 'head' and 'all'",
    ]
    assert not any(swapckpt.is_swapped(optimizer) for optimizer in optimizers.values())


def test_parameters_of_another_model_are_refused_all_at_once() -> None:
    model, other = Net(), Net()
    optimizer = torch.optim.AdamW([{"params": model.parameters()}, {"params": other.head.parameters()}])
    with pytest.raises(FqnError) as caught:
        swapckpt.StateManager(model, optimizer, CONFIG)
    assert str(caught.value).splitlines()[1:] == [
        "  - optimizer 'optimizer', group 1, parameter 0, shape [3, 6]: not a parameter of the model",
        "  - optimizer 'optimizer', group 1, parameter 1, shape [3]: not a parameter of the model",
    ]
    assert not swapckpt.is_swapped(optimizer)


def test_when_one_of_several_cannot_be_adopted_none_is() -> None:
    model = Net()
    optimizers = {
        "fine": torch.optim.AdamW(model.head.parameters()),
        "not": torch.optim.LBFGS(model.blocks.parameters()),
    }
    with pytest.raises(swapckpt.errors.UnsupportedOptimizerError):
        swapckpt.StateManager(model, optimizers, CONFIG)
    assert type(optimizers["fine"]) is torch.optim.AdamW


# ------------------------------------------------------------------ changes after construction


@pytest.mark.parametrize("config", [CONFIG, None])
def test_groups_added_later_are_exported(config: swapckpt.SwapConfig | None) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.blocks.parameters())
    manager = swapckpt.StateManager(model, optimizer, config)
    train(model, optimizer, steps=range(1))
    optimizer.add_param_group({"params": model.head.parameters()})
    train(model, optimizer, steps=range(1, 2))
    state = manager.state_dict()["state"]
    assert isinstance(state, dict)
    assert {name for name in state if name.startswith("head")} == {"head.weight", "head.bias"}
    assert state["head.weight"]["step"] == 1
    assert state["blocks.0.up.weight"]["step"] == 2


@pytest.mark.parametrize("config", [CONFIG, None])
def test_changes_behind_the_optimizers_back_are_exported(config: swapckpt.SwapConfig | None) -> None:
    """A layer that the model got later, put into a group by hand."""
    model = Net()
    optimizer = torch.optim.AdamW(model.blocks.parameters())
    manager = swapckpt.StateManager(model, optimizer, config)
    model.add_module("extra", torch.nn.Linear(2, 2, bias=False))
    optimizer.param_groups[0]["params"].append(model.extra.weight)
    state = manager.state_dict()["state"]
    assert isinstance(state, dict)
    assert state["extra.weight"].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_an_optimizer_may_be_adopted_and_released_under_its_manager() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    manager = swapckpt.StateManager(model, optimizer)
    other = Net()
    other_optimizer = torch.optim.AdamW(other.parameters())
    train(other, other_optimizer, steps=range(1), use_spare=lambda _: True)
    saved = get_optimizer_state_dict(other, other_optimizer)

    swapckpt.swap_optimizer(optimizer, CONFIG)
    manager.load_state_dict(saved)
    mirrors = {tensor.mirror for tensor in swap_of(optimizer).table.tensors()}
    assert {value for values in optimizer.state.values() for value in values.values()} == mirrors

    swapckpt.release(optimizer)
    live = optimizer.state[model.head.weight]["exp_avg"]
    assert live not in mirrors
    state = manager.state_dict()["state"]
    assert isinstance(state, dict)
    assert state["head.weight"]["exp_avg"] is live
    manager.load_state_dict(saved)
    assert optimizer.state[model.head.weight]["exp_avg"] is live


@pytest.mark.parametrize("config", [CONFIG, None])
def test_templates_stay_where_they_are_when_a_group_is_added(config: swapckpt.SwapConfig | None) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.blocks.parameters())
    manager = swapckpt.StateManager(model, optimizer, config)
    before = {path: tensor.data_ptr() for path, tensor in tensors_in(manager.state_dict())}
    optimizer.add_param_group({"params": model.head.parameters()})
    for _ in range(2):
        after = {path: tensor.data_ptr() for path, tensor in tensors_in(manager.state_dict())}
        assert len(after) == len(before) + 6
        assert before.items() <= after.items()
