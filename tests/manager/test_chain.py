"""Muon for matrices, AdamW for the rest, one StateManager over both: sharded, saved, resumed, snapshotted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import swapckpt
from swapckpt.errors import FqnError
from tests.manager.training import CONFIG, Net, assert_same_bits, backward, contents

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch.optim import Optimizer

    from tests.multirank import RankRunner

Chain = dict[str, "Optimizer"]


def build(config: swapckpt.SwapConfig | None) -> tuple[Net, Chain, swapckpt.StateManager]:
    """A model over all ranks, and its optimizers by name; plain where there are no ranks."""
    model = Net(8)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    matrices = [param for param in model.parameters() if param.dim() == 2]
    vectors = [param for param in model.parameters() if param.dim() != 2]
    chain: Chain = {
        "muon": torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1),
        "adamw": torch.optim.AdamW(vectors, lr=0.01, foreach=False),
    }
    return model, chain, swapckpt.StateManager(model, chain, config)


def train(model: Net, chain: Chain, steps: Iterable[int]) -> None:
    for step in steps:
        backward(model, step, use_spare=step > 1)
        for each in chain.values():
            each.step()
            each.zero_grad()


def everything(model: Net, chain: Chain) -> dict[str, object]:
    found: dict[str, object] = {}
    for each in chain.values():
        found |= contents(model, each)
    return found


def save(model: Net, manager: swapckpt.StateManager, path: Path) -> None:
    dcp.save({"model": get_model_state_dict(model), "optimizer": manager}, checkpoint_id=path)


def load(model: Net, manager: swapckpt.StateManager, path: Path) -> None:
    parameters = get_model_state_dict(model)
    dcp.load({"model": parameters, "optimizer": manager}, checkpoint_id=path)
    set_model_state_dict(model, parameters)


def run_chain(path: Path) -> dict[str, object]:
    """Returns what was saved, in full."""
    plain, plain_chain, _ = build(None)
    train(plain, plain_chain, range(5))
    model, chain, manager = build(CONFIG)
    train(model, chain, range(3))
    exported = manager.state_dict()
    assert list(exported["state"]) == [  # type: ignore[call-overload]
        name for dim in (2, 1) for name, param in model.named_parameters() if param.dim() == dim
    ]
    assert [group["lr"] for group in exported["param_groups"]] == [0.02, 0.01]  # type: ignore[attr-defined]
    save(model, manager, path)
    saved = everything(model, chain)
    with manager.snapshot() as snapshot:
        before = _momenta(snapshot.state_dict)
        copies = {name: value.clone() for name, value in before.items()}
        train(model, chain, range(3, 5))
        assert_same_bits(before, copies)
    assert_same_bits(everything(model, chain), everything(plain, plain_chain))
    assert manager.memory().device_nbytes == 0

    resumed, resumed_chain, resumed_manager = build(CONFIG)
    load(resumed, resumed_manager, path)
    assert_same_bits(everything(resumed, resumed_chain), saved)
    train(resumed, resumed_chain, range(3, 5))
    assert_same_bits(everything(resumed, resumed_chain), everything(plain, plain_chain))
    return saved


def _momenta(state_dict: dict[str, object]) -> dict[str, torch.Tensor]:
    state = state_dict["state"]
    assert isinstance(state, dict)
    return {
        name: values.get("momentum_buffer", values.get("exp_avg")).to_local()
        for name, values in state.items()
    }


def test_sharded_chain_equals_unswapped_and_resumes(run_ranks: RankRunner, tmp_path: Path) -> None:
    saved = run_ranks(2, run_chain, tmp_path)[0]
    model, chain, manager = build(CONFIG)  # one process now
    load(model, manager, tmp_path)
    assert_same_bits(everything(model, chain), saved)


def test_a_parameter_in_both_is_an_error_that_names_both() -> None:
    model = Net(8)
    chain = {
        "muon": torch.optim.Muon([model.head.weight]),
        "adamw": torch.optim.AdamW(model.parameters()),
    }
    with pytest.raises(FqnError, match=r"head.weight: held by optimizers 'muon' and 'adamw'"):
        swapckpt.StateManager(model, chain, CONFIG)
    assert not any(swapckpt.is_swapped(each) for each in chain.values())
