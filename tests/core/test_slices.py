"""Oversized parameters in slices: the bits of the whole, with staging as large as a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

import swapckpt
from swapckpt import SwapConfig
from swapckpt.device import CpuDevice
from swapckpt.errors import StepError, UnsupportedOptimizerError
from swapckpt.manager import StateManager
from swapckpt.optimizer import swap_of
from swapckpt.plan import SLICE_ALIGNMENT, Item, align_up, cut_batches, cut_nbytes, cut_slices, partition
from tests.core.devices import FailingDevice
from tests.core.test_masters import Pair
from tests.core.training import Recipe, Twins, always, bits

if TYPE_CHECKING:
    from collections.abc import Iterator

# ------------------------------------------------------------------ the plan


@given(numel=st.integers(1, 200_000), max_numel=st.integers(1, 100_000), min_numel=st.integers(1, 50_000))
def test_slices_cover_every_element_once_at_aligned_places(
    numel: int, max_numel: int, min_numel: int
) -> None:
    slices = cut_slices(numel, max_numel, min_numel=min_numel)
    assert [each for part in slices for each in (part.start, part.stop)] == [
        0,
        *(place for part in slices[:-1] for place in (part.stop, part.stop)),
        numel,
    ]
    assert all(part.start % SLICE_ALIGNMENT == 0 for part in slices)
    if len(slices) > 1:
        assert min(map(len, slices)) >= min_numel
        limit = align_up(max(max_numel, min_numel), SLICE_ALIGNMENT)
        assert max(map(len, slices[:-1])) <= limit
        assert len(slices[-1]) < limit + min_numel


def test_cut_of_a_llama_like_list() -> None:
    """Two embeddings of 20 in 100, and 12 equal layers: the embeddings no longer are the largest batches."""
    unit = 1 << 20
    items = [Item(20 * unit, 80 * unit, divisible=True)]
    items += [Item(5 * unit, 20 * unit, divisible=True) for _ in range(12)]
    items += [Item(20 * unit, 80 * unit, divisible=True)]
    cuts = cut_batches(items, 16)
    assert [cut.items for cut in cuts if not cut.slices] == [
        range(index, index + 1) for index in range(1, 13)
    ]
    assert [len(cut.slices) for cut in (cuts[0], cuts[-1])] == [4, 4]
    assert max(cut_nbytes(cut, items) for cut in cuts) == 20 * unit
    whole = cut_batches([replace(item, divisible=False) for item in items], 16)
    assert [cut.items for cut in whole] == list(partition([item.nbytes for item in items], 16))
    assert max(cut_nbytes(cut, items) for cut in whole) == 80 * unit


@given(
    sizes=st.lists(st.tuples(st.integers(0, 50_000), st.booleans()), max_size=12), batches=st.integers(1, 20)
)
def test_every_item_is_in_one_batch_in_order(sizes: list[tuple[int, bool]], batches: int) -> None:
    items = [Item(numel, 4 * numel, divisible) for numel, divisible in sizes]
    cuts = cut_batches(items, batches)
    assert [index for cut in cuts for index in cut.items] == list(range(len(items)))
    assert all(len(cut.items) == 1 for cut in cuts if cut.slices)
    assert all(len(cut.items) >= 1 for cut in cuts)
    assert len(cuts) <= 2 * batches + 2 * sum(bool(cut.slices) for cut in cuts) + 1
    if any(cut.slices for cut in cuts):
        budget = -(-sum(item.nbytes for item in items) // batches)
        for cut in cuts:
            largest_slice = 2 * max(budget, 4 * SLICE_ALIGNMENT)
            assert cut_nbytes(cut, items) <= (largest_slice if cut.slices else budget) or len(cut.items) == 1


# ------------------------------------------------------------------ same numbers

LOOP, FOREACH, FUSED = {"foreach": False}, {"foreach": True}, {"fused": True}
SHAPES = ((70, 300), (7,), (40, 50), (9_001,), (64, 32))
"""A budget of 6 KB cuts the first and the fourth, which ends in a rest of a vector."""
SLICED = SwapConfig(swap_times=6, min_numel=16, min_slice_numel=1, split_oversized=True)

KINDS: list[tuple[type[optim.Optimizer], dict[str, Any], tuple[dict[str, Any], ...]]] = [
    (optim.AdamW, {"weight_decay": 0.1}, (LOOP, FOREACH, FUSED)),
    (optim.AdamW, {"amsgrad": True, "maximize": True}, (LOOP, FOREACH, FUSED)),
    (optim.Adam, {"weight_decay": 0.1}, (LOOP, FOREACH, FUSED)),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}, (LOOP, FOREACH, FUSED)),
    (optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}, (LOOP, FOREACH, FUSED)),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}, (LOOP, FOREACH)),
    (optim.NAdam, {"weight_decay": 0.1}, (LOOP, FOREACH)),
    (optim.RAdam, {}, (LOOP, FOREACH)),
    (optim.Adamax, {}, (LOOP, FOREACH)),
    (optim.Adadelta, {}, (LOOP, FOREACH)),
    (optim.ASGD, {"t0": 2, "lambd": 0.1}, (LOOP, FOREACH)),
    (optim.Rprop, {}, (LOOP, FOREACH)),
]
RECIPES = [
    Recipe(cls=cls, options={**options, **implementation}, shapes=SHAPES)
    for cls, options, implementations in KINDS
    for implementation in implementations
]
RECIPES += [
    Recipe(cls=optim.AdamW, options={"lr": torch.tensor(0.01), **FUSED}, shapes=SHAPES),
    Recipe(cls=optim.Adam, options={"lr": torch.tensor(0.01), **LOOP}, shapes=SHAPES),
]
SETUPS = {
    "thread": (SLICED, 0),
    "lazy": (replace(SLICED, packed=False, staging_buffers=2), 0),
    "random": (replace(SLICED, swap_times=40), 2),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """In low precision torch's own bits depend on how its threads divide the elements."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def cases() -> Iterator[Any]:
    for number, recipe in enumerate(RECIPES):
        for offset, dtype in enumerate((torch.float32, torch.bfloat16)):
            if recipe.cls is optim.SGD and "fused" in recipe.options and dtype is torch.bfloat16:
                continue  # torch 2.13: it leaves low-precision parameters on the CPU as they are
            policy = list(SETUPS)[(number + offset) % len(SETUPS)]
            yield pytest.param(replace(recipe, dtype=dtype), policy, id=f"{number}-{recipe}-{dtype}-{policy}")


