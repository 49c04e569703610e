"""New parameter objects take the place of old ones: all of them or none, and no value moves."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import swapckpt
from swapckpt._torch import local_of
from swapckpt.errors import FqnError, PhaseError, RebindError
from swapckpt.optimizer import swap_of
from swapckpt.swap import Phase
from tests.core.training import positions
from tests.manager.training import CONFIG, DEFAULT_CONFIG, OPTIMIZERS, Net, assert_same_bits, contents, train

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

    from tests.multirank import RankRunner

Map = dict[torch.Tensor, torch.Tensor]


def renew(
    model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor] = lambda old: old.detach().clone()
) -> Map:
    """Replace every parameter of ``model``, as wrapping it anew would. Returns new -> old."""
    new_to_old: Map = {}
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            new = nn.Parameter(make(old))
            setattr(module, name, new)
            new_to_old[new] = old
    return new_to_old


def build(
    kind: str = "AdamW", config: swapckpt.SwapConfig | None = CONFIG
) -> tuple[Net, Optimizer, swapckpt.StateManager]:
    model = Net()
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    return model, optimizer, swapckpt.StateManager(model, optimizer, config)


def mirrors(optimizer: Optimizer) -> list[int]:
    return [
        local_of(value).data_ptr()
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    ]


@pytest.mark.parametrize(
    ("kind", "config"),
    [("AdamW-fused", CONFIG), ("NAdam", DEFAULT_CONFIG), ("SGD-dampening", None), ("Adafactor", CONFIG)],
    ids=["AdamW", "NAdam-some-swapped", "SGD-unswapped", "Adafactor"],
)
def test_training_goes_on_as_if_nothing_had_happened(kind: str, config: swapckpt.SwapConfig | None) -> None:
    plain = Net()
    plain_optimizer = OPTIMIZERS[kind](list(plain.parameters()))
    train(plain, plain_optimizer, steps=range(5), use_spare=lambda step: step > 2)
    model, optimizer, manager = build(kind, config)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    train(model, optimizer, steps=range(2))
    before, exported = mirrors(optimizer), manager.state_dict()
    host_nbytes = manager.memory().host_nbytes
    manager.rebind(renew(model))
    assert mirrors(optimizer) == before
    assert manager.memory().host_nbytes == host_nbytes
    assert list(manager.state_dict()["state"]) == list(exported["state"])  # type: ignore[call-overload]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    assert positions(params, list(model.parameters())) == list(range(len(params)))
    train(model, optimizer, steps=range(2, 5), use_spare=lambda step: step > 2)
    scheduler.step()
    assert_same_bits(contents(model, optimizer), contents(plain, plain_optimizer))


def test_before_the_first_step_templates_follow() -> None:
    model, optimizer, manager = build()
    exported = manager.state_dict()["state"]
    assert isinstance(exported, dict)
    manager.rebind(renew(model))
    again = manager.state_dict()["state"]
    assert isinstance(again, dict)
    for name, values in exported.items():
        assert values["exp_avg"].data_ptr() == again[name]["exp_avg"].data_ptr()
    assert not optimizer.state
    plain = Net()
    plain_optimizer = OPTIMIZERS["AdamW"](list(plain.parameters()))
    for net, each in ((plain, plain_optimizer), (model, optimizer)):
        train(net, each, steps=range(3))
    assert_same_bits(contents(model, optimizer), contents(plain, plain_optimizer))


def test_batches_and_layout_stay() -> None:
    model, optimizer, manager = build()
    train(model, optimizer, steps=range(2))
    table = swap_of(optimizer).table
    cuts = [[entry.name for entry in batch.params] for batch in table.batches]
    segments = [batch.segments for batch in table.batches]
    manager.rebind(renew(model))
    train(model, optimizer, steps=range(2, 3))
    assert [[entry.name for entry in batch.params] for batch in table.batches] == cuts
    assert [batch.segments for batch in table.batches] == segments
    assert all(entry.param is param for param, entry in table.entries.items())
    assert {tensor.param for batch in table.batches for tensor in batch.tensors} <= set(model.parameters())


def test_old_parameters_are_let_go() -> None:
    model, optimizer, manager = build()
    train(model, optimizer, steps=range(2))
    new_to_old = renew(model)
    references = [weakref.ref(old) for old in new_to_old.values()]
    manager.rebind(new_to_old)
    del new_to_old
    train(model, optimizer, steps=range(2, 3))
    assert [reference() for reference in references] == [None] * len(references)


def test_two_parameters_that_change_places_take_their_state_along() -> None:
    model, optimizer, manager = build("AdamW")
    train(model, optimizer, steps=range(2))
    first, second = model.blocks[0].up, model.blocks[1].up
    before = dict(optimizer.state[first.weight]), dict(optimizer.state[second.weight])
    first.weight, second.weight = second.weight, first.weight
    pair = model.get_parameter("blocks.0.up.weight"), model.get_parameter("blocks.1.up.weight")
    manager.rebind({pair[0]: pair[1], pair[1]: pair[0]})
    assert optimizer.state[first.weight]["exp_avg"] is before[0]["exp_avg"]
    assert optimizer.state[second.weight]["exp_avg"] is before[1]["exp_avg"]
    state = manager.state_dict()["state"]
    assert isinstance(state, dict)
    assert state["blocks.0.up.weight"]["exp_avg"] is before[0]["exp_avg"]


def test_a_model_that_was_wrapped_names_the_parameters_from_then_on() -> None:
    model, optimizer, manager = build()
    train(model, optimizer, steps=range(1))
    wrapped = nn.ModuleDict({"inner": model})
    manager.rebind(renew(model), model=wrapped)
    assert manager.model is wrapped
    state = manager.state_dict()["state"]
    assert isinstance(state, dict)
    assert all(name.startswith("inner.") for name in state)


def test_a_parameter_that_its_group_holds_already() -> None:
    """Some wrappers put the new parameter into the groups themselves, and leave the state under the old."""
    model, optimizer, manager = build()
    train(model, optimizer, steps=range(2))
    new_to_old = renew(model)
    new_of = {old: new for new, old in new_to_old.items()}
    for group in optimizer.param_groups:
        group["params"] = [new_of[param] for param in group["params"]]
    before = mirrors(optimizer)
    manager.rebind(new_to_old)
    assert mirrors(optimizer) == before
    assert set(optimizer.state) <= set(model.parameters())


# ------------------------------------------------------------------ what is refused


def everything(model: nn.Module, optimizer: Optimizer) -> list[Any]:
    return [
        [[*map(id, group["params"])] for group in optimizer.param_groups],
        [(id(param), sorted(values)) for param, values in optimizer.state.items()],
        mirrors(optimizer),
    ]


def test_all_offenders_are_listed_and_nothing_changes_then_a_retry_works() -> None:
    model, optimizer, manager = build()
    train(model, optimizer, steps=range(2))
    before, values = everything(model, optimizer), contents(model, optimizer)
    good = renew(model)
    by_name = dict(model.named_parameters())
    bad = dict(good)
    del bad[by_name["head.bias"]]
    bad[nn.Parameter(torch.zeros(3, 6))] = good[by_name["head.weight"]]
    model.blocks[0].up.weight = nn.Parameter(torch.zeros(6, 12).t())
    bad[model.blocks[0].up.weight] = bad.pop(by_name["blocks.0.up.weight"])
    model.blocks[1].up.bias = nn.Parameter(torch.zeros(12, dtype=torch.bfloat16))
    bad[model.blocks[1].up.bias] = bad.pop(by_name["blocks.1.up.bias"])
    model.spare.weight = nn.Parameter(torch.zeros(5, 6))
    bad[model.spare.weight] = bad.pop(by_name["spare.weight"])
    bad[by_name["spare.bias"]] = nn.Parameter(torch.zeros(6))
    with pytest.raises(RebindError) as caught:
        manager.rebind(bad)
    assert [line.strip("- ") for line in str(caught.value).splitlines()[1:]] == [
        "a parameter of shape [3, 6]: 2 new parameters claim the place of head.weight",
        "a parameter of shape [3, 6]: the new parameter is not in the model",
        "blocks.0.up.weight: expected [12, 6] float32, found [12, 6] float32 with strides (1, 12)",
        "blocks.1.up.bias: expected [12] float32, found [12] bfloat16",
        "head.bias: no longer in the model, and not in the map",
        "head.weight: 2 new parameters claim the place of head.weight",
        "spare.bias: no longer in the model, and not in the map",
        "spare.bias: no optimizer holds the old parameter",
        "spare.weight: expected [6, 6] float32, found [5, 6] float32",
    ]
    assert everything(model, optimizer) == before
    for module, name, key in (
        (model.blocks[0].up, "weight", "blocks.0.up.weight"),
        (model.blocks[1].up, "bias", "blocks.1.up.bias"),
        (model.spare, "weight", "spare.weight"),
    ):
        setattr(module, name, by_name[key])
    manager.rebind(good)
    assert_same_bits(contents(model, optimizer), values)


def test_nothing_is_exported_while_replaced_parameters_are_not_rebound() -> None:
    model, _, manager = build()
    new_to_old = renew(model)
    with pytest.raises(FqnError, match="not a parameter of the model"):
        manager.state_dict()
    manager.rebind(new_to_old)
    assert manager.state_dict()["state"]


def test_state_of_the_new_parameter_is_not_thrown_away() -> None:
    model, optimizer, manager = build()
    train(model, optimizer, steps=range(2))
    old = model.head.bias
    model.head.bias = nn.Parameter(torch.zeros(3))
    optimizer.state[model.head.bias] = {"step": torch.tensor(5.0)}
    with pytest.raises(
        RebindError, match=r"head.bias: the new parameter has state or a batch of its own already"
    ):
        manager.rebind({model.head.bias: old})


def test_a_parameter_cannot_take_two_places() -> None:
    """Tied by the new wrapper: one object in the places of two."""
    model, optimizer, manager = build(config=None)
    kept, lost = model.blocks[0].up.weight, model.blocks[1].up.weight
    model.blocks[1].up.weight = kept
    before = everything(model, optimizer)
    with pytest.raises(RebindError, match=r"blocks.0.up.weight: would be held 2 times"):
        manager.rebind({kept: lost})  # type: ignore[dict-item]
    assert everything(model, optimizer) == before


def test_not_within_a_step() -> None:
    model, optimizer, manager = build()
    swap = swap_of(optimizer)
    original = swap.original_step
    seen = []

    def step(*args: object) -> object:
        with pytest.raises(PhaseError, match="Cannot rebind parameters while the optimizer is stepping"):
            manager.rebind({})
        seen.append(swap.phase)
        return original(*args)

    swap.original_step = step  # type: ignore[assignment]
    train(model, optimizer, steps=range(1))
    assert Phase.STEPPING in seen


def test_several_optimizers_at_once_or_none() -> None:
    model = Net()
    matrices = [param for param in model.parameters() if param.dim() == 2]
    vectors = [param for param in model.parameters() if param.dim() == 1]
    optimizers = {"a": torch.optim.SGD(matrices, momentum=0.9), "b": torch.optim.AdamW(vectors)}
    manager = swapckpt.StateManager(model, optimizers, CONFIG)
    for each in optimizers.values():
        train(model, each, steps=range(2))
    before = [everything(model, each) for each in optimizers.values()]
    new_to_old = renew(model)
    lost = model.head.bias
    with pytest.raises(RebindError, match=r"head.bias: no longer in the model"):
        manager.rebind({new: old for new, old in new_to_old.items() if new is not lost})
    assert [everything(model, each) for each in optimizers.values()] == before
    manager.rebind(new_to_old)
    assert {*optimizers["a"].state, *optimizers["b"].state} <= set(model.parameters())


# ------------------------------------------------------------------ sharded


def rebind_sharded() -> str:
    """Two ranks train and replace all parameters half way. Returns the error about another placement."""

    def shard(net: Net) -> Net:
        return fully_shard(net, mesh=init_device_mesh("cpu", (2,)))  # type: ignore[return-value]

    plain, model = shard(Net()), shard(Net())
    plain_optimizer = OPTIMIZERS["AdamW"](list(plain.parameters()))
    optimizer = OPTIMIZERS["AdamW"](list(model.parameters()))
    manager = swapckpt.StateManager(model, optimizer, CONFIG)
    for net, each in ((plain, plain_optimizer), (model, optimizer)):
        train(net, each, steps=range(2))
    values = {name: full(param) for name, param in model.named_parameters()}
    fresh = shard(Net())  # "re-wrapped": another FSDP module with parameters of its own
    with torch.no_grad():
        for name, param in fresh.named_parameters():
            assert isinstance(param, DTensor)
            param.copy_(_like(param, values[name]))
    old = dict(model.named_parameters())
    wrong = {param: old[name] for name, param in fresh.named_parameters()}
    other = nn.Module()
    replicated = distribute_tensor(full(old["head.weight"]), init_device_mesh("cpu", (2,)), [Replicate()])
    other.weight = nn.Parameter(replicated)
    wrong[other.weight] = wrong.pop(fresh.head.weight)
    with pytest.raises(RebindError) as caught:
        manager.rebind(wrong, model=nn.ModuleList([fresh, other]))
    manager.rebind({param: old[name] for name, param in fresh.named_parameters()}, model=fresh)
    for net, each in ((plain, plain_optimizer), (fresh, optimizer)):
        train(net, each, steps=range(2, 4))
    assert_same_bits(contents(fresh, optimizer), contents(plain, plain_optimizer))
    return str(caught.value)


def full(param: torch.Tensor) -> torch.Tensor:
    assert isinstance(param, DTensor)
    return param.full_tensor().detach()


def _like(param: DTensor, full: torch.Tensor) -> torch.Tensor:
    return distribute_tensor(full, param.device_mesh, param.placements)


def test_sharded_parameters_keep_their_placement(run_ranks: RankRunner) -> None:
    for message in run_ranks(2, rebind_sharded):
        assert (
            "1.weight: expected [3, 6] placed (Shard(dim=0),), found [3, 6] placed (Replicate(),)" in message
        )
