"""A window on the state of all owners: what it shows, what it costs, and that it leaves nothing behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import swapckpt
from swapckpt.errors import PhaseError, ReplicaError
from swapckpt.optimizer import swap_of
from tests.core.devices import FailingDevice
from tests.manager.training import assert_same_bits
from tests.ranks.training import CONFIG, Twins, backward, build, local

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

    from tests.multirank import RankRunner

BUFFER_NBYTES = 1024
"""Smaller than the largest tensors, which go in pieces."""


def flattened(state_dict: Mapping[str, object]) -> dict[str, Any]:
    state = state_dict["state"]
    assert isinstance(state, dict)
    return {f"{name}.{key}": value for name, values in state.items() for key, value in values.items()}


def local_state(optimizer: Optimizer) -> list[tuple[int, list[str]]]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [(at, list(optimizer.state[each])) for at, each in enumerate(params) if each in optimizer.state]


def show(layout: str, kind: str, dtype: torch.dtype) -> int:
    """Before ``spare`` has state, and with all of it."""
    twins = Twins(layout, kind, dtype=dtype)
    plain = swapckpt.StateManager(twins.plain_model, twins.plain)
    own: list[tuple[int, list[str]]] = []
    for steps in (range(2), range(2, 4)):
        twins.train(steps)
        own, memory = local_state(twins.optimizer), twins.manager.memory()
        with twins.manager.full_state(buffer_nbytes=BUFFER_NBYTES) as state:
            assert_same_bits(flattened(state), flattened(plain.state_dict()))
            assert_same_bits(flattened(twins.manager.state_dict()), flattened(plain.state_dict()))
            assert local_state(twins.optimizer) == local_state(twins.plain)
            assert twins.manager.memory().host_nbytes > memory.host_nbytes
            for refused in (twins.optimizer.step, lambda: twins.manager.load_state_dict({})):
                with pytest.raises(PhaseError, match="showing the state of all ranks"):
                    refused()
            with pytest.raises(PhaseError), twins.manager.full_state():
                pass
        del state
        assert local_state(twins.optimizer) == own
        after = twins.manager.memory()
        assert (after.host_nbytes, after.device_nbytes) == (memory.host_nbytes, 0)
        with pytest.raises(KeyError, match="the consumer"), twins.manager.full_state():
            raise KeyError("the consumer")
        assert local_state(twins.optimizer) == own
        assert twins.manager.memory().host_nbytes == memory.host_nbytes
    twins.train(range(4, 6))
    twins.assert_same()
    return len(own)


@pytest.mark.parametrize(
    ("layout", "kind", "dtype"),
    [("hsdp", "AdamW-amsgrad", torch.float32), ("ddp", "AdamW-fused", torch.bfloat16)],
)
def test_every_rank_sees_everything(
    run_ranks: RankRunner, layout: str, kind: str, dtype: torch.dtype
) -> None:
    owned = run_ranks(4, show, layout, kind, dtype)
    assert sum(owned) == {"hsdp": 2, "ddp": 1}[layout] * 10


def pass_on() -> list[int]:
    """Two replicate dimensions: what an owner has goes along one of them, and then along the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    model = torch.nn.Module()
    for rows in (7, 6, 5, 4):
        whole = distribute_tensor(torch.ones(rows, 50), mesh, [Replicate(), Replicate()])
        model.register_parameter(f"w{rows}", torch.nn.Parameter(whole))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = swapckpt.StateManager(model, optimizer, CONFIG)
    for param in model.parameters():
        param.grad = torch.full_like(param, float(len(param)))
    optimizer.step()
    with manager.full_state(buffer_nbytes=BUFFER_NBYTES) as state:
        shown = flattened(state)
        assert {key: (value.shape, value.placements) for key, value in shown.items()} == {
            f"w{rows}.momentum_buffer": ((rows, 50), (Replicate(), Replicate())) for rows in (7, 6, 5, 4)
        }
        return [int(local(value).unique()) for _, value in sorted(shown.items())]


def test_state_is_passed_on_along_every_replicate_dimension(run_ranks: RankRunner) -> None:
    assert run_ranks(4, pass_on) == [[4, 5, 6, 7]] * 4


def stream_it(layout: str) -> tuple[int, int]:
    twins = Twins(layout, "AdamW-amsgrad")
    twins.train(range(4))
    plain = swapckpt.StateManager(twins.plain_model, twins.plain)
    own, before = local_state(twins.optimizer), twins.manager.memory().host_nbytes
    twins.manager.reset_peak_memory()
    found: dict[str, object] = {}
    values: dict[str, Any] = {}
    value: Any = None
    part: dict[str, dict[str, Any]]
    for part in twins.manager.iter_full_state(buffer_nbytes=BUFFER_NBYTES):
        for name, values in part.items():
            for key, value in values.items():
                assert f"{name}.{key}" not in found
                found[f"{name}.{key}"] = value.clone()
    del part, values, value  # they hold the last part
    assert_same_bits(found, flattened(plain.state_dict()))
    memory = twins.manager.memory()
    assert memory.host_nbytes == before
    assert memory.device_peak_nbytes <= BUFFER_NBYTES
    for part in twins.manager.iter_full_state(buffer_nbytes=BUFFER_NBYTES):
        del part
        if dist.get_rank() == 1:
            break
    assert local_state(twins.optimizer) == own
    twins.train(range(4, 6))
    twins.assert_same()
    return memory.host_peak_nbytes - before, before


@pytest.mark.parametrize("layout", ["hsdp", "ddp"])
def test_streaming_holds_two_parts_at_most(run_ranks: RankRunner, layout: str) -> None:
    """A part is one tensor here: at most a page more than the largest, which has 1152 bytes."""
    for extra_nbytes, _ in run_ranks(4, stream_it, layout):
        assert 0 < extra_nbytes <= 2 * 4096


def run_out_of_memory() -> tuple[str, int]:
    model, net, optimizer = build("ddp", "AdamW")
    device = FailingDevice("thread")
    manager = swapckpt.StateManager(model, optimizer, CONFIG, device=device)
    backward(model, net, 0)
    optimizer.step()
    own, before = local_state(optimizer), manager.memory()
    if dist.get_rank() == 2:
        device.allocations_left = 0
    failure = MemoryError if dist.get_rank() == 2 else ReplicaError
    with pytest.raises(failure) as error, manager.full_state():
        pass
    assert local_state(optimizer) == own
    assert manager.memory().host_nbytes == before.host_nbytes
    with manager.full_state() as state:
        keys = len(flattened(state))
    optimizer.step()
    assert swap_of(optimizer).failure is None
    return str(error.value), keys


def test_a_rank_without_memory_stops_all_and_nothing_is_changed(run_ranks: RankRunner) -> None:
    for rank, (message, keys) in enumerate(run_ranks(4, run_out_of_memory)):
        if rank != 2:
            assert message.startswith("Rank 2 could not allocate a device buffer for the full state.")
        assert keys == 3 * 10