@pytest.mark.parametrize(("recipe", "policy"), list(cases()))
def test_equals_the_unswapped_optimizer(recipe: Recipe, policy: str) -> None:
    config, steps_before = SETUPS[policy]
    needs_all = recipe.cls is optim.SGD and ("fused" in recipe.options or recipe.dtype is torch.bfloat16)
    twins = Twins(
        recipe,
        config,
        CpuDevice(policy, seed=1),
        steps_before=steps_before,
        active=always if needs_all else lambda step, index: (step + index) % 4 != 1,
    )
    for _ in range(6):
        twins.step()
        twins.check()
    assert num_slices(twins) > 2
    assert twins.device.ledger.device_nbytes == 0


def num_slices(twins: Twins | Pair) -> int:
    return sum(len(cut.slices) for cut in swap_of(twins.swapped).cuts())


def test_masters_are_sliced_too() -> None:
    config = replace(SLICED, master_weights=True, split_oversized=None)
    pair = Pair(Recipe(cls=optim.AdamW, options=FUSED, dtype=torch.bfloat16, shapes=SHAPES), config)
    pair.step(4)
    pair.check()
    assert num_slices(pair) > 2


def test_shared_scalars_would_count_every_slice() -> None:
    """Why slices have scalars of their own: this is what stepping views of shared state does."""
    param = nn.Parameter(torch.randn(4096))
    optimizer = optim.AdamW([param], foreach=False)
    shared: dict[str, Any] = {"step": torch.tensor(0.0)}
    for _ in range(3):
        for part in (param.detach()[:2048], param.detach()[2048:]):
            part.grad = torch.ones_like(part)
            optimizer.param_groups[0]["params"] = [part]
            shared.setdefault("exp_avg", torch.zeros(2048))
            shared.setdefault("exp_avg_sq", torch.zeros(2048))
            optimizer.state[part] = shared
            optimizer.step()
    assert shared["step"] == 6
    twins = Twins(Recipe(cls=optim.AdamW, options=LOOP, shapes=((4096,), (10,))), SLICED)
    twins.step(3)
    assert twins.swapped.state[twins.params[0]]["step"] == 3


