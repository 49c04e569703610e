"""Small inputs that systems of this kind get wrong, with the right answers: cases S1 to S13."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import swapckpt
from swapckpt import StateManager, SwapConfig
from swapckpt.device import CpuDevice
from swapckpt.errors import GradientError, PhaseError, StepError
from swapckpt.swap import Phase
from tests.core.optimizers import Averaging
from tests.core.training import Recipe, Twins, bits, gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor
    from torch.optim import Optimizer

ADAMW = Recipe(cls=optim.AdamW, options={"foreach": False, "amsgrad": True})
MOE = ((32, 40),) * 8


def tensors_in(value: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor reachable through mappings and sequences, with its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}/{key if isinstance(key, str) else 'param'}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{path}/{index}")


def holding(params: list[nn.Parameter]) -> nn.Module:
    """A module that gives parameters the names ``0``, ``1``, ..."""
    return nn.ParameterList(params)


def manager_of(twins: Twins, *, flat: bool = False) -> StateManager:
    """A manager of an optimizer that is adopted already."""
    return StateManager(holding(twins.params), twins.swapped, flat=flat)


def live_workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("swapckpt-")]


# ------------------------------------------------------------------------------------------------------- S1


@pytest.mark.parametrize("policy", ["thread", "lazy", "random"])
def test_s1_every_reachable_tensor_holds_real_values(policy: str, tmp_path: Path) -> None:
    twins = Twins(ADAMW, SwapConfig(swap_times=3), CpuDevice(policy))
    manager, flat = manager_of(twins), manager_of(twins, flat=True)
    for number in range(3):
        twins.step()
        expected = [bits(value) for _, value in tensors_in(list(twins.plain.state.values()))]
        for reachable in (dict(twins.swapped.state), manager.state_dict()["state"], flat.state_dict()):
            found = [value for _, value in tensors_in(reachable)]
            assert [bits(value) for value in found] == expected
            assert [bits(value.clone()) for value in found] == expected
            assert [bits(copy.deepcopy(value)) for value in found] == expected
            for value in found:
                assert value.untyped_storage().nbytes() == value.nbytes
                assert torch.equal(value.double().sum(), torch.tensor(value.tolist()).double().sum())
            file = io.BytesIO()
            torch.save(reachable, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
            assert [bits(value) for _, value in tensors_in(loaded)] == expected
        dcp.save({"optimizer": manager}, checkpoint_id=tmp_path / str(number))
        fresh = Twins(ADAMW)
        restored = manager_of(fresh)
        dcp.load({"optimizer": restored}, checkpoint_id=tmp_path / str(number))
        assert [bits(value) for _, value in tensors_in(list(fresh.swapped.state.values()))] == expected


# ------------------------------------------------------------------------------------------------------- S2


@pytest.mark.parametrize("swap_times", [1, 2])
@pytest.mark.parametrize("cls", [optim.AdamW, optim.RAdam, optim.NAdam, optim.Adafactor])
def test_s2_a_late_first_gradient_starts_its_own_step_counter(cls: type[Optimizer], swap_times: int) -> None:
    recipe = Recipe(cls=cls, shapes=((40, 40), (50, 50)), groups=((0, 1),))
    twins = Twins(
        recipe, SwapConfig(swap_times=swap_times), active=lambda step, index: index == 0 or step >= 1
    )
    twins.step(2)
    twins.check()
    counters = [float(twins.swapped.state[param]["step"]) for param in twins.params]
    assert counters == [2.0, 1.0]


# ------------------------------------------------------------------------------------------------------- S3


@pytest.mark.parametrize("implementation", ["loop", "foreach", "fused"])
def test_s3_amsgrad_remembers_the_largest_second_moment(implementation: str) -> None:
    options = {"amsgrad": True, "foreach": implementation == "foreach", "fused": implementation == "fused"}
    recipe = Recipe(cls=optim.AdamW, options=options, shapes=((40, 40), (50, 50), (60, 60)))
    twins = Twins(recipe, SwapConfig(swap_times=3), CpuDevice("random", seed=5))
    assert len(twins.swap.table.batches) == 3
    for step in range(6):
        twins.set_gradients()
        for param in (*twins.plain_params, *twins.params):
            assert param.grad is not None
            param.grad.mul_(100.0 if step == 0 else 0.01)
        twins.plain.step()
        twins.swapped.step()
    twins.check()
    for param in twins.params:
        state = twins.swapped.state[param]
        assert (state["max_exp_avg_sq"] > state["exp_avg_sq"]).float().mean() > 0.9


# ------------------------------------------------------------------------------------------------------- S4


@pytest.mark.parametrize("missing", [{0}, {1}, {2}, {0, 1, 2, 3, 4, 5}, set()], ids=str)
def test_s4_missing_gradients_leave_a_parameter_as_it_is(missing: set[int]) -> None:
    recipe = Recipe(cls=optim.AdamW, shapes=((40, 40),) * 6)
    twins = Twins(
        recipe,
        SwapConfig(swap_times=2),
        CpuDevice("lazy"),
        active=lambda step, index: step < 2 or index not in missing,
    )
    assert [len(batch.params) for batch in twins.swap.table.batches] == [3, 3]
    twins.step(2)
    before = [bits(param) for param in twins.params]
    twins.step()
    twins.check()
    unchanged = {index for index, param in enumerate(twins.params) if bits(param) == before[index]}
    assert unchanged == missing  # the gradient of the step before is not used again
    assert twins.device.ledger.device_nbytes == 0


@pytest.mark.parametrize("steps_before", [0, 2])
def test_s4_a_sparse_gradient_is_refused_before_anything_changes(steps_before: int) -> None:
    twins = Twins(ADAMW, SwapConfig(swap_times=4))
    twins.step(steps_before)
    twins.set_gradients()
    grads = [param.grad for param in twins.params]
    twins.params[2].grad = grads[2].to_sparse()
    twins.params[6].grad = grads[6].to_sparse()
    before = copy.deepcopy((twins.params, twins.swapped.state_dict()))
    with pytest.raises(GradientError, match=r"(?s)2 gradients.*group0\.param2.*group1\.param2"):
        twins.swapped.step()
    after = (twins.params, twins.swapped.state_dict())
    assert [bits(value) for _, value in tensors_in(after)] == [bits(value) for _, value in tensors_in(before)]
    assert twins.swap.phase is Phase.IDLE
    assert twins.device.ledger.device_nbytes == 0
    for param, grad in zip(twins.params, grads, strict=True):
        param.grad = grad
    twins.plain.step()
    twins.swapped.step()
    twins.check()


def test_s4_a_gradient_of_another_dtype_is_refused_before_anything_changes() -> None:
    twins = Twins(ADAMW)
    twins.step()
    before = [bits(param) for param in twins.params]
    param = twins.params[3]
    param.grad_dtype = None  # torch itself refuses to attach one otherwise
    param.grad = torch.ones_like(param, dtype=torch.float64)
    with pytest.raises(GradientError, match=r"group0\.param3: torch.float64 on cpu, expected torch.float32"):
        twins.swapped.step()
    assert [bits(each) for each in twins.params] == before
    assert twins.swap.phase is Phase.IDLE


# ------------------------------------------------------------------------------------------------------- S5


def test_s5_a_parameter_larger_than_the_budget_runs_alone() -> None:
    recipe = Recipe(cls=optim.AdamW, shapes=((40, 40), (40, 40), (500, 100), (40, 40), (40, 40)))
    twins = Twins(recipe, SwapConfig(swap_times=5, staging_buffers=2), CpuDevice("thread"))
    assert [2] in [[int(entry.name[-1]) for entry in batch.params] for batch in twins.swap.table.batches]
    report = manager_of(twins).report(gbps=10.0)
    twins.step(3)
    twins.check()
    assert report.largest_param == "2"
    assert report.largest_param_nbytes == 2 * 200_192  # two moments of 200,000 bytes, aligned to 512
    assert report.largest_batch_nbytes == twins.swap.table.largest_batch_nbytes
    assert twins.device.ledger.device_peak_nbytes == report.staging_peak_nbytes


# ------------------------------------------------------------------------------------------------------- S6


def add_group(twins: Twins, shape: tuple[int, ...], lr: float) -> None:
    """One more group with one parameter, equal for both."""
    value = torch.randn(shape, generator=torch.Generator().manual_seed(len(twins.params)))
    for params, optimizer in ((twins.plain_params, twins.plain), (twins.params, twins.swapped)):
        params.append(nn.Parameter(value.clone()))
        optimizer.add_param_group({"params": [params[-1]], "lr": lr})


@pytest.mark.parametrize("steps", [0, 2])
def test_s6_a_group_added_after_adoption_is_swapped_too(steps: int) -> None:
    twins = Twins(ADAMW, SwapConfig(swap_times=3))
    twins.step(steps)
    batches = len(twins.swap.table.batches)
    add_group(twins, (70, 30), 0.5)
    add_group(twins, (3,), 0.25)
    twins.step(2)
    twins.check()
    assert len(twins.swap.table.batches) > batches
    assert len(twins.swap.table.entries[twins.params[-2]].tensors) == 3
    assert twins.device.ledger.device_nbytes == 0


def test_s6_a_group_added_after_a_resume() -> None:
    twins = Twins(ADAMW, SwapConfig(swap_times=3))
    twins.step(2)
    saved = copy.deepcopy((twins.params, twins.swapped.state_dict()))
    resumed = Twins(ADAMW, SwapConfig(swap_times=2))
    resumed.plain_params, resumed.plain, resumed.steps = twins.plain_params, twins.plain, twins.steps
    with torch.no_grad():
        for param, value in zip(resumed.params, saved[0], strict=True):
            param.copy_(value)
    resumed.swapped.load_state_dict(saved[1])
    resumed.check()
    add_group(resumed, (70, 30), 0.5)
    resumed.step(2)
    resumed.check()


def test_s6_freezing_keeps_the_moments() -> None:
    twins = Twins(ADAMW, SwapConfig(swap_times=3))
    twins.step(2)
    frozen = twins.params[2]
    moments = {key: bits(value) for key, value in twins.swapped.state[frozen].items()}
    twins.plain_params[2].requires_grad_(False)
    frozen.requires_grad_(False)
    twins.step(3)
    twins.check()
    assert {key: bits(value) for key, value in twins.swapped.state[frozen].items()} == moments
    twins.plain_params[2].requires_grad_(True)
    frozen.requires_grad_(True)
    twins.step(2)
    twins.check()


def test_s6_a_parameter_that_leaves_its_group_and_returns_is_stepped_again() -> None:
    twins = Twins(ADAMW, SwapConfig(swap_times=3))
    twins.step(2)
    removed = [optimizer.param_groups[0]["params"].pop(2) for optimizer in (twins.plain, twins.swapped)]
    twins.step(2)
    for optimizer, param in zip((twins.plain, twins.swapped), removed, strict=True):
        optimizer.param_groups[1]["params"].append(param)
    twins.step(2)
    twins.check()


# ------------------------------------------------------------------------------------------------------- S7


def test_s7_deleted_optimizers_leave_nothing_behind() -> None:
    workers = set(live_workers())
    ledgers, devices, mirrors = [], [], []
    for _ in range(3):
        twins = Twins(ADAMW, SwapConfig(swap_times=4, release_staging=False), CpuDevice("thread"))
        twins.step(2)
        ledgers.append(twins.device.ledger)
        devices.append(weakref.ref(twins.device))
        mirrors.append(weakref.ref(next(twins.swap.table.tensors()).segment.slab.owner))
        assert twins.device.ledger.host_nbytes > 0
        assert len(set(live_workers()) - workers) == 2
        del twins  # no garbage collection: nothing of this is in a cycle
        assert [device() for device in devices] == [None] * len(devices)
        assert [mirror() for mirror in mirrors] == [None] * len(mirrors)
        assert [ledger.host_nbytes for ledger in ledgers] == [0] * len(ledgers)
        deadline = time.monotonic() + 30
        while set(live_workers()) - workers and time.monotonic() < deadline:
            time.sleep(0.001)  # a thread needs a moment to end once its device is gone
        assert set(live_workers()) - workers == set()


@pytest.mark.parametrize("shared", [False, True], ids=["own-devices", "one-device"])
def test_s7_two_optimizers_do_not_touch_each_other(shared: bool) -> None:
    device = CpuDevice("random", seed=3)
    first = Twins(ADAMW, SwapConfig(swap_times=3), device)
    other = Recipe(cls=optim.SGD, options={"momentum": 0.9}, shapes=((80, 20), (33, 44)))
    second = Twins(other, SwapConfig(swap_times=2), device if shared else CpuDevice("random", seed=4))
    for turn in range(4):
        first.step(1 + turn % 2)
        states = [bits(value) for _, value in tensors_in(list(first.swapped.state.values()))]
        second.step(2 - turn % 2)
        assert [bits(value) for _, value in tensors_in(list(first.swapped.state.values()))] == states
    first.check()
    second.check()
    held = device.ledger.host_nbytes
    del second
    assert (device.ledger.host_nbytes < held) == shared
    first.step(2)
    first.check()


# ------------------------------------------------------------------------------------------------------- S8


@pytest.mark.parametrize("fused", [True, False])
def test_s8_an_infinite_gradient_skips_the_step_and_halves_the_scale(fused: bool) -> None:
    recipe = Recipe(cls=optim.AdamW, options={"fused": fused})
    twins = Twins(recipe, SwapConfig(swap_times=3), CpuDevice("lazy"))
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in range(2)]
    for step in range(6):
        overflows = step in (0, 3)
        twins.set_gradients()
        before = [bits(value) for _, value in tensors_in([twins.params, dict(twins.swapped.state)])]
        scale = scalers[1].get_scale()
        for scaler, params, optimizer in zip(
            scalers, (twins.plain_params, twins.params), (twins.plain, twins.swapped), strict=True
        ):
            scaler.scale(torch.zeros(()))  # the scale exists from the first loss on
            for param in params:
                assert param.grad is not None
                param.grad.mul_(scaler.get_scale())
            if overflows:
                assert params[2].grad is not None
                params[2].grad.view(-1)[5] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        twins.check()
        after = [bits(value) for _, value in tensors_in([twins.params, dict(twins.swapped.state)])]
        if overflows:
            assert scalers[1].get_scale() == scale / 2
            assert step == 0 or after == before
            assert all(float(twins.swapped.state[param].get("step", 0)) in (0, 2) for param in twins.params)
        else:
            assert after != before
        assert not hasattr(twins.swapped, "found_inf")


# ------------------------------------------------------------------------------------------------------- S9


def test_s9_a_closure_is_called_once_and_with_gradients_enabled() -> None:
    twins = Twins(ADAMW, SwapConfig(swap_times=4))
    calls: list[bool] = []

    def closure(params: list[nn.Parameter]) -> Callable[[], Any]:
        def loss() -> Tensor:
            calls.append(torch.is_grad_enabled())
            for param in params:
                param.grad = None
            total = torch.stack([(param**2).sum() for param in params]).sum()
            total.backward()
            return total

        return loss

    for _ in range(3):
        expected: Any = twins.plain.step(closure(twins.plain_params))
        calls.clear()
        with torch.no_grad():
            found: Any = twins.swapped.step(closure(twins.params))
        assert calls == [True]
        assert torch.equal(found, expected)
    twins.check()


def test_s9_hooks_fire_once_a_step() -> None:
    recipe = Recipe(cls=optim.AdamW)
    params, optimizer = recipe.build()
    calls: list[tuple[str, Optimizer]] = []
    optimizer.register_step_pre_hook(lambda each, *_: calls.append(("pre", each)))
    swapckpt.swap_optimizer(optimizer, SwapConfig(swap_times=4))
    optimizer.register_step_post_hook(lambda each, *_: calls.append(("post", each)))
    everywhere = [
        register_optimizer_step_pre_hook(lambda each, *_: calls.append(("global pre", each))),
        register_optimizer_step_post_hook(lambda each, *_: calls.append(("global post", each))),
    ]
    try:
        for step in range(2):
            for index, param in enumerate(params):
                param.grad = gradient(param, step=step, index=index)
            calls.clear()
            optimizer.step()
            assert sorted(name for name, _ in calls) == ["global post", "global pre", "post", "pre"]
            assert {each for _, each in calls} == {optimizer}
    finally:
        for handle in everywhere:
            handle.remove()


def test_s9_a_pre_hook_that_clips_gradients_is_obeyed() -> None:
    twins = Twins(ADAMW, SwapConfig(swap_times=4))

    def clip(optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad.clamp_(-0.1, 0.1)

    twins.plain.register_step_pre_hook(clip)
    twins.swapped.register_step_pre_hook(clip)
    twins.step(3)
    twins.check()


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "one-cycle": lambda optimizer: optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8),
    "warm-restarts": lambda optimizer: optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3),
    "lambda": lambda optimizer: optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "sequential": lambda optimizer: optim.lr_scheduler.SequentialLR(
        optimizer,
        [optim.lr_scheduler.LinearLR(optimizer), optim.lr_scheduler.ExponentialLR(optimizer, 0.5)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("adopted_first", [False, True])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_s9_schedulers_made_before_or_after_adoption(
    scheduler: str, adopted_first: bool, tensor_lr: bool
) -> None:
    """Warnings are errors in these tests: "lr_scheduler.step() before optimizer.step()" would be one."""
    options = {"lr": torch.tensor(0.01) if tensor_lr else 0.01, "foreach": False}
    recipe = Recipe(cls=optim.AdamW, options=options)
    twins = Twins(recipe, SwapConfig(swap_times=3))
    plain = SCHEDULERS[scheduler](twins.plain)
    if not adopted_first:
        swapckpt.release(twins.swapped)
    swapped = SCHEDULERS[scheduler](twins.swapped)
    if not adopted_first:
        swapckpt.swap_optimizer(twins.swapped, SwapConfig(swap_times=3))
    for _ in range(6):
        twins.step()
        plain.step()
        swapped.step()
        assert swapped.get_last_lr() == plain.get_last_lr()
    twins.check()
    assert twins.swap.table.swapped_nbytes > 0


# ------------------------------------------------------------------------------------------------------ S11


@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("policy", ["thread", "lazy"])
def test_s11_state_keeps_the_dtype_its_optimizer_made(
    dtype: torch.dtype, state_dtype: torch.dtype, policy: str
) -> None:
    recipe = Recipe(cls=Averaging, options={"state_dtype": state_dtype}, dtype=dtype)
    twins = Twins(recipe, SwapConfig(swap_times=3), CpuDevice(policy))
    twins.step(2)
    twins.check()
    assert {state["average"].dtype for state in twins.swapped.state.values()} == {state_dtype}
    file = io.BytesIO()
    torch.save((twins.swapped.state_dict(), manager_of(twins).state_dict()), file)
    for number in range(2):
        file.seek(0)
        saved = torch.load(file, weights_only=False)
        resumed = Twins(recipe, SwapConfig(swap_times=2), CpuDevice(policy))
        resumed.plain_params, resumed.plain, resumed.steps = copy.deepcopy(
            (twins.plain_params, twins.plain, twins.steps)
        )
        with torch.no_grad():
            for param, value in zip(resumed.params, twins.params, strict=True):
                param.copy_(value)
        if number == 0:
            resumed.swapped.load_state_dict(saved[0])
        else:
            manager_of(resumed).load_state_dict(saved[1])
        resumed.check()
        resumed.step(2)
        resumed.check()


# ------------------------------------------------------------------------------------------------------ S12


@pytest.mark.parametrize("packed", [True, False])
def test_s12_changing_experts_move_no_layout_and_take_no_more_memory(packed: bool) -> None:
    recipe = Recipe(cls=optim.AdamW, shapes=MOE)
    config = SwapConfig(swap_times=3, packed=packed)

    def routed(step: int, index: int) -> bool:
        return step == 0 or (index * 5 + step * 3) % 7 < 3

    twins = Twins(recipe, config, CpuDevice("random", seed=2), active=routed)
    twins.step()
    ledger = twins.device.ledger
    host_nbytes, segments = ledger.host_nbytes, [list(batch.segments) for batch in twins.swap.table.batches]
    mirrors = [tensor.host.data_ptr() for tensor in twins.swap.table.tensors()]
    for _ in range(12):
        loaded, offloaded = ledger.loaded_nbytes, ledger.offloaded_nbytes
        twins.step()
        moved = 2 * sum(param.nbytes for param in twins.params if param.grad is not None)
        assert (ledger.loaded_nbytes - loaded, ledger.offloaded_nbytes - offloaded) == (moved, moved)
        assert ledger.host_peak_nbytes == host_nbytes
        assert [list(batch.segments) for batch in twins.swap.table.batches] == segments
        assert [tensor.host.data_ptr() for tensor in twins.swap.table.tensors()] == mirrors
    twins.check()


# ------------------------------------------------------------------------------------------------------ S13


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
@pytest.mark.parametrize("steps", [0, 2])
def test_s13_a_copy_is_an_independent_working_optimizer(
    duplicate: Callable[[Any], Any], steps: int, scheduled: bool
) -> None:
    twins = Twins(ADAMW, SwapConfig(swap_times=3))
    if scheduled:
        optim.lr_scheduler.ConstantLR(twins.swapped, factor=1.0)
        optim.lr_scheduler.ConstantLR(twins.plain, factor=1.0)
    twins.step(steps)
    other = Twins(ADAMW)
    other.plain_params, other.plain, other.steps = copy.deepcopy(
        (twins.plain_params, twins.plain, twins.steps)
    )
    other.params, other.swapped = duplicate((twins.params, twins.swapped))
    other.device = other.swap.device  # type: ignore[assignment]
    assert swapckpt.is_swapped(other.swapped)
    assert type(other.swapped) is type(twins.swapped)
    assert other.swap.config == twins.swap.config
    assert other.device is not twins.device
    for param, value in zip(other.params, twins.params, strict=True):
        assert param is not value
    if steps:
        assert other.device.ledger.host_nbytes > 0
    other.check()
    other.step(2)
    other.check()
    twins.check()
    twins.step(3)
    twins.check()
    other.check()


def test_s13_a_shallow_copy_shares_parameters_and_has_state_of_its_own() -> None:
    twins = Twins(ADAMW, SwapConfig(swap_times=3))
    twins.step(2)
    other = copy.copy(twins.swapped)
    assert [each["params"] for each in other.param_groups] == [
        each["params"] for each in twins.swapped.param_groups
    ]
    before = [bits(value) for _, value in tensors_in(list(twins.swapped.state.values()))]
    assert [bits(value) for _, value in tensors_in(list(other.state.values()))] == before
    for index, param in enumerate(twins.params):
        param.grad = gradient(param, step=5, index=index)
    other.step()
    after = [bits(value) for _, value in tensors_in(list(twins.swapped.state.values()))]
    assert after == before
    assert [bits(value) for _, value in tensors_in(list(other.state.values()))] != before


class CopiesItself(optim.AdamW):
    """What a debugger or a careless hook may do in the middle of a step."""

    def step(self, closure: Any = None) -> Any:
        copy.deepcopy(self)
        return super().step(closure)


def test_s13_a_copy_in_the_middle_of_a_step_is_refused() -> None:
    params, optimizer = Recipe(cls=CopiesItself).build()
    swapckpt.swap_optimizer(optimizer)
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(StepError) as caught:
        optimizer.step()
    assert isinstance(caught.value.__cause__, PhaseError)
    assert "Cannot copy or pickle the optimizer while the optimizer is stepping" in str(caught.value)
