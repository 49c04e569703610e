"""In-place adoption: the same object afterwards, whatever code that knows nothing of it does."""

from __future__ import annotations

import functools
import inspect
import warnings
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
    StepError,
    UnsupportedOptimizerError,
)
from swapckpt.optimizer import SwapMixin
from swapckpt.swap import Phase
from tests.core.optimizers import Accumulating, Aliasing, Averaging, Replacing
from tests.core.training import Recipe, Twins, shifting

if TYPE_CHECKING:
    from collections.abc import Callable

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