def test_found_inf_leaves_everything_as_it_is() -> None:
    twins = Twins(Recipe(cls=optim.AdamW, options=FUSED, shapes=SHAPES), SLICED)
    twins.step(2)
    for each in (twins.plain, twins.swapped):
        setattr(each, "found_inf", torch.tensor(1.0))  # noqa: B010 - as GradScaler does
        setattr(each, "grad_scale", torch.tensor(1.0))  # noqa: B010
    twins.step()
    twins.check()
    assert twins.swapped.state[twins.params[0]]["step"] == 2
    for each in (twins.plain, twins.swapped):
        delattr(each, "found_inf")
        delattr(each, "grad_scale")
    twins.step()
    twins.check()


def test_hooks_see_one_step_and_whole_parameters() -> None:
    twins = Twins(Recipe(cls=optim.AdamW, shapes=SHAPES), SLICED)
    seen: list[list[int]] = []
    for register in (twins.swapped.register_step_pre_hook, twins.swapped.register_step_post_hook):
        register(
            lambda optimizer, *_: seen.append(
                [param.numel() for group in optimizer.param_groups for param in group["params"]]
            )
        )
    twins.step()
    assert seen == [[torch.Size(shape).numel() for shape in SHAPES]] * 2
    assert set(twins.swapped.state) == set(twins.params)


def test_a_scalar_of_the_state_stays_the_same_object() -> None:
    twins = Twins(Recipe(cls=optim.AdamW, options=LOOP, shapes=SHAPES), SLICED)
    twins.step()
    step = twins.swapped.state[twins.params[0]]["step"]
    twins.step()
    assert twins.swapped.state[twins.params[0]]["step"] is step
    assert step == 2


# ------------------------------------------------------------------ memory

LARGE = ((64, 1024), *((8, 1024),) * 8)  # one parameter as large as all others together


@pytest.mark.parametrize("policy", ["inline", "thread", "lazy"])
def test_staging_is_bounded_by_the_budget(policy: str) -> None:
    config = replace(SLICED, swap_times=16)
    twins = Twins(Recipe(cls=optim.AdamW, shapes=LARGE), config, CpuDevice(policy))
    ledger = twins.device.ledger
    batch_nbytes = 2 * 4 * 8 * 1024  # of 16 equal ones
    for step in range(3):
        ledger.reset_peak()
        twins.step()
        assert ledger.device_nbytes == 0
        assert ledger.device_peak_nbytes <= config.staging_buffers * batch_nbytes
        if step > 0:
            assert ledger.device_peak_nbytes == config.staging_buffers * batch_nbytes
    whole = Twins(Recipe(cls=optim.AdamW, shapes=LARGE), replace(config, split_oversized=False))
    whole.step(2)
    assert whole.device.ledger.device_peak_nbytes == config.staging_buffers * 8 * batch_nbytes


