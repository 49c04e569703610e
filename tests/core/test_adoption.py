"""In-place adoption: the same object afterwards, whatever code that knows nothing of it does."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import subprocess
import sys
import warnings
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn, optim

import swapckpt
from swapckpt import SwapConfig
from swapckpt.device import CpuDevice
from swapckpt.errors import (
    AdoptionError,
    ConfigError,
    PhaseError,
    SchemaError,
    StepError,
    UnsupportedOptimizerError,
)
from swapckpt.optimizer import Phase, SwapMixin, swap_of
from swapckpt.plan import Region, TensorSpec, lay_out
from tests.core.optimizers import Accumulating, Aliasing, Averaging, Replacing
from tests.core.training import Recipe, Twins, bits, gradient, same_bits, shifting

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer

ADAMW = Recipe(cls=optim.AdamW, options={"foreach": False})
LARGE = (40, 50)


def parameters(count: int = 2, **kwargs: Any) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(LARGE, **kwargs)) for _ in range(count)]


# ------------------------------------------------------------------------------------------ the same object


def test_adoption_returns_the_same_object_of_the_same_class_family() -> None:
    params, optimizer = ADAMW.build()
    groups, state, defaults = optimizer.param_groups, optimizer.state, optimizer.defaults
    adopted = swapckpt.swap_optimizer(optimizer)
    assert adopted is optimizer
    assert isinstance(adopted, optim.AdamW)
    assert isinstance(adopted, SwapMixin)
    assert type(adopted).__name__ == "SwapAdamW"
    assert type(adopted).__module__ == optim.AdamW.__module__
    assert (adopted.param_groups, adopted.state, adopted.defaults) == (groups, state, defaults)
    assert adopted.param_groups is groups
    assert swapckpt.is_swapped(adopted)
    other = swapckpt.swap_optimizer(optim.AdamW(parameters()))
    assert type(other) is type(adopted)
    assert repr(optim.AdamW(params)).startswith("AdamW (")
    assert repr(adopted).startswith("SwapAdamW (")


def test_adopting_twice_is_refused_and_changes_nothing() -> None:
    twins = Twins(ADAMW)
    twins.step()
    with pytest.raises(AdoptionError, match=r"SwapAdamW is adopted already\. Call swapckpt\.release"):
        swapckpt.swap_optimizer(twins.swapped)
    twins.step()
    twins.check()


def test_the_class_of_others_keeps_its_own_step() -> None:
    before = inspect.unwrap(optim.AdamW.step)
    Twins(ADAMW).step()
    plain = optim.AdamW(parameters())
    assert type(plain) is optim.AdamW
    assert inspect.unwrap(optim.AdamW.step) is before


@pytest.mark.parametrize("scheduled", ["no", "before", "between"])
def test_release_gives_back_the_plain_optimizer(scheduled: str) -> None:
    twins = Twins(ADAMW, SwapConfig(swap_times=3))
    swapckpt.release(twins.swapped)
    schedule = (
        [optim.lr_scheduler.LinearLR(each) for each in (twins.plain, twins.swapped)]
        if scheduled == "before"
        else []
    )
    swapckpt.swap_optimizer(twins.swapped, SwapConfig(swap_times=3), device=twins.device)
    twins.step(2)
    if scheduled == "between":
        schedule = [optim.lr_scheduler.LinearLR(each) for each in (twins.plain, twins.swapped)]
    mirrors = {tensor.host.data_ptr() for tensor in twins.swap.table.tensors()}
    assert swapckpt.release(twins.swapped) is twins.swapped
    assert type(twins.swapped) is optim.AdamW
    assert not swapckpt.is_swapped(twins.swapped)
    assert not {name for name in vars(twins.swapped) if "swap" in name}
    for name, value in vars(twins.swapped).items():
        assert "hooks" not in name or not value, name
    values = [value for state in twins.swapped.state.values() for value in state.values()]
    assert not mirrors & {value.data_ptr() for value in values}
    twins.check()
    loads = twins.device.ledger.num_loads
    twins.step(2)
    twins.check()
    assert twins.device.ledger.num_loads == loads
    assert twins.device.ledger.host_nbytes == 0
    swapckpt.swap_optimizer(twins.swapped, SwapConfig(swap_times=2, packed=False))
    for scheduler in schedule:
        scheduler.step()
    twins.step(2)
    twins.check()


def test_release_of_a_plain_optimizer_is_an_error() -> None:
    with pytest.raises(AdoptionError, match="This AdamW is not swapped"):
        swapckpt.release(optim.AdamW(parameters()))


def test_a_scheduler_that_wrapped_the_step_before_adoption_does_not_bypass_it() -> None:
    twins = Twins(ADAMW, SwapConfig(swap_times=3))
    swapckpt.release(twins.swapped)
    optim.lr_scheduler.ConstantLR(twins.swapped, factor=1.0)
    optim.lr_scheduler.ConstantLR(twins.plain, factor=1.0)
    swapckpt.swap_optimizer(twins.swapped, device=twins.device)
    twins.step(2)
    twins.check()
    assert twins.device.ledger.num_loads > 0


# ------------------------------------------------------------------------------------------------- refusals


def wrapped_step(optimizer: Optimizer) -> Optimizer:
    optimizer.step = functools.partial(optimizer.step)  # type: ignore[method-assign, assignment]
    return optimizer


def duplicated() -> Optimizer:
    params = parameters(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch itself only warns
        return optim.SGD([params[0], params[0]], lr=0.1)


class MyLBFGS(optim.LBFGS):
    """A subclass must not slip through."""


REFUSED: dict[str, tuple[Callable[[], Optimizer], type[Exception], str]] = {
    "lbfgs": (
        lambda: optim.LBFGS(parameters()),
        UnsupportedOptimizerError,
        "LBFGS cannot be swapped: .*line search",
    ),
    "lbfgs-subclass": (lambda: MyLBFGS(parameters()), UnsupportedOptimizerError, "MyLBFGS cannot be swapped"),
    "sparse-adam": (
        lambda: optim.SparseAdam(parameters()),
        UnsupportedOptimizerError,
        "SparseAdam .*sparse gradients",
    ),
    "differentiable": (
        lambda: optim.AdamW(parameters(), differentiable=True),
        UnsupportedOptimizerError,
        r"differentiable=True \(group 0\)",
    ),
    "capturable": (
        lambda: optim.AdamW([{"params": parameters()}, {"params": parameters(), "capturable": True}]),
        UnsupportedOptimizerError,
        r"capturable=True \(group 1\)",
    ),
    "meta": (lambda: optim.AdamW(parameters(device="meta")), AdoptionError, "on the meta device"),
    "several-devices": (
        lambda: optim.AdamW([*parameters(), *parameters(device="meta")]),
        AdoptionError,
        r"on \['cpu', 'meta'\]",
    ),
    "duplicates": (duplicated, AdoptionError, "more than once"),
    "wrapped-step": (
        lambda: wrapped_step(optim.AdamW(parameters())),
        AdoptionError,
        "replaced on this instance",
    ),
    "unknown-state-key": (lambda: optim.AdamW(parameters()), ConfigError, r"\['exp_avgs', 'sum'\]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_swapped_is_refused_by_name_and_reason(case: str) -> None:
    make, error, message = REFUSED[case]
    optimizer = make()
    attributes, cls = dict(vars(optimizer)), type(optimizer)
    keys = ("sum", "exp_avg", "exp_avgs") if case == "unknown-state-key" else None
    with pytest.raises(error, match=message):
        swapckpt.swap_optimizer(optimizer, SwapConfig(state_keys=keys))
    assert type(optimizer) is cls
    assert vars(optimizer) == attributes
    assert not optimizer.state


def test_an_unknown_state_key_is_refused_with_the_keys_there_are() -> None:
    optimizer = optim.AdamW(parameters())
    with pytest.raises(ConfigError, match=r"It creates \['exp_avg', 'exp_avg_sq', 'step'\]"):
        swapckpt.swap_optimizer(optimizer, SwapConfig(state_keys=("max_exp_avg_sq",)))
    swapckpt.swap_optimizer(
        optim.AdamW(parameters(), amsgrad=True), SwapConfig(state_keys=("max_exp_avg_sq",))
    )


@pytest.mark.parametrize("steps_before", [0, 2])
def test_state_keys_choose_what_is_swapped(steps_before: int) -> None:
    twins = Twins(ADAMW, SwapConfig(state_keys=("exp_avg",)), steps_before=steps_before)
    twins.step(2)
    twins.check()
    assert {tensor.id.key for tensor in twins.swap.table.tensors()} == {"exp_avg"}


@pytest.mark.parametrize(("min_numel", "swapped"), [(0, 14), (8, 10), (2000, 8), (2001, 4), (10**9, 0)])
def test_min_numel_chooses_what_is_swapped(min_numel: int, swapped: int) -> None:
    twins = Twins(ADAMW, SwapConfig(min_numel=min_numel, state_keys=("exp_avg", "exp_avg_sq")))
    twins.step(2)
    twins.check()
    assert len(list(twins.swap.table.tensors())) == swapped


# -------------------------------------------------------------------------------------- optimizers of a user


@pytest.mark.parametrize("policy", ["inline", "lazy", "random"])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("cls", [Averaging, Replacing])
def test_an_optimizer_of_a_user(cls: type[Optimizer], steps_before: int, policy: str) -> None:
    twins = Twins(
        Recipe(cls=cls),
        SwapConfig(swap_times=4),
        CpuDevice(policy),
        steps_before=steps_before,
        active=shifting,
    )
    for _ in range(7):
        twins.step()
        twins.check()
        assert twins.device.ledger.device_nbytes == 0


def test_state_that_changes_its_form_leaves_no_mirrors_behind() -> None:
    twins = Twins(Recipe(cls=Replacing), SwapConfig(swap_times=4))
    held = []
    for _ in range(3):
        twins.step(6)  # after which it starts over
        batches = twins.swap.table.batches
        held.append([(len(batch.segments), len(batch.tensors), batch.staged_nbytes) for batch in batches])
    assert held[1] == held[2]
    twins.check()


@pytest.mark.parametrize("policy", ["inline", "lazy", "random"])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_state_that_shares_memory_stays_where_it_is(steps_before: int, policy: str) -> None:
    """A mirror for each name would part them: what is written through one would not show in the other."""
    twins = Twins(
        Recipe(cls=Aliasing),
        SwapConfig(swap_times=4),
        CpuDevice(policy),
        steps_before=steps_before,
        active=shifting,
    )
    twins.step(6)
    twins.check()
    swapped = {tensor.id.key for tensor in twins.swap.table.tensors()}
    assert "largest" in swapped
    assert not swapped & {"average", "flat", "weight"}
    for param, state in twins.swapped.state.items():
        assert state["flat"].data_ptr() == state["average"].data_ptr()
        assert state["weight"].data_ptr() == param.data_ptr()


def test_group_counters_advance_once_a_step_in_groups_without_parameters_too() -> None:
    recipe = Recipe(cls=Averaging, groups=((0, 1, 2, 3, 4, 5, 6), ()))
    twins = Twins(recipe, SwapConfig(swap_times=4), active=lambda step, _: step != 1)
    twins.step(3)
    twins.check()
    assert [group["count"] for group in twins.swapped.param_groups] == [3, 3]


def test_what_accumulates_over_parameters_is_refused_in_the_step_that_shows_it() -> None:
    twins = Twins(Recipe(cls=Accumulating), SwapConfig(swap_times=4))
    twins.set_gradients()
    with pytest.raises(StepError, match=r"Accumulating advances group fields \['total'\]") as caught:
        twins.swapped.step()
    assert isinstance(caught.value.__cause__, UnsupportedOptimizerError)
    assert twins.swap.phase is Phase.FAILED


def test_what_accumulates_over_parameters_can_be_swapped_in_one_batch() -> None:
    twins = Twins(Recipe(cls=Accumulating, groups=((0, 1, 2, 3, 4, 5, 6),)), SwapConfig(swap_times=1))
    twins.step(3)
    twins.check()


class Clipping(optim.AdamW):
    """Does something of its own and leaves the rest to torch, whose step is wrapped for hooks as well."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.clamp_(-0.5, 0.5)
        return super().step(closure)


