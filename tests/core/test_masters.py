"""fp32 masters: equal as bits to stepping fp32 copies by hand, swapped with the rest, never stale."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import optim

import swapckpt
from swapckpt import SwapConfig
from swapckpt.device import CpuDevice
from swapckpt.errors import AdoptionError, StepError, UnsupportedOptimizerError
from swapckpt.optimizer import swap_of
from swapckpt.plan import align_up, partition
from swapckpt.precision import MASTER
from tests.core.training import MATRICES, Recipe, always, gradient, same_bits, shifting

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Parameter
    from torch.optim import Optimizer

LOOP, FOREACH, FUSED = {"foreach": False}, {"foreach": True}, {"fused": True}
MASTERS = SwapConfig(swap_times=3, min_numel=16, master_weights=True)


class ByHand:
    """The recipe without swapping: fp32 copies are the optimizer's parameters; cast, step, copy back."""

    def __init__(self, recipe: Recipe) -> None:
        self.params, optimizer = recipe.build()
        self.masters = [torch.nn.Parameter(param.detach().float()) for param in self.params]
        master_of = dict(zip(self.params, self.masters, strict=True))
        for group in optimizer.param_groups:
            group["params"] = [master_of[param] for param in group["params"]]
        self.optimizer = optimizer

    def step(self) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                param.copy_(master)


