"""What does not fit is refused, all of it at once, before anything is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import swapckpt
from swapckpt.errors import SchemaError
from tests.manager.training import CONFIG, Net, assert_same_bits, contents, train

if TYPE_CHECKING:
    from pathlib import Path

    from torch.optim import Optimizer


def build(
    *,
    width: int = 6,
    dtype: torch.dtype = torch.float32,
    flat: bool = False,
    config: swapckpt.SwapConfig | None = CONFIG,
) -> tuple[Net, Optimizer, swapckpt.StateManager]:
    model = Net(width, depth=1, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, swapckpt.StateManager(model, optimizer, config, flat=flat)


def lines(error: BaseException) -> list[str]:
    rest = str(error).splitlines()[1:]
    assert all(line.startswith("  - ") for line in rest)
    assert rest == sorted(rest)
    return [line.removeprefix("  - ") for line in rest]


# ------------------------------------------------------------------ the planner: before a byte is read


def misfits(states: dict[str, object], path: Path, **options: bool) -> list[str]:
    """What the strict planner says; asserts that it says it once, as DCP hands it on."""
    with pytest.raises(CheckpointException) as caught:
        dcp.load(states, checkpoint_id=path, planner=swapckpt.StrictLoadPlanner(**options))
    ((problem, _),) = caught.value.failures.values()
    assert isinstance(problem, SchemaError)
    return lines(problem)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_c16_every_missing_and_misshaped_entry_is_listed(tmp_path: Path, flat: bool) -> None:
    """Stock names the first one; in the flat layout it raises an opaque TypeError."""
    model, optimizer, manager = build(flat=flat)
    train(model, optimizer, steps=range(1), use_spare=lambda _: True)
    dcp.save({"optimizer": manager}, checkpoint_id=tmp_path)

    other = Net(6, depth=2)
    other.head = nn.Linear(6, 4)
    target_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    target = swapckpt.StateManager(other, target_optimizer, CONFIG, flat=flat)
    before = contents(other, target_optimizer)
    problems = misfits({"optimizer": target}, tmp_path)
    state = [line for line in problems if ".state." in line]
    misshaped = [
        f"optimizer.state.head.{name}.{key}: expected torch.float32 {wanted}, found torch.float32 {found}"
        for name, wanted, found in (("bias", [4], [3]), ("weight", [4, 6], [3, 6]))
        for key in ("exp_avg", "exp_avg_sq")
    ]
    missing = [
        f"optimizer.state.blocks.1.{name}.{key}: missing"
        for name in ("down.weight", "up.bias", "up.weight")
        for key in ("exp_avg", "exp_avg_sq", "step")
    ]
    assert state == sorted(misshaped + missing)
    settings = {line.split(":")[0].rsplit(".", 1)[0] for line in problems if ".state." not in line}
    assert settings == (
        {f"optimizer.param_groups.blocks.1.{name}" for name in ("down.weight", "up.bias", "up.weight")}
        if flat
        else set()
    )
    assert not target_optimizer.state
    assert_same_bits(contents(other, target_optimizer), before)


def test_c10_dtypes_are_compared(tmp_path: Path) -> None:
    """Stock casts: an int64 300 is 44 in an int8 destination."""
    saved = {"a": torch.ones(3), "b": torch.tensor([300]), "c": torch.ones(2, dtype=torch.bfloat16)}
    dcp.save(saved, checkpoint_id=tmp_path)

    def destination() -> dict[str, torch.Tensor]:
        return {
            "a": torch.zeros(3, dtype=torch.bfloat16),
            "b": torch.zeros(1, dtype=torch.int8),
            "c": torch.zeros(2, dtype=torch.bfloat16),
        }

    states = destination()
    assert misfits(states, tmp_path) == [
        "a: expected torch.bfloat16 [3], found torch.float32 [3]",
        "b: expected torch.int8 [1], found torch.int64 [1]",
    ]
    assert all(not value.any() for value in states.values())
    states = destination()
    dcp.load(states, checkpoint_id=tmp_path, planner=swapckpt.StrictLoadPlanner(allow_cast=True))
    assert states["a"].tolist() == [1, 1, 1]
    assert states["b"].tolist() == [44]  # what the caller has asked for


def test_c10_an_fp32_checkpoint_is_not_read_into_bf16_state(tmp_path: Path) -> None:
    model, optimizer, manager = build()
    train(model, optimizer, steps=range(1), use_spare=lambda _: True)
    dcp.save({"optimizer": manager}, checkpoint_id=tmp_path)
    bf16, bf16_optimizer, target = build(dtype=torch.bfloat16)
    problems = misfits({"optimizer": target}, tmp_path)
    names = sorted(dict(bf16.named_parameters()))
    assert [line.split(":")[0] for line in problems] == [
        f"optimizer.state.{name}.{key}" for name in names for key in ("exp_avg", "exp_avg_sq")
    ]
    assert not bf16_optimizer.state
    dcp.load(
        {"optimizer": target}, checkpoint_id=tmp_path, planner=swapckpt.StrictLoadPlanner(allow_cast=True)
    )
    loaded = bf16_optimizer.state[bf16.head.weight]["exp_avg"]
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded, optimizer.state[model.head.weight]["exp_avg"].bfloat16())


def test_a_partial_load_leaves_what_is_missing_alone_but_checks_the_rest(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3), "b": torch.ones(2)}, checkpoint_id=tmp_path)
    states = {"a": torch.zeros(3), "new": torch.full((2,), 5.0)}
    assert misfits(states, tmp_path) == ["new: missing"]
    dcp.load(states, checkpoint_id=tmp_path, planner=swapckpt.StrictLoadPlanner(allow_partial=True))
    assert states["a"].tolist() == [1, 1, 1]
    assert states["new"].tolist() == [5, 5]
    states["b"] = torch.zeros(9)
    assert misfits(states, tmp_path, allow_partial=True) == [
        "b: expected torch.float32 [9], found torch.float32 [2]"
    ]


def test_tensors_and_plain_values_are_told_apart(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3), "b": 7}, checkpoint_id=tmp_path)
    assert misfits({"a": 1, "b": torch.ones(1)}, tmp_path) == [
        "a: expected a value that is not a tensor, found torch.float32 [3]",
        "b: expected torch.float32 [1], found a value that is not a tensor",
    ]


def test_a_learning_rate_that_is_a_tensor_only_on_one_side(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with_float = swapckpt.StateManager(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    with_tensor = swapckpt.StateManager(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1)))
    dcp.save({"optimizer": with_float}, checkpoint_id=tmp_path)
    assert misfits({"optimizer": with_tensor}, tmp_path) == [
        "optimizer.param_groups.0.lr: expected torch.float32 [], found a value that is not a tensor"
    ]


def test_a_checkpoint_that_fits_is_read_as_stock_reads_it(tmp_path: Path) -> None:
    model, optimizer, manager = build()
    train(model, optimizer, steps=range(2))
    dcp.save({"model": model, "optimizer": manager}, checkpoint_id=tmp_path)
    resumed, resumed_optimizer, target = build()
    dcp.load(
        {"model": resumed.state_dict(), "optimizer": target},
        checkpoint_id=tmp_path,
        planner=swapckpt.StrictLoadPlanner(),
    )
    assert_same_bits(contents(resumed, resumed_optimizer), contents(model, optimizer))


# ------------------------------------------------------------------ load_state_dict


def problems_of(manager: swapckpt.StateManager, state_dict: dict[str, object]) -> list[str]:
    with pytest.raises(SchemaError) as caught:
        manager.load_state_dict(state_dict)
    return lines(caught.value)


@pytest.mark.parametrize("config", [CONFIG, None], ids=["swapped", "managed"])
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_c16_load_state_dict_lists_everything_and_changes_nothing(
    config: swapckpt.SwapConfig | None, stepped: bool, flat: bool
) -> None:
    source_model, source_optimizer, source = build(config=None, flat=flat)
    train(source_model, source_optimizer, steps=range(2), use_spare=lambda _: True)
    exported = source.state_dict()
    state = exported if flat else exported["state"]
    assert isinstance(state, dict)

    def change(name: str, key: str, value: object) -> None:
        where, entry = (state, f"state.{name}.{key}") if flat else (state.setdefault(name, {}), key)
        if value is None:
            del where[entry]
        else:
            where[entry] = value

    change("head.weight", "exp_avg", torch.ones(3, 5))
    change("head.weight", "step", None)
    change("head.bias", "exp_avg", torch.ones(3, dtype=torch.bfloat16))
    change("head.bias", "exp_avg_sq", 3.0)
    change("head.bias", "max_exp_avg_sq", torch.ones(3))
    change("tail.weight", "exp_avg", torch.ones(3))
    for key in ("step", "exp_avg", "exp_avg_sq"):
        change("spare.bias", key, None)
    if not flat:
        del state["spare.bias"]

    model, optimizer, manager = build(config=config)
    if stepped:
        train(model, optimizer, steps=range(1), use_spare=lambda _: True)
    before = contents(model, optimizer)
    settings = [dict(group) for group in optimizer.param_groups]
    optimizer.param_groups[0]["lr"] = settings[0]["lr"] = 0.5
    unexpected = (
        "state.tail.weight.exp_avg: unexpected, not state.<fqn>.<key> of a known parameter"
        if flat
        else "tail.weight: unexpected, no optimizer holds this parameter"
    )
    assert problems_of(manager, exported) == sorted(
        [
            "head.bias.exp_avg: expected torch.float32, found torch.bfloat16",
            "head.bias.exp_avg_sq: expected a tensor, found float",
            "head.bias.max_exp_avg_sq: unexpected, the optimizer has ['exp_avg', 'exp_avg_sq', 'step']",
            "head.weight.exp_avg: expected shape [3, 6], found [3, 5]",
            "head.weight.step: missing",
            "spare.bias: no state, expected ['exp_avg', 'exp_avg_sq', 'step']",
            unexpected,
        ]
    )
    assert_same_bits(contents(model, optimizer), before)
    assert [dict(group) for group in optimizer.param_groups] == settings
    train(model, optimizer, steps=range(1, 2))  # and nothing hinders the next step


def test_state_of_parameters_that_no_optimizer_holds_is_not_dropped_silently() -> None:
    """The whole model was trained; now only its head is. Its name is known, but it has no place to go."""
    model, optimizer, manager = build(config=None)
    train(model, optimizer, steps=range(1))
    exported = manager.state_dict()
    head_only = swapckpt.StateManager(model, torch.optim.AdamW(model.head.parameters()), CONFIG)
    problems = problems_of(head_only, exported)
    held = {"head.weight", "head.bias"}
    assert problems == [
        f"{name}: unexpected, no optimizer holds this parameter"
        for name in sorted(dict(model.named_parameters()).keys() - held)
    ]


def test_a_mapping_that_is_no_optimizer_state_is_refused() -> None:
    _, _, manager = build()
    assert problems_of(manager, {"epoch": 3})[0].startswith("blocks.0.down.weight: no state")
    assert "epoch: unexpected, not state.<fqn>.<key> of a known parameter" in problems_of(
        manager, {"epoch": 3}
    )


def test_settings_are_required_for_every_parameter_unless_allowed() -> None:
    model, optimizer, manager = build()
    train(model, optimizer, steps=range(1))
    exported = manager.state_dict()
    groups = exported["param_groups"]
    assert isinstance(groups, list)
    groups[0]["params"] = [name for name in groups[0]["params"] if name != "head.bias"]
    groups[0]["lr"] = 0.25
    assert problems_of(manager, exported) == ["param_groups: no settings for ['head.bias']"]
    assert optimizer.param_groups[0]["lr"] == 0.01
    manager.load_state_dict(exported, allow_missing=True)
    assert optimizer.param_groups[0]["lr"] == 0.25


# ------------------------------------------------------------------ torch's own load_state_dict


def test_torchs_own_load_is_checked_too() -> None:
    model, optimizer, _ = build()
    train(model, optimizer, steps=range(1), use_spare=lambda _: True)
    saved = optimizer.state_dict()
    first = saved["state"][0]
    saved["state"][0] = {**first, "exp_avg": first["exp_avg"].bfloat16(), "exp_avg_sq": torch.ones(2)}
    before = contents(model, optimizer)
    with pytest.raises(SchemaError) as caught:
        optimizer.load_state_dict(saved)
    assert lines(caught.value) == [
        "blocks.0.up.weight.exp_avg: expected torch.float32, found torch.bfloat16",
        "blocks.0.up.weight.exp_avg_sq: expected shape [12, 6], found [2]",
    ]
    assert_same_bits(contents(model, optimizer), before)


@pytest.mark.parametrize("broken", [{"state": {}}, {"state": {}, "param_groups": [{"params": [0, 1]}]}])
def test_torchs_own_load_of_other_groups_is_refused(broken: dict[str, object]) -> None:
    model, optimizer, _ = build()
    train(model, optimizer, steps=range(1))
    before = contents(model, optimizer)
    with pytest.raises(SchemaError):
        optimizer.load_state_dict(broken)
    assert_same_bits(contents(model, optimizer), before)
    train(model, optimizer, steps=range(1, 2))
