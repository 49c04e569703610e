"""Code that knows nothing of swapping, on an adopted optimizer: settings, state, loads, forks, hooks."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
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
    PhaseError,
    SchemaError,
    StepError,
)
from swapckpt.optimizer import SwapMixin, swap_of
from swapckpt.plan import Region, TensorSpec, lay_out
from tests.core.training import Recipe, Twins, bits, gradient, same_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer

ADAMW = Recipe(cls=optim.AdamW, options={"foreach": False})
LARGE = (40, 50)


def parameters(count: int = 2, **kwargs: Any) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(LARGE, **kwargs)) for _ in range(count)]


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
            optimizer.param_groups[0]["note"] = "mine"
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
