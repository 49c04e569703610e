"""The state a first step will create, told without taking it: as for real, for every optimizer of torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn, optim

import swapckpt
from swapckpt import SwapConfig
from swapckpt.errors import UnsupportedOptimizerError
from swapckpt.plan import TensorSpec
from swapckpt.state import tensor_spec
from swapckpt.template import describe
from swapckpt.update import unhooked_step
from tests.core.optimizers import Averaging
from tests.core.training import Recipe, bits, gradient

SHAPES = (
    (),
    (1,),
    (7,),
    (40, 50),
    (1, 9),
    (9, 1),
    (1, 1),
    (6, 5),
    (3, 1, 4),
    (2, 3, 4, 5),
    (8, 8),
    (0,),
    (0, 4),
)
MATRICES = ((40, 50), (1, 9), (9, 1), (1, 1), (6, 5), (8, 8))

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (optim.ASGD, {}),
    (optim.Adadelta, {}),
    (optim.Adafactor, {}),
    (optim.Adagrad, {}),
    (optim.Adagrad, {"fused": True}),
    (optim.Adam, {}),
    (optim.Adam, {"fused": True}),
    (optim.AdamW, {"amsgrad": True}),
    (optim.AdamW, {"fused": True, "amsgrad": True}),
    (optim.AdamW, {"foreach": True}),
    (optim.AdamW, {"lr": torch.tensor(0.1)}),
    (optim.Adamax, {}),
    (optim.Muon, {}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.RMSprop, {}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.Rprop, {}),
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9}),
    (Averaging, {"state_dtype": torch.bfloat16}),
]


def shapes_for(cls: Any) -> tuple[tuple[int, ...], ...]:
    """Muon takes matrices only, Adafactor divides by the number of elements."""
    if cls is optim.Muon:
        return MATRICES
    return tuple(shape for shape in SHAPES if cls is not optim.Adafactor or 0 not in shape)


def strange_layouts() -> list[nn.Parameter]:
    """Parameters that are dense, but not in the usual order of dimensions."""
    return [
        nn.Parameter(torch.randn(50, 40).t()),
        nn.Parameter(torch.randn(9, 1).t()),
        nn.Parameter(torch.randn(1, 9).t()),
        nn.Parameter(torch.randn(4, 3, 5, 6).contiguous(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(4, 1, 5, 6).contiguous(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(2, 3, 4).permute(2, 0, 1)),
        nn.Parameter(torch.randn(5, 5).t()),
    ]


def described(value: object) -> tuple[object, ...]:
    """What a template says about a state value, from a real one."""
    if isinstance(value, torch.Tensor):
        return ("tensor", tensor_spec(value))
    return ("plain", type(value))


@pytest.mark.parametrize("layout", ["usual", "strange"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS, ids=str)
def test_templates_are_what_a_first_step_creates(
    cls: Any, options: dict[str, Any], dtype: torch.dtype, layout: str
) -> None:
    shapes = shapes_for(cls)
    params, optimizer = Recipe(cls=cls, options=options, dtype=dtype, shapes=shapes).build()
    if layout == "strange":
        params = [nn.Parameter(each.detach().to(dtype)) for each in strange_layouts()]
        params = [param for param in params if cls is not optim.Muon or param.dim() == 2]
        optimizer = cls(params, **options)
    groups, values = [dict(group) for group in optimizer.param_groups], [bits(param) for param in params]
    optimizer.state.clear()  # Adagrad makes state when it is made
    placed = [(index, param) for index, group in enumerate(groups) for param in group["params"]]
    templates = describe(optimizer, unhooked_step(optimizer), placed)

    assert not optimizer.state
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert [bits(param) for param in params] == values
    assert all(param.grad is None for param in params)

    for index, param in enumerate(params):
        param.grad = gradient(param, step=0, index=index)
    unhooked_step(optimizer)(optimizer)
    for param in params:
        found = {
            key: ("tensor", template.spec) if template.spec is not None else ("plain", type(template.value))
            for key, template in templates[param].items()
        }
        assert found == {key: described(value) for key, value in optimizer.state[param].items()}
        assert all(template.placement is None for template in templates[param].values())


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS, ids=str)
def test_a_mirror_reserved_by_an_export_is_the_one_the_first_step_fills(
    cls: Any, options: dict[str, Any]
) -> None:
    shapes = shapes_for(cls)
    params, optimizer = Recipe(cls=cls, options=options, shapes=shapes).build()
    swapckpt.swap_optimizer(optimizer, SwapConfig(min_numel=1, swap_times=3))
    manager = swapckpt.StateManager(nn.ParameterList(params), optimizer)
    exported: Any = manager.state_dict()["state"]
    for index, param in enumerate(params):
        param.grad = gradient(param, step=0, index=index)
    optimizer.step()
    for index, param in enumerate(params):
        state = optimizer.state.get(param, {})
        assert exported.get(str(index), {}).keys() == state.keys()
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
                assert value.data_ptr() == exported[str(index)][key].data_ptr(), key


def test_parameters_of_one_form_are_described_by_one_small_stand_in() -> None:
    seen: list[tuple[int, ...]] = []

    class Watching(optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            seen.extend(tuple(param.shape) for group in self.param_groups for param in group["params"])
            return super().step(closure)

    params, optimizer = Recipe(cls=Watching, shapes=((400, 500),) * 10 + ((1, 500), (500,))).build()
    placed = [
        (index, param) for index, group in enumerate(optimizer.param_groups) for param in group["params"]
    ]
    templates = describe(optimizer, unhooked_step(optimizer), placed)
    assert len(templates) == len(params)
    assert templates[params[0]]["exp_avg"].spec == TensorSpec((400, 500), (500, 1), torch.float32)
    assert len(seen) == 4  # a matrix in each of two groups, a row and a vector
    assert max(torch.Size(shape).numel() for shape in seen) < 10


def test_an_optimizer_may_treat_a_dimension_of_one_differently() -> None:
    class ForMatrices(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for param in group["params"]:
                    if min(param.shape) > 1:
                        self.state[param].setdefault("rows", param.grad.new_zeros(param.shape[0], 1))
            return super().step(closure)

    params, optimizer = Recipe(cls=ForMatrices, shapes=((6, 5), (1, 5), (5, 1))).build()
    placed = [
        (index, param) for index, group in enumerate(optimizer.param_groups) for param in group["params"]
    ]
    templates = describe(optimizer, unhooked_step(optimizer), placed)
    assert [list(templates[param]) for param in params] == [["rows"], [], []]
    assert templates[params[0]]["rows"].spec == TensorSpec((6, 1), (1, 1), torch.float32)


def test_hooks_do_not_fire_and_group_counters_do_not_advance() -> None:
    params, optimizer = Recipe(cls=Averaging).build()
    fired: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: fired.append("pre"))
    placed = [
        (index, param) for index, group in enumerate(optimizer.param_groups) for param in group["params"]
    ]
    describe(optimizer, unhooked_step(optimizer), placed)
    assert fired == []
    for group in optimizer.param_groups:
        assert (group["count"], float(group["clock"])) == (0, 0.0)
    assert len(params) == len(placed)


def test_an_optimizer_that_cannot_step_a_stand_in_says_what_to_do() -> None:
    class Picky(optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            if any(param.numel() < 100 for group in self.param_groups for param in group["params"]):
                msg = "too small for me"
                raise ValueError(msg)
            return super().step(closure)

    params, optimizer = Recipe(cls=Picky, shapes=((40, 40),)).build()
    groups, state = optimizer.param_groups, optimizer.state
    with pytest.raises(
        UnsupportedOptimizerError, match=r"Picky cannot step .*too small for me.*Step once before"
    ):
        describe(optimizer, unhooked_step(optimizer), [(0, params[0])])
    assert optimizer.param_groups is groups
    assert optimizer.state is state


def test_groups_with_other_settings_get_other_templates() -> None:
    params, _ = Recipe(cls=optim.SGD, shapes=((8, 8), (8, 8))).build()
    optimizer = optim.SGD([{"params": params[:1]}, {"params": params[1:], "momentum": 0.9}], lr=0.1)
    templates = describe(optimizer, unhooked_step(optimizer), [(0, params[0]), (1, params[1])])
    assert [list(templates[param]) for param in params] == [[], ["momentum_buffer"]]
    assert replace(templates[params[1]]["momentum_buffer"], value=1).value == 1
