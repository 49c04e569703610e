"""Optimizers that keep state on owners by themselves, and bring it to all ranks when asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import swapckpt
from swapckpt.errors import ConfigError, PhaseError, UnsupportedOptimizerError
from tests.manager.training import assert_same_bits, contents
from tests.ranks.test_full_state import flattened, local_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.multirank import RankRunner


class OwnerSGD(torch.optim.SGD):
    """Parameter ``i`` is stepped by rank ``i % world_size``, which sends it to the others; as state is."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        group = dist.group.WORLD
        self._param_to_broadcast_info = {
            param: ((index % dist.get_world_size(),), (group,)) for index, param in enumerate(params)
        }
        self.trouble: str | None = None
        self.calls: list[str] = []

    def _state_keys_for_checkpoint_broadcast(self) -> tuple[str, ...]:
        return ("momentum_buffer",)

    @torch.no_grad()
    def step(self, closure: object = None) -> object:  # type: ignore[override]
        (group,) = self.param_groups
        params = group["params"]
        group["params"] = [param for param in params if self.owner_of(param) == dist.get_rank()]
        result = super().step(closure)
        group["params"] = params
        for param in params:
            dist.broadcast(param.data, self.owner_of(param))
        return result

    def owner_of(self, param: nn.Parameter) -> int:
        return self._param_to_broadcast_info[param][0][0]

    def _broadcast_state_fused_for_ckpt(self) -> None:
        self.calls.append("broadcast")
        if self.trouble == "broadcast":
            raise RuntimeError("the broadcast failed")
        for param in self._param_to_broadcast_info:
            dist.broadcast(self.state[param]["momentum_buffer"], self.owner_of(param))

    def cleanup_synced_state(self) -> None:
        self.calls.append("cleanup")
        if self.trouble == "cleanup":
            raise RuntimeError("the clean-up failed")
        for param in self._param_to_broadcast_info:
            if self.owner_of(param) != dist.get_rank():
                self.state.pop(param, None)


def build(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5, dtype=torch.bfloat16), nn.Linear(5, 3))
    return model, make(list(model.parameters()))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        for index, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, step + 0.1 * index)
        optimizer.step()


def show_foreign(path: Path, config: swapckpt.SwapConfig | None) -> list[str]:
    plain_model, plain = build(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    train(plain_model, plain)
    expected = flattened(swapckpt.StateManager(plain_model, plain).state_dict())
    model, optimizer = build(OwnerSGD)
    assert isinstance(optimizer, OwnerSGD)
    manager = swapckpt.StateManager(model, optimizer, config)
    with pytest.raises(PhaseError, match=r"before the first step; .*\n  - parameter 0: momentum_buffer"):
        manager.full_state().__enter__()
    with pytest.raises(UnsupportedOptimizerError, match="not known before its first step"):
        manager.state_dict()
    assert optimizer.calls == ["cleanup"]
    train(model, optimizer)
    own = local_state(optimizer)
    with manager.full_state() as state:
        if config is not None:
            with pytest.raises(PhaseError, match="showing the state of all ranks"):
                optimizer.step()
        assert_same_bits(flattened(state), expected)
        assert_same_bits(flattened(manager.state_dict()), expected)
    assert local_state(optimizer) == own
    assert optimizer.calls == ["cleanup", "broadcast", "cleanup"]
    streamed = {
        f"{name}.{key}": value
        for part in manager.iter_full_state()
        for name, values in part.items()
        for key, value in values.items()
    }
    assert_same_bits(streamed, expected)
    for trouble in ("broadcast", "cleanup"):
        optimizer.trouble = trouble
        with pytest.raises(RuntimeError, match="failed"), manager.full_state():
            pass
        assert local_state(optimizer) == own
    optimizer.trouble = None
    assert optimizer.calls[-1] == "cleanup"
    with pytest.raises(ConfigError, match=r"state_broadcasts names \['adam'\]"):
        swapckpt.StateManager(model, optimizer, state_broadcasts={"adam": swapckpt.FusedBroadcast(optimizer)})
    dcp.save({"optimizer": manager}, checkpoint_id=path)
    exported = manager.state_dict()["state"]
    fresh_model, fresh = build(OwnerSGD)
    train(fresh_model, fresh)
    fresh_manager = swapckpt.StateManager(fresh_model, fresh, config)
    assert isinstance(exported, dict)
    fresh_manager.load_state_dict({**manager.state_dict(), "state": {}}, allow_missing=True)
    assert local_state(fresh) == []
    train(fresh_model, fresh)
    dcp.load({"optimizer": fresh_manager}, checkpoint_id=path)
    assert_same_bits(flattened(fresh_manager.state_dict()), flattened({"state": exported}))
    return list(exported)


@pytest.mark.parametrize("config", [None, swapckpt.SwapConfig(min_numel=1, swap_times=2)])
def test_a_fused_broadcast_is_driven_through_a_window(
    run_ranks: RankRunner, tmp_path: Path, config: swapckpt.SwapConfig | None
) -> None:
    ranks = run_ranks(2, show_foreign, tmp_path / "checkpoint", config)
    assert ranks == [["0.weight", "1.weight"], ["0.bias", "1.bias"]]
    model, optimizer = build(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    dcp.load({"optimizer": swapckpt.StateManager(model, optimizer)}, checkpoint_id=tmp_path / "checkpoint")
    plain_model, plain = build(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    train(plain_model, plain)
    names = dict(model.named_parameters())
    found, expected = contents(model, optimizer), contents(plain_model, plain)
    assert_same_bits(
        {key: value for key, value in found.items() if key not in names},
        {key: value for key, value in expected.items() if key not in names},
    )