class Pair:
    """The recipe by hand and swapped, over equal parameters with equal gradients."""

    def __init__(
        self,
        recipe: Recipe,
        config: SwapConfig = MASTERS,
        device: CpuDevice | None = None,
        active: Callable[[int, int], bool] = always,
    ) -> None:
        self.active, self.steps = active, 0
        self.hand = ByHand(recipe)
        self.params, self.swapped = recipe.build()
        self.device = device if device is not None else CpuDevice()
        swapckpt.swap_optimizer(self.swapped, config, device=self.device)

    def set_gradients(self) -> None:
        for params in (self.hand.params, self.params):
            for index, param in enumerate(params):
                on = self.active(self.steps, index)
                param.grad = gradient(param, step=self.steps, index=index) if on else None
        self.steps += 1

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.set_gradients()
            self.hand.step()
            self.swapped.step()

    def check(self) -> None:
        for by_hand, master, param in zip(self.hand.params, self.hand.masters, self.params, strict=True):
            assert same_bits(param, by_hand)
            expected = dict(self.hand.optimizer.state.get(master, {}))
            found = dict(self.swapped.state.get(param, {}))
            if MASTER in found:
                assert same_bits(found.pop(MASTER), master.detach())
            else:  # never stepped: the master is not needed yet
                assert same_bits(param.detach().float(), master.detach())
            assert list(found) == list(expected)
            for key, value in expected.items():
                assert (
                    same_bits(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
                )


RECIPES = [
    Recipe(cls=optim.AdamW, options={"weight_decay": 0.1, **LOOP}),
    Recipe(cls=optim.AdamW, options={"weight_decay": 0.1, **FOREACH}),
    Recipe(cls=optim.AdamW, options={"weight_decay": 0.1, **FUSED}),
    Recipe(cls=optim.AdamW, options={"amsgrad": True, "maximize": True, **FUSED}),
    Recipe(cls=optim.SGD, options={"momentum": 0.9, "dampening": 0.2, **LOOP}),
    Recipe(cls=optim.SGD, options={"momentum": 0.9, **FOREACH}),
    Recipe(cls=optim.SGD, options={"momentum": 0.9, "nesterov": True, **FUSED}),
    Recipe(cls=optim.SGD, options=LOOP),
    Recipe(cls=optim.NAdam, options=LOOP),
    Recipe(cls=optim.Adafactor, options=LOOP),
    Recipe(cls=optim.Muon, shapes=MATRICES),
]
SETUPS = {
    "3-packed": (MASTERS, "thread"),
    "100-each": (replace(MASTERS, swap_times=100, packed=False, min_numel=1), "lazy"),
    "1-kept": (replace(MASTERS, swap_times=1, release_staging=False, min_numel=0), "random"),
    "16-2-buffers": (replace(MASTERS, swap_times=16, staging_buffers=2, min_numel=1024), "inline"),
}


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_equals_stepping_fp32_copies_by_hand(recipe: Recipe, setup: str) -> None:
    config, policy = SETUPS[setup]
    dtype = torch.float16 if setup == "100-each" else torch.bfloat16
    recipe = replace(recipe, dtype=dtype, transposed=(2,))
    needs_all_at_first = recipe.cls is optim.SGD and "fused" in recipe.options
    active = always if needs_all_at_first else shifting
    pair = Pair(recipe, config, CpuDevice(policy, seed=3), active)
    pair.step(5)
    pair.check()
    held = 0 if config.release_staging else swap_of(pair.swapped).table.largest_batch_nbytes
    assert pair.device.ledger.device_nbytes == held  # of one batch, or of none


def test_small_updates_are_not_lost() -> None:
    """What masters are for: without them every one of these updates is rounded away."""
    values = []
    for config in (MASTERS, replace(MASTERS, master_weights=False)):
        param = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        optimizer = swapckpt.swap_optimizer(optim.SGD([param], lr=1.0, foreach=False), config)
        for _ in range(16):
            param.grad = torch.full_like(param, 2**-10)
            optimizer.step()
        values.append(float(param[0].detach()))
    assert values == [1 - 2**-6, 1.0]


def test_fp32_parameters_in_the_same_optimizer_have_no_master() -> None:
    params = [
        torch.nn.Parameter(torch.randn(40, 50, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)
    ]
    optimizer = swapckpt.swap_optimizer(optim.AdamW(params), MASTERS)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert [MASTER in optimizer.state[param] for param in params] == [False, True]
    assert {optimizer.state[param]["exp_avg"].dtype for param in params} == {torch.float32}


def test_groups_hold_the_parameters_and_no_gradient_of_a_master_stays() -> None:
    pair = Pair(Recipe(cls=optim.AdamW, dtype=torch.bfloat16))
    pair.step(2)
    params = [param for group in pair.swapped.param_groups for param in group["params"]]
    assert all(ours is theirs for ours, theirs in zip(params, pair.params, strict=True))
    assert set(pair.swapped.state) == set(pair.params)
    for param in pair.params:
        assert pair.swapped.state[param][MASTER].grad is None
        assert param.grad is not None
        assert param.grad.dtype is torch.bfloat16


# ------------------------------------------------------------------ memory

EQUAL = ((32, 64),) * 8
KEYS_AND_MASTER = 3


@pytest.mark.parametrize("policy", ["inline", "thread", "lazy"])
@pytest.mark.parametrize("swap_times", [1, 4, 8])
def test_device_bytes(policy: str, swap_times: int) -> None:
    """12 bytes for each parameter off the device; in a step the buffers, and a batch of fp32 gradients."""
    config = replace(MASTERS, swap_times=swap_times)
    pair = Pair(Recipe(cls=optim.AdamW, dtype=torch.bfloat16, shapes=EQUAL), config, CpuDevice(policy))
    ledger, numel = pair.device.ledger, 32 * 64
    assert ledger.device_peak_nbytes == 0
    assert ledger.host_nbytes == 0
    batch_numel = numel * len(partition([1] * 8, swap_times)[0])
    assert batch_numel * swap_times == numel * 8
    assert align_up(numel * 4) == numel * 4
    bound = min(config.staging_buffers, swap_times) * KEYS_AND_MASTER * 4 * batch_numel + 4 * batch_numel
    for step in range(3):
        ledger.reset_peak()
        pair.step()
        assert ledger.device_nbytes == 0
        assert ledger.device_peak_nbytes <= bound
        if step > 0:
            assert ledger.device_peak_nbytes == bound
    assert swap_of(pair.swapped).table.swapped_nbytes == 12 * numel * 8


def test_a_master_that_was_forgotten_is_made_again_within_the_bound() -> None:
    """It is created beside the staged moments, in a batch that creates nothing else."""
    config = replace(MASTERS, swap_times=4)
    pair = Pair(Recipe(cls=optim.AdamW, dtype=torch.bfloat16, shapes=EQUAL), config, CpuDevice("lazy"))
    pair.step(2)
    for param in pair.params:
        del pair.swapped.state[param][MASTER]
    with torch.no_grad():
        for master, param in zip(pair.hand.masters, pair.hand.params, strict=True):
            master.copy_(param)
    ledger, batch_numel = pair.device.ledger, 2 * 32 * 64
    ledger.reset_peak()
    pair.step()
    pair.check()
    assert ledger.device_peak_nbytes <= 3 * KEYS_AND_MASTER * 4 * batch_numel + 4 * batch_numel


def test_one_copy_moves_masters_along_with_the_moments() -> None:
    pair = Pair(Recipe(cls=optim.AdamW, dtype=torch.bfloat16, shapes=EQUAL), replace(MASTERS, swap_times=4))
    pair.step()
    ledger = pair.device.ledger
    loads, offloads = ledger.num_loads, ledger.num_offloads
    pair.step()
    assert (ledger.num_loads - loads, ledger.num_offloads - offloads) == (4, 4)


# ------------------------------------------------------------------ never stale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["copy", "data", "replaced-data"])
def test_a_parameter_that_was_written_counts(dtype: torch.dtype, how: str) -> None:
    pair = Pair(Recipe(cls=optim.AdamW, options=LOOP, dtype=dtype))
    pair.step(3)
    for params in (pair.hand.params, pair.params):
        for index in (0, 2, 4):
            new = torch.randn(params[index].shape, generator=torch.Generator().manual_seed(index)).to(dtype)
            if how == "copy":
                with torch.no_grad():
                    params[index].copy_(new)
            elif how == "data":
                params[index].data.copy_(new)  # raises no version counter
            else:
                params[index].data = new
    with torch.no_grad():
        for index in (0, 2, 4):
            pair.hand.masters[index].copy_(pair.hand.params[index])
    pair.step(3)
    pair.check()


def test_one_element_that_was_written_counts() -> None:
    pair = Pair(Recipe(cls=optim.AdamW, options=LOOP, dtype=torch.bfloat16))
    pair.step(3)
    for params in (pair.hand.params, pair.params):
        with torch.no_grad():
            params[0][39, 49] += 1
    with torch.no_grad():
        pair.hand.masters[0].copy_(pair.hand.params[0])
    pair.step(2)
    pair.check()


def test_a_parameter_written_before_the_first_step() -> None:
    pair = Pair(Recipe(cls=optim.AdamW, options=LOOP, dtype=torch.bfloat16))
    with torch.no_grad():
        for params in (pair.hand.params, pair.params):
            params[0].fill_(0.3)
        pair.hand.masters[0].copy_(pair.hand.params[0])
    pair.step(2)
    pair.check()


# ------------------------------------------------------------------ adoption and its like


def test_state_of_low_precision_cannot_be_taken_over() -> None:
    params, optimizer = Recipe(cls=optim.AdamW, dtype=torch.bfloat16, shapes=((40, 50), (64, 32))).build()
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(AdoptionError) as caught:
        swapckpt.swap_optimizer(optimizer, MASTERS)
    assert "group0.param0.exp_avg: torch.bfloat16\n  - group0.param0.exp_avg_sq: torch.bfloat16" in str(
        caught.value
    )
    assert not swapckpt.is_swapped(optimizer)
    optimizer.step()


@pytest.mark.parametrize("how", ["release", "deepcopy", "pickle"])
def test_adopted_again_with_its_masters(how: str) -> None:
    pair = Pair(Recipe(cls=optim.AdamW, options=LOOP, dtype=torch.bfloat16))
    pair.step(3)
    if how == "release":
        swapckpt.release(pair.swapped)
        swapckpt.swap_optimizer(pair.swapped, MASTERS)
    else:
        copied: tuple[list[Parameter], Optimizer] = (
            copy.deepcopy((pair.params, pair.swapped))
            if how == "deepcopy"
            else pickle.loads(pickle.dumps((pair.params, pair.swapped)))
        )
        pair.params, pair.swapped = copied
    pair.step(3)
    pair.check()


def test_state_keys_do_not_leave_masters_on_the_device() -> None:
    config = replace(MASTERS, state_keys=("exp_avg",))
    pair = Pair(Recipe(cls=optim.AdamW, options=LOOP, dtype=torch.bfloat16), config)
    pair.step(3)
    pair.check()
    assert {tensor.id.key for tensor in swap_of(pair.swapped).table.tensors()} == {"exp_avg", MASTER}


class OwnMaster(torch.optim.Optimizer):
    """Keeps state under the key of masters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault(MASTER, torch.zeros_like(param))


def test_a_key_of_the_optimizer_itself_is_no_master() -> None:
    param = torch.nn.Parameter(torch.ones(40, 50, dtype=torch.bfloat16))
    optimizer = swapckpt.swap_optimizer(OwnMaster([param]), MASTERS)
    param.grad = torch.ones_like(param)
    with pytest.raises(StepError) as caught:
        optimizer.step()
    assert isinstance(caught.value.__cause__, UnsupportedOptimizerError)


class Breaking(optim.AdamW):
    """AdamW that raises after a number of calls, one for each batch."""

    _calls_left = 1000  # a public number would be taken for a count of steps

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self._calls_left -= 1
        if self._calls_left == 0:
            raise ArithmeticError("boom")
        return loss


def test_an_update_that_fails_gives_the_parameters_their_state_back() -> None:
    pair = Pair(Recipe(cls=Breaking, options=LOOP, dtype=torch.bfloat16, shapes=MATRICES))
    assert isinstance(pair.swapped, Breaking)
    pair.step(2)
    keys = [(id(param), sorted(pair.swapped.state[param])) for param in pair.params]
    pair.set_gradients()
    pair.swapped._calls_left = 2
    with pytest.raises(StepError):
        pair.swapped.step()
    assert [(id(param), sorted(values)) for param, values in pair.swapped.state.items()] == keys
    assert pair.device.ledger.device_nbytes == 0


def test_without_masters_wanted_nothing_changes() -> None:
    params, optimizer = Recipe(cls=optim.AdamW, dtype=torch.bfloat16).build()
    swapckpt.swap_optimizer(optimizer, SwapConfig(min_numel=16))
    for index, param in enumerate(params):
        param.grad = gradient(param, step=0, index=index)
    optimizer.step()
    assert all(list(optimizer.state[param]) == ["step", "exp_avg", "exp_avg_sq"] for param in params)
