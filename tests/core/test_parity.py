"""Same numbers: a swapped optimizer equals the unswapped one as bits, for every split of the step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import optim

from swapckpt import SwapConfig
from swapckpt.device import CpuDevice
from tests.core.training import MATRICES, Recipe, Twins, always, same_bits, shifting

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS = 6  # RAdam changes its formula at step 6
LOOP, FOREACH, FUSED = {"foreach": False}, {"foreach": True}, {"fused": True}


def adam_like(cls: Any, *implementations: dict[str, Any]) -> list[Recipe]:
    options: list[dict[str, Any]] = [
        {},
        {"amsgrad": True, "weight_decay": 0.1},
        {"maximize": True, "betas": (0.8, 0.95)},
    ]
    return [
        Recipe(cls=cls, options={**each, **implementation})
        for implementation in implementations
        for each in options
    ]


def with_each(cls: Any, *options: dict[str, Any], fused: bool = False) -> list[Recipe]:
    return [
        Recipe(cls=cls, options={**each, **implementation})
        for implementation in ([LOOP, FOREACH, FUSED] if fused else [LOOP, FOREACH])
        for each in options
    ]


RECIPES: list[Recipe] = [
    *with_each(optim.ASGD, {"t0": 2, "lambd": 0.1}, {"weight_decay": 0.1, "maximize": True}),
    *with_each(optim.Adadelta, {}, {"weight_decay": 0.1, "rho": 0.5}),
    *with_each(optim.Adafactor, {}, {"weight_decay": 0.1, "maximize": True}),
    *with_each(optim.Adagrad, {}, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}, fused=True),
    *adam_like(optim.Adam, LOOP, FOREACH, FUSED),
    *adam_like(optim.AdamW, LOOP, FOREACH, FUSED),
    *with_each(optim.Adamax, {}, {"weight_decay": 0.1, "maximize": True}),
    Recipe(cls=optim.Muon, shapes=MATRICES),
    Recipe(cls=optim.Muon, shapes=MATRICES, options={"nesterov": False, "weight_decay": 0.3}),
    *with_each(optim.NAdam, {}, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    *with_each(optim.RAdam, {}, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    *with_each(optim.RMSprop, {}, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    *with_each(optim.Rprop, {}, {"etas": (0.4, 1.3), "maximize": True}),
    *with_each(
        optim.SGD,
        {},
        {"momentum": 0.9, "dampening": 0.2},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True},
        fused=True,
    ),
    Recipe(cls=optim.Adam, options={"lr": torch.tensor(0.01), **LOOP}),
    Recipe(cls=optim.AdamW, options={"lr": torch.tensor(0.01), **FUSED}),
    Recipe(cls=optim.AdamW, options={"lr": torch.tensor(0.01), **LOOP}),
    Recipe(cls=optim.SGD, options={"lr": torch.tensor(0.01), "momentum": 0.9, **LOOP}),
]
NAMES = [str(recipe).removesuffix("-float32") for recipe in RECIPES]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How the swapped twin runs. Together the setups cover each policy with each kind of split."""

    policy: str
    seed: int = 0
    config: SwapConfig
    steps_before: int = 0
    changing: bool = True


SETUPS = {
    "inline-3-packed": Setup(policy="inline", config=SwapConfig(swap_times=3)),
    "inline-100-each": Setup(
        policy="inline", config=SwapConfig(swap_times=100, packed=False, min_numel=16), changing=False
    ),
    "thread-16-each": Setup(policy="thread", config=SwapConfig(swap_times=16, packed=False, min_numel=16)),
    "thread-3-adopted-late": Setup(policy="thread", config=SwapConfig(swap_times=3), steps_before=2),
    "lazy-100-packed-2-buffers": Setup(
        policy="lazy", config=SwapConfig(swap_times=100, staging_buffers=2, min_numel=0)
    ),
    "lazy-1-each-adopted-late": Setup(
        policy="lazy", config=SwapConfig(swap_times=1, packed=False), steps_before=2, changing=False
    ),
    "random-16-kept": Setup(
        policy="random", seed=1, config=SwapConfig(swap_times=16, release_staging=False, min_numel=16)
    ),
    "random-3-each-adopted-late": Setup(
        policy="random",
        seed=2,
        config=SwapConfig(swap_times=3, packed=False, staging_buffers=2, min_numel=0),
        steps_before=3,
    ),
}


def shifting_after_first(step: int, index: int) -> bool:
    """As ``shifting``, but whoever ever has a gradient has one in the first step."""
    return index != 1 if step == 0 else shifting(step, index)


def cases() -> Iterator[Any]:
    """Every recipe in both precisions under every policy, by turns with the first and the second split."""
    for position, (recipe, name) in enumerate(zip(RECIPES, NAMES, strict=True)):
        for offset, dtype in enumerate([torch.float32, torch.bfloat16]):
            if recipe.cls is optim.SGD and recipe.options.get("fused") and dtype is torch.bfloat16:
                continue  # torch 2.13: fused SGD on the CPU leaves low-precision parameters as they are
            for number, (key, setup) in enumerate(SETUPS.items()):
                if (position + offset + number) % 2 == 0:
                    yield pytest.param(recipe, dtype, setup, id=f"{name}-{str(dtype)[6:]}-{key}")


def needs_all_at_first(recipe: Recipe, dtype: torch.dtype) -> bool:
    """Torch's SGD with momentum when some parameter's first gradient comes later than the others'.

    Fused it raises TypeError. Foreach decays momentum by another formula in such a call, which rounds low
    precision differently: the result of one parameter depends on what it is stepped with.
    """
    foreach = bool(recipe.options.get("foreach")) and dtype is torch.bfloat16
    return recipe.cls is optim.SGD and "momentum" in recipe.options and (foreach or "fused" in recipe.options)


@pytest.mark.parametrize(("recipe", "dtype", "setup"), list(cases()))
def test_equals_the_unswapped_optimizer(recipe: Recipe, dtype: torch.dtype, setup: Setup) -> None:
    active = shifting if setup.changing else always
    if needs_all_at_first(recipe, dtype):
        active = shifting_after_first
    twins = Twins(
        replace(recipe, dtype=dtype, transposed=(2,)),
        setup.config,
        CpuDevice(setup.policy, seed=setup.seed),
        steps_before=setup.steps_before,
        active=active,
    )
    twins.step(STEPS)
    twins.check()
    has_state = recipe.cls is not optim.SGD or "momentum" in recipe.options
    assert (twins.device.ledger.num_loads > 0) == has_state


def test_foreach_sgd_in_low_precision_rounds_by_what_it_is_stepped_with() -> None:
    """Why the exception above exists: it is torch's, without any swapping."""
    generator = torch.Generator().manual_seed(0)
    value, *gradients = torch.randn(3, 64, 64, generator=generator).bfloat16()
    momenta = []
    for with_newcomer in (False, True):
        param, newcomer = torch.nn.Parameter(value.clone()), torch.nn.Parameter(value.clone())
        optimizer = optim.SGD([param, newcomer], lr=0.1, momentum=0.9, foreach=True)
        for step, grad in enumerate(gradients):
            param.grad = grad.clone()
            newcomer.grad = grad.clone() if with_newcomer and step == 1 else None
            optimizer.step()
        momenta.append(optimizer.state[param]["momentum_buffer"])
    assert not same_bits(*momenta)