def test_hooks_fire_once_where_a_step_calls_the_step_of_its_base() -> None:
    optim.AdamW(parameters())  # from now on torch's own step fires the hooks, too
    twins = Twins(Recipe(cls=Clipping), SwapConfig(swap_times=4))
    calls: list[str] = []
    twins.swapped.register_step_pre_hook(lambda *_: calls.append("pre"))
    twins.swapped.register_step_post_hook(lambda *_: calls.append("post"))
    twins.step()
    assert calls == ["pre", "post"]
    twins.step()
    assert calls == ["pre", "post"] * 2
    twins.check()


# ----------------------------------------------------------------------------------- unaware code, afterwards


def test_settings_changed_between_steps_are_obeyed() -> None:
    twins = Twins(
        Recipe(cls=optim.AdamW, options={"lr": torch.tensor(0.01), "foreach": False}),
        SwapConfig(swap_times=3),
    )
    for step in range(4):
        for optimizer in (twins.plain, twins.swapped):
            optimizer.param_groups[0]["lr"].fill_(0.1 / (1 + step))
            optimizer.param_groups[1]["lr"] = torch.tensor(0.5)
            optimizer.param_groups[1]["betas"] = (0.5, 0.9)
            optimizer.param_groups[0]["amsgrad"] = step >= 2
            optimizer.param_groups[0]["note"] = "mine"
        if step < 2:
            twins.step()
            twins.check()