def test_the_state_is_moved_once_and_one_mirror_holds_it() -> None:
    twins = Twins(Recipe(cls=optim.AdamW, shapes=LARGE), replace(SLICED, swap_times=16))
    twins.step()
    ledger, table = twins.device.ledger, swap_of(twins.swapped).table
    loaded = ledger.loaded_nbytes
    twins.step()
    assert ledger.loaded_nbytes - loaded == table.swapped_nbytes == 2 * 4 * 128 * 1024
    mirror = twins.swapped.state[twins.params[0]]["exp_avg"]
    assert mirror.shape == (64, 1024)
    assert mirror.untyped_storage().nbytes() == mirror.nbytes


# ------------------------------------------------------------------ with everything else


@pytest.mark.parametrize("spare_nbytes", [0, None])
@pytest.mark.parametrize("policy", ["inline", "thread", "lazy"])
def test_a_snapshot_keeps_its_values_while_slices_go_around_it(policy: str, spare_nbytes: int | None) -> None:
    config = replace(SLICED, spare_nbytes=spare_nbytes, timeout_secs=20)
    twins = Twins(Recipe(cls=optim.AdamW, shapes=SHAPES), config, CpuDevice(policy))
    manager = StateManager(nn.ParameterList(twins.params), twins.swapped)
    twins.step(2)
    for _ in range(3):
        with manager.snapshot() as snapshot:
            state = snapshot.state_dict["state"]
            assert isinstance(state, dict)
            before = {name: bits(values["exp_avg"]) for name, values in state.items()}
            if spare_nbytes is None:
                twins.step()
            assert {name: bits(values["exp_avg"]) for name, values in state.items()} == before
        twins.step()
        twins.check()
    redirected = swap_of(twins.swapped).gate
    assert redirected is not None


def test_some_parameters_without_gradients_while_a_snapshot_reads() -> None:
    """The redirect of a sliced parameter brings along what is not written yet."""
    twins = Twins(
        Recipe(cls=optim.AdamW, shapes=SHAPES),
        replace(SLICED, spare_nbytes=1 << 30),
        CpuDevice("random", seed=4),
        active=lambda step, index: (step + index) % 3 != 0,
    )
    manager = StateManager(nn.ParameterList(twins.params), twins.swapped)
    for _ in range(7):
        with manager.snapshot():
            twins.step()
        twins.check()


@pytest.mark.parametrize("steps", [0, 2])
def test_saved_and_loaded_like_any_other(steps: int) -> None:
    twins = Twins(Recipe(cls=optim.AdamW, shapes=SHAPES), SLICED)
    twins.step(steps)
    manager = StateManager(nn.ParameterList(twins.params), twins.swapped)
    exported = manager.state_dict()
    params, optimizer = Recipe(cls=optim.AdamW, shapes=SHAPES).build()
    for param, source in zip(params, twins.params, strict=True):
        param.data.copy_(source.data)
    resumed = StateManager(nn.ParameterList(params), optimizer, replace(SLICED, swap_times=11))
    resumed.load_state_dict(exported)
    twins.params, twins.swapped = params, optimizer
    twins.step(2)
    twins.check()


def test_rebound_parameters_are_sliced_on() -> None:
    twins = Twins(Recipe(cls=optim.AdamW, shapes=SHAPES), SLICED)
    manager = StateManager(nn.ParameterList(twins.params), twins.swapped)
    twins.step(2)
    new = [nn.Parameter(param.detach().clone()) for param in twins.params]
    manager.rebind(dict(zip(new, twins.params, strict=True)), model=nn.ParameterList(new))
    twins.params = new
    twins.step(2)
    twins.check()
    assert num_slices(twins) > 2


@pytest.mark.parametrize("copies", [0, 1, 3, 6])
@pytest.mark.parametrize("direction", ["load", "offload"])
def test_a_failed_copy_leaves_no_slice_behind(copies: int, direction: str) -> None:
    device = FailingDevice("thread")
    twins = Twins(Recipe(cls=optim.AdamW, shapes=SHAPES), SLICED, device)
    twins.step(2)
    stream = device.load if direction == "load" else device.offload
    stream.copies_left = copies
    twins.set_gradients()
    with pytest.raises(StepError):
        twins.swapped.step()
    assert set(twins.swapped.state) <= set(twins.params)
    assert device.ledger.device_nbytes == 0
    assert twins.swapped.state[twins.params[0]]["step"] == 2  # its slices were not finished


