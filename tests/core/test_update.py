"""Stepping an optimizer on a part of its parameters, with what its groups hold."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn, optim

from swapckpt.errors import UnsupportedOptimizerError
from swapckpt.update import BatchedUpdate, private_copy, unhooked_step
from tests.core.optimizers import Accumulating, Averaging
from tests.core.training import bits, gradient

if TYPE_CHECKING:
    from torch.optim import Optimizer


def parameters(count: int) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.linspace(-1, 1, 12 + index)) for index in range(count)]
    for index, param in enumerate(params):
        param.grad = gradient(param, step=0, index=index)
    return params


def step_in_batches(optimizer: Optimizer, *batches: list[tuple[int, list[Any]]]) -> None:
    with BatchedUpdate(optimizer, unhooked_step(optimizer)) as update:
        for batch in batches:
            update.run(batch)


def pair(cls: Any, **options: Any) -> tuple[list[nn.Parameter], Optimizer, list[nn.Parameter], Optimizer]:
    """Two optimizers of three groups: two parameters, two, and none."""
    made = []
    for _ in range(2):
        params = parameters(4)
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}, {"params": []}]
        made += [params, cls(groups, **options)]
    return tuple(made)  # type: ignore[return-value]


def test_the_batches_of_a_step_give_its_bits_and_leave_groups_as_they_were() -> None:
    plain_params, plain, params, optimizer = pair(optim.AdamW)
    groups, lists = optimizer.param_groups, [group["params"] for group in optimizer.param_groups]
    for _ in range(3):
        plain.step()
        step_in_batches(
            optimizer, [(0, params[:1])], [(0, params[1:2]), (1, params[2:3])], [(1, params[3:]), (2, [])]
        )
        assert optimizer.param_groups is groups
        assert all(group["params"] is each for group, each in zip(groups, lists, strict=True))
    assert [bits(param) for param in params] == [bits(param) for param in plain_params]


def test_only_the_parameters_of_a_batch_are_stepped() -> None:
    _, _, params, optimizer = pair(optim.AdamW)
    before = [bits(param) for param in params]
    step_in_batches(optimizer, [(0, [params[1]])])
    assert [bits(param) != old for param, old in zip(params, before, strict=True)] == [
        False,
        True,
        False,
        False,
    ]
    assert list(optimizer.state) == [params[1]]


def test_group_fields_that_advance_do_so_once_a_step() -> None:
    plain_params, plain, params, optimizer = pair(Averaging)
    for _ in range(4):
        plain.step()
        step_in_batches(
            optimizer, [(0, params[:1]), (2, [])], [(0, params[1:2])], [(1, params[2:3])], [(1, params[3:])]
        )
        for group, other in zip(plain.param_groups, optimizer.param_groups, strict=True):
            assert group["count"] == other["count"]
            assert bits(group["clock"]) == bits(other["clock"])
    assert [group["count"] for group in optimizer.param_groups] == [4, 4, 4]
    assert [bits(param) for param in params] == [bits(param) for param in plain_params]


def test_a_tensor_that_is_advanced_in_place_stays_the_same_object() -> None:
    """Somebody else may look at it: a logger, a scheduler."""
    _, _, params, optimizer = pair(Averaging)
    clocks = [group["clock"] for group in optimizer.param_groups]
    for number in range(1, 4):
        step_in_batches(optimizer, [(0, params[:1]), (2, [])], [(0, params[1:2])], [(1, params[2:])])
        assert [float(clock) for clock in clocks] == [0.5 * number] * 3
        assert all(
            group["clock"] is clock for group, clock in zip(optimizer.param_groups, clocks, strict=True)
        )


def test_fields_that_nobody_advances_are_not_touched() -> None:
    _, _, params, optimizer = pair(optim.AdamW, lr=torch.tensor(0.25), foreach=False)
    fields = [dict(group) for group in optimizer.param_groups]
    step_in_batches(optimizer, [(0, params[:1])], [(0, params[1:2]), (1, params[2:])])
    for group, before in zip(optimizer.param_groups, fields, strict=True):
        assert all(group[key] is value for key, value in before.items())


@pytest.mark.parametrize("in_place", [False, True])
def test_fields_that_depend_on_what_is_stepped_are_refused(in_place: bool) -> None:
    class InPlace(Accumulating):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            for group in self.param_groups:
                group["total"] = torch.zeros(())

    params = parameters(2)
    optimizer = InPlace(params) if in_place else Accumulating(params)
    with pytest.raises(UnsupportedOptimizerError, match=r"advances group fields \['total'\]"):
        step_in_batches(optimizer, [(0, params[:1])], [(0, params[1:])])
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], params, strict=True))


@pytest.mark.parametrize("first", [0, 1])
def test_a_field_that_only_one_batch_advances_is_refused(first: int) -> None:
    class Noting(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                if any(param.numel() == 13 for param in group["params"]):
                    group["seen"] = True
            return super().step(closure)

    params = parameters(2)
    optimizer = Noting(params, lr=0.1)
    optimizer.param_groups[0]["seen"] = False
    with pytest.raises(UnsupportedOptimizerError, match=r"\['seen'\]"):
        step_in_batches(optimizer, [(0, [params[first]])], [(0, [params[1 - first]])])


class CountsWhatItFinds(optim.SGD):
    """Makes its counter when it needs one, and only counts steps in which it has something to do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if any(param.grad is not None for param in group["params"]):
                if "steps" in group:
                    group["steps"] += 1
                else:
                    group["steps"] = 1
        return super().step(closure)