def test_a_state_key_that_appears_later_is_swapped_from_then_on() -> None:
    twins = Twins(Recipe(cls=optim.SGD), SwapConfig(swap_times=3), CpuDevice("lazy"))
    twins.step(2)
    assert twins.swap.table.swapped_nbytes == 0
    for optimizer in (twins.plain, twins.swapped):
        for group in optimizer.param_groups:
            group["momentum"] = 0.9
    twins.step(3)
    twins.check()
    assert twins.swap.table.swapped_nbytes > 0
    assert twins.device.ledger.device_nbytes == 0


def edit_in_place(optimizer: Optimizer, param: Tensor) -> None:
    optimizer.state[param]["exp_avg"].mul_(0.25)


def assign(optimizer: Optimizer, param: Tensor) -> None:
    optimizer.state[param]["exp_avg"] = torch.full_like(param, 0.125)


def assign_a_dict(optimizer: Optimizer, param: Tensor) -> None:
    optimizer.state[param] = {key: value.clone() * 0.5 for key, value in optimizer.state[param].items()}


def forget_one(optimizer: Optimizer, param: Tensor) -> None:
    del optimizer.state[param]


def forget_by_empty_dict(optimizer: Optimizer, param: Tensor) -> None:
    optimizer.state[param] = {}


def forget_all(optimizer: Optimizer, param: Tensor) -> None:
    del param
    optimizer.state.clear()


