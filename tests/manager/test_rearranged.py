"""State that its user rearranges, replaces or names anew: as in plain torch, or a clear error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

import swapckpt
from swapckpt import SwapConfig
from swapckpt.device import CpuDevice
from swapckpt.errors import (
    AdoptionError,
    ConfigError,
    FqnError,
    SchemaError,
    StepError,
    UnsupportedOptimizerError,
)
from tests.core.training import Recipe, Twins, bits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RECIPE = Recipe(
    cls=torch.optim.AdamW, options={"foreach": False}, shapes=((40, 40), (40, 40), (40, 40), (64, 32))
)


def managed(config: SwapConfig | None, recipe: Recipe = RECIPE) -> tuple[Twins, swapckpt.StateManager]:
    twins = Twins(recipe, SwapConfig(swap_times=3), CpuDevice("lazy"))
    twins.step(2)
    if config is None:
        swapckpt.release(twins.swapped)
    return twins, swapckpt.StateManager(nn.ParameterList(twins.params), twins.swapped)


def both(twins: Twins) -> list[tuple[Optimizer, list[Any]]]:
    return [(twins.plain, twins.plain_params), (twins.swapped, twins.params)]


def test_moments_that_change_places_between_steps() -> None:
    twins, _ = managed(SwapConfig())
    for optimizer, params in both(twins):
        first, second, third = (optimizer.state[param] for param in params[:3])
        first["exp_avg"], second["exp_avg"] = second["exp_avg"], first["exp_avg"]
        third["exp_avg_sq"], second["exp_avg_sq"] = second["exp_avg_sq"], third["exp_avg_sq"]
    twins.step(2)
    twins.check()


def test_whole_states_that_change_places_between_steps() -> None:
    twins, _ = managed(SwapConfig())
    for optimizer, params in both(twins):
        state = optimizer.state
        state[params[0]], state[params[2]] = state[params[2]], state[params[0]]
    twins.step(2)
    twins.check()


@pytest.mark.parametrize("config", [SwapConfig(), None], ids=["swapped", "managed"])
@pytest.mark.parametrize("of_torch", [False, True])
def test_a_state_dict_whose_entries_change_places(config: SwapConfig | None, of_torch: bool) -> None:
    twins, manager = managed(config)
    before = [bits(twins.plain.state[param]["exp_avg"]) for param in twins.plain_params]
    state_dict: dict[str, Any] = twins.swapped.state_dict() if of_torch else manager.state_dict()
    first, second = list(state_dict["state"])[:2]
    state = dict(state_dict["state"])
    state[first], state[second] = state[second], state[first]
    (twins.swapped if of_torch else manager).load_state_dict({**state_dict, "state": state})
    after = [bits(twins.swapped.state[param]["exp_avg"]) for param in twins.params]
    assert after == [before[1], before[0], *before[2:]]


@pytest.mark.parametrize("config", [SwapConfig(), None], ids=["swapped", "managed"])
def test_a_view_of_the_mirror_is_not_the_mirror(config: SwapConfig | None) -> None:
    twins, manager = managed(config)
    state_dict: dict[str, Any] = manager.state_dict()
    values = state_dict["state"][next(iter(state_dict["state"]))]
    expected = values["exp_avg"].t().clone()
    values["exp_avg"] = values["exp_avg"].t()
    manager.load_state_dict(state_dict)
    assert torch.equal(twins.swapped.state[twins.params[0]]["exp_avg"], expected)


def test_a_state_tensor_that_is_given_other_data() -> None:
    twins, manager = managed(SwapConfig())
    for optimizer, params in both(twins):
        optimizer.state[params[0]]["exp_avg"].data = torch.full((40, 40), 0.25)
    exported: Any = manager.state_dict()
    assert exported["state"][next(iter(exported["state"]))]["exp_avg"][0, 0] == 0.25
    twins.step(2)
    twins.check()


def test_two_parameters_of_one_name_are_refused() -> None:
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    optimizer = torch.optim.AdamW(model.parameters())
    manager = swapckpt.StateManager(model, optimizer, SwapConfig())
    model[0].weight = nn.Parameter(torch.zeros(60, 40))
    with pytest.raises(FqnError, match=r"group 0, parameter 0, shape \[40, 40\]: not a parameter"):
        manager.state_dict()
    optimizer.param_groups[0]["params"][0] = model[0].weight
    exported: Any = manager.state_dict()
    assert exported["state"]["0.weight"]["exp_avg"].shape == (60, 40)


class Counting(Optimizer):
    """Counts its steps on itself and in its state, not in its groups."""

    num_steps = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        self.num_steps += 1
        self.state["calls"] = self.state.get("calls", 0) + 1  # type: ignore[index, call-overload, operator]
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("m", torch.zeros_like(param)).add_(param.grad)
                param.sub_(self.state[param]["m"], alpha=group["lr"] / (self.num_steps + self.state["calls"]))  # type: ignore[index, operator]


def test_an_optimizer_that_counts_on_itself_and_in_its_state() -> None:
    twins = Twins(Recipe(cls=Counting, shapes=RECIPE.shapes), SwapConfig(swap_times=3), CpuDevice("inline"))
    for steps in range(1, 4):
        twins.step()
        for plain, swapped in zip(twins.plain_params, twins.params, strict=True):
            assert bits(plain) == bits(swapped)
        assert twins.swapped.num_steps == steps  # type: ignore[attr-defined]
        assert twins.swapped.state["calls"] == steps  # type: ignore[index, comparison-overlap]


def test_an_optimizer_that_adds_up_on_itself_over_its_parameters_is_refused() -> None:
    class Summing(Counting):
        def step(self, closure: Any = None) -> None:
            self.num_steps += sum(len(group["params"]) for group in self.param_groups)
            super().step(closure)

    twins = Twins(Recipe(cls=Summing, shapes=RECIPE.shapes), SwapConfig(swap_times=3), CpuDevice("inline"))
    twins.set_gradients()
    with pytest.raises(StepError, match=r"advances its own \['num_steps'\]"):
        twins.swapped.step()


@pytest.mark.parametrize("flag", ["differentiable", "capturable"])
def test_a_flag_that_is_refused_at_adoption_is_refused_after_a_load_too(flag: str) -> None:
    twins, manager = managed(SwapConfig())
    state_dict: Any = manager.state_dict()
    state_dict["param_groups"][0][flag] = True
    manager.load_state_dict(state_dict)
    before = [bits(param) for param in twins.params]
    twins.set_gradients()
    with pytest.raises(UnsupportedOptimizerError, match=flag):
        twins.swapped.step()
    assert [bits(param) for param in twins.params] == before


def test_a_step_inside_a_compiled_function() -> None:
    twins = Twins(RECIPE, SwapConfig(swap_times=3))
    compiled = torch.compile(twins.swapped.step, backend="eager")
    for _ in range(2):
        twins.set_gradients()
        compiled()
        twins.plain.step()
    twins.check()


def test_the_strict_planner_lists_what_the_checkpoint_has_more(tmp_path: Path) -> None:
    def build(layers: int, **options: Any) -> swapckpt.StateManager:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(40, 40, bias=False) for _ in range(layers)])
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        manager = swapckpt.StateManager(model, optimizer, SwapConfig())
        optimizer.step()
        return manager

    source, target = build(2, amsgrad=True), build(1)
    source.optimizers["optimizer"].param_groups[0]["my_scale"] = 2.0
    dcp.save({"o": source, "other": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    before = bits(next(iter(target.optimizers["optimizer"].state.values()))["exp_avg"])
    with pytest.raises(CheckpointException) as caught:
        dcp.load(
            {"o": target}, checkpoint_id=tmp_path, no_dist=True, planner=swapckpt.StrictLoadPlanner(target)
        )
    ((problem, _),) = caught.value.failures.values()
    assert isinstance(problem, SchemaError)
    for key in ("o.state.0.weight.max_exp_avg_sq", "o.state.1.weight.exp_avg", "o.param_groups.0.my_scale"):
        assert f"{key}: unexpected" in str(problem)
    assert "other" not in str(problem)
    assert bits(next(iter(target.optimizers["optimizer"].state.values()))["exp_avg"]) == before


MODEL = nn.Linear(4, 4)
SGD = torch.optim.SGD(MODEL.parameters())


@pytest.mark.parametrize(
    "call",
    [
        lambda: swapckpt.swap_optimizer(MODEL),  # type: ignore[arg-type]
        lambda: swapckpt.swap_optimizer(SGD, 16),  # type: ignore[arg-type]
        lambda: swapckpt.StateManager(MODEL, "x"),  # type: ignore[arg-type]
        lambda: swapckpt.StateManager(MODEL, [SGD]),  # type: ignore[arg-type]
        lambda: swapckpt.StateManager(MODEL, {}),
        lambda: swapckpt.StateManager(None, SGD),  # type: ignore[arg-type]
        lambda: swapckpt.StateManager(MODEL, SGD, {"swap_times": 4}),  # type: ignore[arg-type]
        lambda: swapckpt.StateManager(MODEL, SGD, flat="no"),  # type: ignore[arg-type]
        lambda: swapckpt.StateManager(MODEL, SGD).report(gbps=0),
    ],
)
def test_arguments_of_a_wrong_type_are_named(call: Callable[[], object]) -> None:
    with pytest.raises((ConfigError, AdoptionError), match="must be"):
        call()
    assert not swapckpt.is_swapped(SGD)


@pytest.mark.parametrize(
    ("state_dict", "problem"),
    [
        (None, "strings as keys, found NoneType"),
        ([], "strings as keys, found list"),
        ({5: 6}, "strings as keys"),
        ({"state": {}, "param_groups": ()}, "'param_groups' is not a list"),
        ({"state": {}, "param_groups": [{}]}, r"param_groups\[0\]: expected a mapping with a list"),
        ({"state": {}, "param_groups": [5]}, r"param_groups\[0\]"),
        (
            {"state": {"0.weight": 5}, "param_groups": []},
            "state of '0.weight': expected a mapping, found int",
        ),
    ],
)
def test_what_is_no_state_dict_is_said_to_be_none(state_dict: Any, problem: str) -> None:
    twins, manager = managed(SwapConfig())
    with pytest.raises(SchemaError, match=problem):
        manager.load_state_dict(state_dict)
    twins.step()
    twins.check()