@pytest.mark.parametrize("idle", [(), (0,), (1, 3), (2, 3)])
def test_a_counter_made_by_the_step_counts_steps(idle: tuple[int, ...]) -> None:
    _, plain, params, optimizer = pair(CountsWhatItFinds, lr=0.1)
    for index in idle:
        plain.param_groups[index // 2]["params"][index % 2].grad = None
        params[index].grad = None
    for _ in range(3):
        plain.step()
        step_in_batches(
            optimizer, [(0, params[:1]), (2, [])], [(0, params[1:2]), (1, params[2:3])], [(1, params[3:])]
        )
        for group, other in zip(plain.param_groups, optimizer.param_groups, strict=True):
            assert group.get("steps") == other.get("steps")


def test_groups_are_restored_when_a_step_raises() -> None:
    _, _, params, optimizer = pair(Averaging)
    groups, lists = optimizer.param_groups, [group["params"] for group in optimizer.param_groups]
    params[2].grad = None
    params[2].requires_grad_(False)
    optimizer.param_groups[1]["lr"] = None
    params[3].grad = torch.ones_like(params[3])
    with pytest.raises(TypeError):
        step_in_batches(optimizer, [(0, params[:1])], [(0, params[1:2]), (1, params[2:])])
    assert optimizer.param_groups is groups
    assert all(group["params"] is each for group, each in zip(groups, lists, strict=True))


def test_unhooked_step_is_the_class_own_step() -> None:
    calls: list[str] = []

    class Mine(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            calls.append("step")
            return super().step(closure)

    own = vars(Mine)["step"]
    optimizer = Mine(parameters(1), lr=0.1)
    assert Mine.step is not own  # torch has wrapped it for hooks
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    assert unhooked_step(optimizer) is own
    unhooked_step(optimizer)(optimizer)
    assert calls[0] == "step"
    assert calls.count("hook") <= 1  # of the base, if torch has wrapped that


@pytest.mark.parametrize("flag", ["differentiable", "capturable"])
def test_a_flag_that_rules_batches_out_is_refused_in_any_group(flag: str) -> None:
    params = parameters(2)
    optimizer = optim.Adamax([{"params": params[:1]}, {"params": params[1:], flag: True}])
    with pytest.raises(UnsupportedOptimizerError, match=rf"Adamax with {flag}=True \(group 1\)"):
        unhooked_step(optimizer)


def test_a_class_of_somebody_else_may_be_called_lbfgs() -> None:
    class LBFGS(optim.SGD):
        pass

    unhooked_step(LBFGS(parameters(1), lr=0.1))


def test_private_copies() -> None:
    tensor, other = torch.ones(3), ["a"]
    assert torch.equal(private_copy(tensor), tensor)  # type: ignore[arg-type]
    assert private_copy(tensor) is not tensor
    assert private_copy(other) is other
    assert copy.copy(3) == private_copy(3)