def start_over(optimizer: Optimizer, param: Tensor) -> None:
    del param
    optimizer.state = defaultdict(dict)


def set_state(optimizer: Optimizer, param: Tensor) -> None:
    other = copy.deepcopy(dict(optimizer.state[param]))
    other["exp_avg_sq"].add_(1.0)
    optimizer.__setstate__(
        {"state": defaultdict(dict, {param: other}), "param_groups": optimizer.param_groups}
    )


@pytest.mark.parametrize("policy", ["thread", "lazy"])
@pytest.mark.parametrize(
    "edit",
    [
        edit_in_place,
        assign,
        assign_a_dict,
        forget_one,
        forget_by_empty_dict,
        forget_all,
        start_over,
        set_state,
    ],
)
def test_state_changed_from_outside_is_what_the_next_step_uses(
    edit: Callable[[Optimizer, Tensor], None], policy: str
) -> None:
    twins = Twins(ADAMW, SwapConfig(swap_times=3), CpuDevice(policy))
    twins.step(2)
    for _ in range(3):
        edit(twins.plain, twins.plain_params[2])
        edit(twins.swapped, twins.params[2])
        twins.check()
        twins.step(2)
        twins.check()
        assert twins.device.ledger.device_nbytes == 0
    assert twins.device.ledger.host_nbytes == 1 << 20  # the mirrors are used again
    for edited in (twins.plain_params[2], twins.plain), (twins.params[2], twins.swapped):
        edit(edited[1], edited[0])
    swapckpt.release(twins.swapped)
    twins.check()


def test_a_parameter_replaced_together_with_its_state() -> None:
    """What Gaussian splatting does when it adds and removes points."""
    twins = Twins(ADAMW, SwapConfig(swap_times=3), CpuDevice("lazy"))
    twins.step(2)
    known = len(twins.swap.table.entries)
    for _ in range(3):
        for params, optimizer in ((twins.plain_params, twins.plain), (twins.params, twins.swapped)):
            old = params[2]
            state = optimizer.state.pop(old)
            params[2] = nn.Parameter(torch.cat([old.detach(), old.detach()[:3]]))
            optimizer.param_groups[0]["params"][2] = params[2]
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.cat([state[key], torch.zeros_like(state[key][:3])])
            optimizer.state[params[2]] = state
        twins.step(2)
        twins.check()
    assert len(twins.swap.table.entries) == known
    assert len(twins.swap.table.entries[twins.params[2]].tensors) == 2


