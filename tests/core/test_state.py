"""One truth: where each state tensor is at every moment of a step, and what is swapped at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

from swapckpt import SwapConfig
from swapckpt.device import CpuDevice
from swapckpt.optimizer import is_swapped, swap_of
from swapckpt.plan import align_up
from swapckpt.state import Residency, byte_view, ineligibility, tensor_spec
from tests.core.training import Recipe, Twins, bits, shifting

POLICIES = ["inline", "thread", "lazy", "random"]
CPU = torch.device("cpu")

# ------------------------------------------------------------------------------------------ what is swapped


def shared_storage() -> torch.Tensor:
    return torch.zeros(200)[:100]


class Quantised(torch.Tensor):
    """A tensor subclass: who knows where its bytes are."""


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(100),
        torch.zeros(10, 10).t(),
        torch.zeros(1, 100),
        torch.zeros(100, 1).t(),
        torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.zeros(100, dtype=torch.bfloat16),
        torch.zeros(100, dtype=torch.float8_e4m3fn),
        torch.nn.Parameter(torch.zeros(100), requires_grad=False),
    ],
    ids=lambda value: f"{value.dtype}{list(value.shape)}{value.stride()}",
)
def test_dense_floating_point_state_is_swapped(value: torch.Tensor) -> None:
    assert ineligibility(value, key="m", config=SwapConfig(min_numel=100), device=CPU) is None
    assert byte_view(value).nbytes == value.nbytes


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (3, "not a tensor"),
        (None, "not a tensor"),
        (torch.zeros(99), "fewer than min_numel=100"),
        (torch.zeros(100, dtype=torch.int64), "not a dense floating-point tensor"),
        (torch.zeros(100, dtype=torch.complex64), "not a dense floating-point tensor"),
        (torch.zeros(100, 100).to_sparse(), "not a dense floating-point tensor"),
        (shared_storage(), "not dense, or not the only tensor of its storage"),
        (torch.zeros(1).expand(100), "not dense"),
        (torch.zeros(20, 10)[:, ::2], "not dense"),
        (torch.zeros(100).as_strided((10, 10), (5, 1)), "not dense"),
        (torch.nn.Parameter(torch.zeros(100)), "rules of its own"),
        (torch.zeros(100).as_subclass(Quantised), "a Quantised with rules of its own"),
    ],
    ids=lambda value: "" if isinstance(value, str) else f"{type(value).__name__}",
)
def test_everything_else_stays_with_a_reason(value: Any, reason: str) -> None:
    found = ineligibility(value, key="m", config=SwapConfig(min_numel=100), device=CPU)
    assert found is not None
    assert reason in found


def test_state_keys_and_empty_tensors_stay_with_a_reason() -> None:
    config = SwapConfig(min_numel=0, state_keys=("v",))
    assert ineligibility(torch.zeros(4), key="m", config=config, device=CPU) == "not in state_keys"
    assert ineligibility(torch.zeros(4), key="v", config=config, device=CPU) is None
    assert "fewer than" in str(ineligibility(torch.zeros(0), key="v", config=config, device=CPU))


def test_the_bytes_of_a_tensor_are_in_memory_order() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    assert byte_view(tensor).data_ptr() == tensor.data_ptr()
    assert bits(byte_view(tensor).view(torch.float32)) == bits(torch.arange(6.0))
    assert tensor_spec(tensor).stride == (1, 3)


# ------------------------------------------------------------------------------------------------- the moves


class Watching(optim.AdamW):
    """Notes, inside the update of every batch, where all swapped state is and what the optimizer shows."""

    def step(self, closure: Any = None) -> Any:
        if not is_swapped(self):
            return super().step(closure)
        swap = swap_of(self)
        stepped = {param for group in self.param_groups for param in group["params"]}
        seen: list[dict[Residency, int]] = []
        for batch in swap.table.batches:
            counts: dict[Residency, int] = {}
            for entry in batch.params:
                for key, tensor in entry.tensors.items():
                    counts[tensor.residency] = counts.get(tensor.residency, 0) + 1
                    shown = self.state[entry.param][key]
                    if entry.param in stepped and entry.param.grad is not None:
                        assert tensor.residency is Residency.DEVICE
                        assert shown is tensor.bound
                        assert shown is not tensor.mirror
                    else:
                        assert shown is tensor.mirror
                    assert shown.untyped_storage().nbytes() >= shown.nbytes
            seen.append(counts)
        vars(self).setdefault("log", []).append(seen)
        return super().step(closure)


RECIPE = Recipe(cls=Watching, options={"foreach": False}, shapes=((40, 40),) * 5, groups=((0, 1, 2, 3, 4),))


def summary(seen: list[dict[Residency, int]]) -> list[str]:
    return ["+".join(residency.value for residency in counts) for counts in seen]


@pytest.mark.parametrize("policy", POLICIES)
def test_residency_at_every_update_of_a_step(policy: str) -> None:
    twins = Twins(RECIPE, SwapConfig(swap_times=5), CpuDevice(policy))
    twins.step()
    log = vars(twins.swapped)["log"]
    assert [summary(seen) for seen in log] == [
        ["", "", "", "", ""],
        ["offloading", "", "", "", ""],
        ["offloading", "offloading", "", "", ""],
        ["offloading", "offloading", "offloading", "", ""],
        ["offloading", "offloading", "offloading", "offloading", ""],
    ]
    log.clear()
    twins.step()
    assert [summary(seen) for seen in log] == [
        ["device", "loading", "loading", "host", "host"],
        ["offloading", "device", "loading", "loading", "host"],
        ["offloading", "offloading", "device", "loading", "loading"],
        ["offloading", "offloading", "offloading", "device", "loading"],
        ["offloading", "offloading", "offloading", "offloading", "device"],
    ]
    assert all(
        (tensor.residency, tensor.source, tensor.bound) == (Residency.HOST, None, None)
        for tensor in twins.swap.table.tensors()
    )
    assert all(batch.moving == [] for batch in twins.swap.table.batches)


@pytest.mark.parametrize("policy", POLICIES)
def test_state_without_a_gradient_stays_on_the_host(policy: str) -> None:
    twins = Twins(
        Recipe(cls=optim.AdamW, shapes=((40, 40),) * 4),
        SwapConfig(swap_times=2),
        CpuDevice(policy),
        active=lambda step, index: step == 0 or index != 1,
    )
    twins.step()
    still = list(twins.swap.table.entries[twins.params[1]].tensors.values())
    addresses = [tensor.host.data_ptr() for tensor in still]
    before = [bits(tensor.host) for tensor in still]
    loaded = twins.device.ledger.loaded_nbytes
    twins.step()
    # two runs, of 6400 bytes at multiples of 512: parameter 0, and parameters 2 and 3
    assert twins.device.ledger.loaded_nbytes - loaded == (6656 + 6400) + (3 * 6656 + 6400)
    assert [tensor.host.data_ptr() for tensor in still] == addresses
    assert [bits(tensor.host) for tensor in still] == before


def test_staging_is_gapless_in_the_order_of_the_host() -> None:
    twins = Twins(Recipe(cls=optim.AdamW, shapes=((40, 40), (50, 40), (60, 40))), SwapConfig(swap_times=1))
    twins.step()
    (batch,) = twins.swap.table.batches
    entries = batch.params
    batch.active = [entries[2], entries[0]]
    nbytes = twins.swap.table.place(batch)
    places = {(tensor.param, tensor.id.key): tensor.staging_offset_nbytes for tensor in batch.moving}
    first, third = align_up(1600 * 4), align_up(2400 * 4)
    assert places == {
        (twins.params[0], "exp_avg"): 0,
        (twins.params[0], "exp_avg_sq"): first,
        (twins.params[2], "exp_avg"): 2 * first,
        (twins.params[2], "exp_avg_sq"): 2 * first + third,
    }
    assert nbytes == 2 * first + 2 * third
    batch.active, batch.moving = [], []


# ---------------------------------------------------------------------------------------------- registration


def test_state_of_one_batch_that_appears_together_lies_in_one_segment() -> None:
    twins = Twins(Recipe(cls=optim.AdamW, shapes=((40, 40),) * 6), SwapConfig(swap_times=3))
    twins.step()
    for batch in twins.swap.table.batches:
        assert len(batch.segments) == 1
        assert len(batch.tensors) == 4
        assert batch.staged_nbytes == 4 * align_up(6400)
    assert twins.swap.table.largest_batch_nbytes == 4 * align_up(6400)
    assert twins.swap.table.swapped_nbytes == 12 * 6400


def test_an_export_before_the_first_step_keeps_batches_in_one_segment_whatever_comes_first() -> None:
    twins = Twins(Recipe(cls=optim.AdamW, shapes=((40, 40),) * 6), SwapConfig(swap_times=3), active=shifting)
    view = twins.swapped._swapped_state  # type: ignore[attr-defined]
    for param in twins.params:
        view.values(param)
    segments = [list(batch.segments) for batch in twins.swap.table.batches]
    assert [len(each) for each in segments] == [1, 1, 1]
    twins.step(6)
    twins.check()
    assert [list(batch.segments) for batch in twins.swap.table.batches] == segments


def test_names_tell_group_and_position_where_there_are_no_others() -> None:
    twins = Twins(Recipe(cls=optim.AdamW, shapes=((40, 40),) * 3))
    twins.step()
    names = [str(tensor.id) for tensor in twins.swap.table.tensors()]
    assert names == [
        f"group{group}.param{position}.{key}"
        for group, position in ((0, 0), (0, 1), (1, 0))
        for key in ("exp_avg", "exp_avg_sq")
    ]