# ------------------------------------------------------------------ what stays whole


def largest_batch_nbytes(recipe: Recipe, config: SwapConfig = SLICED) -> int:
    twins = Twins(recipe, config)
    twins.step(2)
    twins.check()
    ledger = twins.device.ledger
    ledger.reset_peak()
    twins.step()
    twins.check()
    return ledger.device_peak_nbytes // config.staging_buffers


class MyAdamW(optim.AdamW):
    """A subclass: it may do anything with its parameters."""


def test_only_known_classes_and_whoever_asks_for_it() -> None:
    auto = replace(SLICED, split_oversized=None)
    known = largest_batch_nbytes(Recipe(cls=optim.AdamW, shapes=SHAPES), auto)
    assert largest_batch_nbytes(Recipe(cls=MyAdamW, shapes=SHAPES), SLICED) == known
    whole = largest_batch_nbytes(Recipe(cls=MyAdamW, shapes=SHAPES), auto)
    assert whole == align_up(2 * 4 * 70 * 300 // 2) * 2 > 2 * known
    assert (
        largest_batch_nbytes(Recipe(cls=optim.AdamW, shapes=SHAPES), replace(auto, split_oversized=False))
        == whole
    )
    assert (
        largest_batch_nbytes(Recipe(cls=optim.AdamW, shapes=SHAPES), replace(auto, min_slice_numel=15_000))
        == whole
    )


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(cls=optim.Adafactor, shapes=SHAPES),
        Recipe(cls=optim.AdamW, shapes=SHAPES, transposed=(0, 2)),
        Recipe(cls=optim.AdamW, shapes=SHAPES, dtype=torch.bfloat16),
    ],
    ids=["Adafactor", "transposed", "bf16-on-the-CPU"],
)
def test_others_run_whole_and_equal(recipe: Recipe) -> None:
    twins = Twins(recipe, replace(SLICED, split_oversized=None))
    twins.step(3)
    twins.check()
    assert max(len(cut.slices) for cut in swap_of(twins.swapped).cuts() if cut.items.start == 0) == 0


@pytest.mark.parametrize("options", [{"state_keys": ("exp_avg",)}, {"min_numel": 0}])
def test_state_that_is_swapped_otherwise_runs_whole(options: dict[str, Any]) -> None:
    twins = Twins(Recipe(cls=optim.AdamW, options=LOOP, shapes=SHAPES), replace(SLICED, **options))
    twins.step(3)
    twins.check()


def test_a_gradient_in_another_layout_runs_whole_in_that_step() -> None:
    twins = Twins(Recipe(cls=optim.AdamW, options=LOOP, shapes=SHAPES), SLICED)
    for step in range(4):
        twins.set_gradients()
        for params in (twins.plain_params, twins.params):
            if step % 2:
                params[0].grad = params[0].grad.t().contiguous().t()
        twins.plain.step()
        twins.swapped.step()
        twins.check()


class Norming(optim.Optimizer):
    """Not elementwise, whatever its user claims: a step depends on the norm of all it is given."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault("average", torch.zeros_like(param)).add_(param.grad)
                    state["norm"] = float(param.grad.norm())
                    param.sub_(state["average"] / state["norm"])


def test_slices_that_disagree_are_an_error() -> None:
    twins = Twins(Recipe(cls=Norming, options={}, shapes=((64, 1024), (8, 8))), SLICED)
    with pytest.raises(UnsupportedOptimizerError, match="split_oversized=False"):
        twins.step()
    assert set(twins.swapped.state) <= set(twins.params)
    with pytest.raises(swapckpt.errors.StateFailedError):
        twins.swapped.step()