def test_load_state_dict_of_torch_writes_into_the_mirrors() -> None:
    twins = Twins(ADAMW, SwapConfig(swap_times=3))
    twins.step(2)
    saved = copy.deepcopy((twins.plain.state_dict(), twins.swapped.state_dict()))
    twins.step(2)
    mirrors = [tensor.host.data_ptr() for tensor in twins.swap.table.tensors()]
    ledger = twins.device.ledger
    traffic = (ledger.num_loads, ledger.num_offloads, ledger.host_nbytes)
    ledger.reset_peak()
    fired: list[str] = []
    twins.swapped.register_step_pre_hook(lambda *_: fired.append("step"))
    for optimizer, state in zip((twins.plain, twins.swapped), saved, strict=True):
        optimizer.load_state_dict(state)
    twins.check()
    assert [tensor.host.data_ptr() for tensor in twins.swap.table.tensors()] == mirrors
    assert (ledger.num_loads, ledger.num_offloads, ledger.host_nbytes) == traffic
    assert (ledger.device_peak_nbytes, fired) == (0, [])
    twins.step(2)
    twins.check()


def test_load_state_dict_of_torch_refuses_what_does_not_fit_and_changes_nothing() -> None:
    twins = Twins(ADAMW)
    twins.step(2)
    saved = copy.deepcopy(twins.swapped.state_dict())
    saved["state"][0]["exp_avg"] = torch.zeros(3)
    saved["state"][5]["exp_avg_sq"] = saved["state"][5]["exp_avg_sq"].double()
    with pytest.raises(
        SchemaError, match=r"(?s)2 problems.*param0.exp_avg: .*\[3\].*param1.exp_avg_sq: .*float64"
    ):
        twins.swapped.load_state_dict(saved)
    twins.check()
    twins.step()
    twins.check()


def test_a_whole_optimizer_goes_through_torch_save() -> None:
    twins = Twins(ADAMW, SwapConfig(swap_times=3))
    twins.step(2)
    file = io.BytesIO()
    torch.save((twins.params, twins.swapped), file)
    file.seek(0)
    params, optimizer = torch.load(file, weights_only=False)
    assert swapckpt.is_swapped(optimizer)
    for param, other in zip(params, twins.params, strict=True):
        assert same_bits(param, other)
        for key, value in twins.swapped.state[other].items():
            assert same_bits(optimizer.state[param][key], value)


def test_names_of_named_parameters_appear_in_messages() -> None:
    model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 40))
    optimizer = swapckpt.swap_optimizer(optim.AdamW(model.named_parameters()), SwapConfig(swap_times=2))
    names = [str(tensor.param) for tensor in (entry.id for entry in swap_of(optimizer).table.tensors())]
    assert names == []
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    names = [str(tensor.id) for tensor in swap_of(optimizer).table.tensors()]
    assert names == ["0.weight.exp_avg", "0.weight.exp_avg_sq", "1.weight.exp_avg", "1.weight.exp_avg_sq"]


def test_a_step_inside_a_step_is_refused() -> None:
    class Recursive(optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            if swapckpt.is_swapped(self):
                SwapMixin.step(self)  # type: ignore[arg-type]
            return super().step(closure)

    params, optimizer = Recipe(cls=Recursive).build()
    swapckpt.swap_optimizer(optimizer)
    params[0].grad = gradient(params[0], step=0, index=0)
    with pytest.raises(StepError) as caught:
        optimizer.step()
    assert isinstance(caught.value.__cause__, PhaseError)


def test_reading_state_in_a_post_hook_sees_mirrors() -> None:
    twins = Twins(ADAMW, SwapConfig(swap_times=3), CpuDevice("lazy"))
    seen: list[list[bytes]] = []

    def read(optimizer: Optimizer, *_: object) -> None:
        seen.append([bits(value) for state in optimizer.state.values() for value in state.values()])

    twins.plain.register_step_post_hook(read)
    twins.swapped.register_step_post_hook(read)
    twins.step(2)
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]


