"""Names are those of the plain module, whatever wraps it, and a tied parameter is saved once."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import swapckpt
from swapckpt.fqn import named_parameters
from tests.manager.training import CONFIG, Net, assert_same_bits, contents, train

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*:DeprecationWarning")  # torch.compile imports it


def plain(model: nn.Module) -> nn.Module:
    return model


def compiled(model: nn.Module) -> nn.Module:
    return cast("nn.Module", torch.compile(model))


def compiled_blocks(model: Net) -> nn.Module:
    model.blocks[1] = compiled(model.blocks[1])
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    return model


def checkpointed_and_compiled(model: nn.Module) -> nn.Module:
    return compiled(checkpointed(model))


def data_parallel(model: nn.Module) -> nn.Module:
    return nn.DataParallel(model)


WRAPPERS = [plain, compiled, compiled_blocks, checkpointed, checkpointed_and_compiled, data_parallel]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_names_are_clean(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = Net()
    names = [name for name, _ in model.named_parameters()]
    wrapped = wrap(model)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    exported = swapckpt.StateManager(wrapped, optimizer, CONFIG).state_dict()
    assert list(exported["state"]) == names
    assert exported["param_groups"][0]["params"] == names


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapped_run_resumes_a_plain_one(tmp_path: Path, wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    manager = swapckpt.StateManager(model, optimizer, CONFIG)
    train(model, optimizer, steps=range(2))
    dcp.save({"optimizer": manager}, checkpoint_id=tmp_path)

    other = Net()
    params = dict(other.named_parameters())
    wrapped = wrap(other)
    other_optimizer = torch.optim.AdamW(wrapped.parameters())
    dcp.load({"optimizer": swapckpt.StateManager(wrapped, other_optimizer, CONFIG)}, checkpoint_id=tmp_path)
    for name, param in params.items():
        expected = optimizer.state.get(model.get_parameter(name), {})
        assert_same_bits(other_optimizer.state.get(param, {}), expected)


def test_a_users_own_module_attribute_is_not_taken_for_a_wrapper() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2, bias=False)

    model = Pair()
    assert list(named_parameters(model).values()) == [("module.weight",)]
    nested = nn.DataParallel(model)
    assert list(named_parameters(nested).values()) == [("module.weight",)]


# ------------------------------------------------------------------ tied parameters


class Tied(nn.Module):
    """Input and output embedding share one matrix; a layer is registered twice."""

    def __init__(self, *, reverse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        embedding, layer = nn.Embedding(7, 4), nn.Linear(4, 4)
        head = nn.Linear(4, 7, bias=False)
        head.weight = embedding.weight
        children = {"embedding": embedding, "first": layer, "second": layer, "head": head}
        for name in reversed(children) if reverse else children:
            self.add_module(name, children[name])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(torch.tanh(self.first(self.embedding(tokens)))))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: range) -> None:
    for step in count:
        optimizer.zero_grad()
        model(torch.arange(7).roll(step)).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()


def test_every_name_of_a_tied_parameter_is_known() -> None:
    model = Tied()
    model.embedding.again = model.embedding.weight  # twice in one module
    assert list(named_parameters(model).values()) == [
        ("embedding.weight", "embedding.again", "head.weight"),
        ("first.weight", "second.weight"),
        ("first.bias", "second.bias"),
    ]


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_tied_parameters_are_saved_once(flat: bool) -> None:
    model = Tied()
    manager = swapckpt.StateManager(model, torch.optim.AdamW(model.parameters()), CONFIG, flat=flat)
    exported: dict[str, Any] = manager.state_dict()
    state = exported if flat else exported["state"]
    names = (
        {key.removeprefix("state.").rpartition(".")[0] for key in state if key.startswith("state.")}
        if flat
        else set(state)
    )
    assert names == {"embedding.weight", "first.weight", "first.bias"}


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_tied_parameters_load_under_any_alias(flat: bool) -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    manager = swapckpt.StateManager(model, optimizer, CONFIG, flat=flat)
    steps(model, optimizer, range(2))
    saved, parameters = manager.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    aliases = {
        "embedding.weight": "head.weight",
        "first.weight": "second.weight",
        "first.bias": "second.bias",
    }

    def renamed(value: object) -> object:
        if isinstance(value, str):
            for name, alias in aliases.items():
                value = value.replace(name, alias)
        elif isinstance(value, dict):
            value = {renamed(key): renamed(inner) for key, inner in value.items()}
        elif isinstance(value, list):
            value = [renamed(inner) for inner in value]
        return value

    other = Tied()
    other_optimizer = torch.optim.AdamW(other.parameters())
    other.load_state_dict(parameters)
    swapckpt.StateManager(other, other_optimizer, CONFIG).load_state_dict(renamed(saved))
    steps(model, optimizer, range(2, 4))
    steps(other, other_optimizer, range(2, 4))
    assert_same_bits(contents(other, other_optimizer), contents(model, optimizer))


def test_tied_parameters_travel_between_models_that_register_them_in_another_order() -> None:
    model, other = Tied(), Tied(reverse=True)
    other.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    manager = swapckpt.StateManager(model, optimizer, CONFIG)
    steps(model, optimizer, range(2))
    other.load_state_dict(model.state_dict())
    other_optimizer = torch.optim.AdamW(other.parameters())
    target = swapckpt.StateManager(other, other_optimizer, CONFIG)
    assert "head.weight" in target.state_dict()["state"]
    target.load_state_dict(manager.state_dict())
    steps(model, optimizer, range(2, 4))
    steps(other, other_optimizer, range(2, 4))
    # Whole contents cannot be compared: named_parameters() names them by the order of registration.
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)


def test_tied_parameters_between_stock_and_swapped() -> None:
    model, other = Tied(), Tied()
    optimizer, other_optimizer = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
    manager = swapckpt.StateManager(model, optimizer, CONFIG)
    steps(model, optimizer, range(2))
    other.load_state_dict(model.state_dict())
    stock = get_optimizer_state_dict(model, optimizer)
    exported: dict[str, Any] = manager.state_dict()
    assert stock["state"].keys() == exported["state"].keys()
    # A copy, for torch would keep the very tensors it is given.
    set_optimizer_state_dict(other, other_optimizer, copy.deepcopy(exported))
    steps(model, optimizer, range(2, 4))
    steps(other, other_optimizer, range(2, 4))
    assert_same_bits(contents(other, other_optimizer), contents(model, optimizer))
