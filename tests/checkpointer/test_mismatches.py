"""Checkpoints that do not fit what they are loaded into."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import swapckpt
from swapckpt.errors import SchemaError
from tests.checkpointer.jobs import SWAP, SYNC, saved

if TYPE_CHECKING:
    from pathlib import Path


def test_c10_another_dtype_is_an_error_that_lists_all_unless_casts_are_allowed(tmp_path: Path) -> None:
    states: dict[str, Any] = {"model": nn.Linear(3, 2), "data": {"big": torch.tensor([300, 5])}}
    with swapckpt.Checkpointer(tmp_path, states, SYNC) as checkpointer:
        checkpointer.save(1)
    small: dict[str, Any] = {
        "model": nn.Linear(3, 2).bfloat16(),
        "data": {"big": torch.zeros(2, dtype=torch.int8)},
    }
    before = small["model"].weight.detach().clone()
    with swapckpt.Checkpointer(tmp_path, small) as checkpointer:
        with pytest.raises(SchemaError) as caught:
            checkpointer.load()
        advice, *lines = str(caught.value).splitlines()
        assert "allow_cast=True converts" in advice
        assert "allow_partial" not in advice
        assert [line.split(":")[0] for line in lines] == [
            "  - data.big",
            "  - model.bias",
            "  - model.weight",
        ]
        assert "expected torch.int8 [2], found torch.int64 [2]" in lines[0]
        assert torch.equal(small["model"].weight, before)
        assert checkpointer.load(allow_cast=True) == 1
    assert torch.equal(small["model"].weight, states["model"].weight.bfloat16())


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_c16_everything_that_does_not_fit_is_listed_sorted(tmp_path: Path, flat: bool) -> None:
    saved(tmp_path, 1, flat=flat)
    model = nn.Module()
    model.up = nn.Linear(96, 100)
    model.extra = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    manager = swapckpt.StateManager(model, optimizer, SWAP, flat=flat)
    states = {"model": model, "optimizer": manager}
    with swapckpt.Checkpointer(tmp_path, states) as checkpointer:
        with pytest.raises(SchemaError) as caught:
            checkpointer.load()
        advice, *lines = str(caught.value).splitlines()
        assert "allow_partial=True leaves out" in advice
        assert "allow_cast" not in advice
        assert lines == sorted(lines)
        found = {line.strip(" -").split(": ")[0]: line.split(": ")[1] for line in lines}
        assert found["model.extra.weight"] == "missing"
        assert found["model.head.weight"] == "unexpected"
        assert found["model.up.weight"] == ("expected torch.float32 [100, 96], found torch.float32 [192, 96]")
        assert "found torch.float32 [192, 96]" in found["optimizer.state.up.weight.exp_avg"]
        manager.state_dict()  # nothing was changed, nothing refuses


def test_allow_partial_leaves_what_the_checkpoint_does_not_have(tmp_path: Path) -> None:
    first: dict[str, Any] = {"model": nn.Linear(3, 2), "gone": 1}
    with swapckpt.Checkpointer(tmp_path, first, SYNC) as checkpointer:
        checkpointer.save(1)
    second: dict[str, Any] = {"model": nn.Linear(3, 2), "new": {"n": 5}, "plain": 6}
    with swapckpt.Checkpointer(tmp_path, second) as checkpointer:
        with pytest.raises(SchemaError, match=r"new\.n: missing"):
            checkpointer.load()
        assert checkpointer.load(allow_partial=True) == 1
    assert torch.equal(second["model"].weight, first["model"].weight)
    assert second["new"] == {"n": 5}
    assert second["plain"] == 6