FORK = """
import os, torch, swapckpt
from swapckpt.errors import PhaseError

def train(optimizer, params):
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()

def in_a_child(run):
    child = os.fork()
    if child == 0:
        run()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

params = [torch.nn.Parameter(torch.ones(40, 50)) for _ in range(3)]
optimizer = swapckpt.swap_optimizer(torch.optim.AdamW(params))

def fresh():
    train(optimizer, params)
    train(optimizer, params)

in_a_child(fresh)
assert not optimizer.state
train(optimizer, params)
before = [value.clone() for state in optimizer.state.values() for value in state.values()]

def refused():
    saved = optimizer.state_dict()
    for call in (lambda: train(optimizer, params), lambda: optimizer.load_state_dict(saved)):
        try:
            call()
        except PhaseError as error:
            assert "in a forked process" in str(error)
        else:
            raise AssertionError
    swapckpt.swap_optimizer(swapckpt.release(optimizer))
    for _ in range(3):
        train(optimizer, params)
    assert all(float(state["step"]) == 4 for state in optimizer.state.values())

in_a_child(refused)
after = [value for state in optimizer.state.values() for value in state.values()]
assert all(map(torch.equal, before, after))
train(optimizer, params)
print("done")
"""


def test_a_forked_child_does_not_write_into_the_mirrors_of_its_parent() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


@pytest.mark.parametrize("default", ["meta", "cpu"])
def test_the_default_device_of_torch_does_not_matter(default: str) -> None:
    """Scripts set it to their accelerator; buffers, mirrors and stand-ins are where they have to be."""
    twins = Twins(ADAMW, SwapConfig(swap_times=3))
    manager = swapckpt.StateManager(nn.ParameterList(twins.params), twins.swapped)
    with torch.device(default):
        assert manager.state_dict()["state"]
        twins.swapped.step()  # without gradients
    twins.set_gradients()
    twins.plain.step()
    with torch.device(default):
        assert torch.empty(1).device.type == default
        swapckpt.release(twins.swapped)
        swapckpt.swap_optimizer(twins.swapped, SwapConfig(swap_times=3))
    twins.swapped.step()
    twins.set_gradients()
    twins.plain.step()
    with torch.device(default):
        swap = swap_of(twins.swapped)
        buffer = swap.device.allocate(64)
        assert buffer.device.type == "cpu"
        swap.device.release(buffer)
        assert swap.device.pinned_empty(8).device.type == "cpu"
        assert swap.arena.allocate(lay_out([64, 0])).mirror(Region(0, 0), EMPTY).device.type == "cpu"
    twins.swapped.step()
    twins.check()


EMPTY = TensorSpec((0, 3), (3, 1), torch.float32)


def test_a_group_on_another_device_is_not_added() -> None:
    twins = Twins(ADAMW, SwapConfig(swap_times=3))
    twins.step()
    with pytest.raises(AdoptionError, match=r"new parameters are on \['meta'\], the optimizer's are on cpu"):
        twins.swapped.add_param_group({"params": parameters(device="meta")})
    twins.step()
    twins.check()


@pytest.mark.parametrize("prepend", [False, True])
@pytest.mark.parametrize("adopted_first", [False, True])
def test_hooks_of_a_load_see_the_whole_state(adopted_first: bool, prepend: bool) -> None:
    twins = Twins(ADAMW, SwapConfig(swap_times=3))
    twins.step(2)
    saved = copy.deepcopy(twins.swapped.state_dict())
    saved["state"] = {
        index: {("first_moment" if key == "exp_avg" else key): value for key, value in values.items()}
        for index, values in saved["state"].items()
    }
    seen: list[int] = []

    def rename(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        del optimizer
        state = {
            index: {("exp_avg" if key == "first_moment" else key): value for key, value in values.items()}
            for index, values in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    def look(optimizer: Optimizer) -> None:
        seen.append(sum("exp_avg" in values for values in optimizer.state.values()))

    if not adopted_first:
        swapckpt.release(twins.swapped)
    twins.swapped.register_load_state_dict_pre_hook(rename, prepend)
    twins.swapped.register_load_state_dict_post_hook(look, prepend)
    if not adopted_first:
        swapckpt.swap_optimizer(twins.swapped, SwapConfig(swap_times=3))
    for param in twins.params:
        twins.swapped.state[param]["exp_avg"].zero_()
    twins.swapped.load_state_dict(saved)
    twins.check()
    assert seen == [len(twins.params)]
    assert len(twins.swap.load_hooks) == 2


def test_a_step_inside_a_graph_capture_is_refused_and_changes_nothing() -> None:
    class Capturing(CpuDevice):
        capturing = False

        def is_capturing(self) -> bool:
            return self.capturing

    device = Capturing()
    twins = Twins(Recipe(cls=torch.optim.AdamW), device=device)
    twins.step()
    device.capturing = True
    twins.set_gradients()
    with pytest.raises(PhaseError, match="while a graph is captured"):
        twins.swapped.step()
    device.capturing = False
    twins.swapped.step()
    twins.plain.step()
    twins.check()
