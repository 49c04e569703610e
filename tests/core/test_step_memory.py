"""Idle is free; a step holds at most ``staging_buffers`` x the largest batch. Formulas on accounted bytes."""

from __future__ import annotations

import pytest
import torch
from torch import optim

from swapckpt import SwapConfig
from swapckpt.device import CpuDevice
from swapckpt.optimizer import swapped_state
from swapckpt.plan import align_up, partition
from tests.core.training import Recipe, Twins, shifting

EQUAL = ((32, 64),) * 8  # 8 KiB each, a multiple of the alignment
MIXED = ((40, 50), (7,), (64, 32), (2000,), (), (1, 1200), (33, 65), (100,), (90, 90))
ADAM_KEYS = 2  # exp_avg and exp_avg_sq


def batch_nbytes(recipe: Recipe, config: SwapConfig) -> list[int]:
    """Staging that each batch of an Adam needs, from shapes and settings alone."""
    numels = [torch.Size(shape).numel() for shape in recipe.shapes]
    itemsize = recipe.dtype.itemsize
    cuts = partition([numel * itemsize for numel in numels], config.swap_times)
    return [
        sum(
            ADAM_KEYS * align_up(numel * itemsize)
            for numel in numels[cut.start : cut.stop]
            if numel >= config.min_numel
        )
        for cut in cuts
    ]


def bound_nbytes(recipe: Recipe, config: SwapConfig) -> int:
    """What a step may hold at most."""
    return config.staging_buffers * max(batch_nbytes(recipe, config))


CONFIGS = {
    "3x16": SwapConfig(),
    "2x3": SwapConfig(swap_times=3, staging_buffers=2),
    "4x100": SwapConfig(swap_times=100, staging_buffers=4),
    "3x4-each": SwapConfig(swap_times=4, packed=False),
    "3x1": SwapConfig(swap_times=1),
}


@pytest.mark.parametrize("policy", ["inline", "thread", "lazy"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("shapes", [EQUAL, MIXED], ids=["equal", "mixed"])
def test_device_bytes_of_every_step(
    shapes: tuple[tuple[int, ...], ...], config: SwapConfig, policy: str
) -> None:
    recipe = Recipe(cls=optim.AdamW, shapes=shapes)
    twins = Twins(recipe, config, CpuDevice(policy))
    ledger, sizes = twins.device.ledger, batch_nbytes(recipe, config)
    buffers_used = {batch % config.staging_buffers for batch, nbytes in enumerate(sizes) if nbytes}
    for step in range(3):
        ledger.reset_peak()
        twins.step()
        assert ledger.device_nbytes == 0
        assert ledger.device_peak_nbytes <= bound_nbytes(recipe, config)
        if step > 0:  # state exists: every buffer has the size of the largest batch
            assert ledger.device_peak_nbytes == len(buffers_used) * max(sizes)


def test_the_first_step_holds_what_the_batches_in_flight_create() -> None:
    recipe = Recipe(cls=optim.AdamW, shapes=EQUAL)
    config = SwapConfig(swap_times=8, staging_buffers=2)
    twins = Twins(recipe, config, CpuDevice("lazy"))
    twins.step()
    assert twins.device.ledger.device_peak_nbytes == bound_nbytes(recipe, config)


def test_adopting_existing_state_holds_no_more_than_a_step() -> None:
    recipe = Recipe(cls=optim.AdamW, shapes=MIXED)
    config = SwapConfig(swap_times=4)
    twins = Twins(recipe, config, CpuDevice("thread"), steps_before=2)
    ledger = twins.device.ledger
    assert ledger.device_nbytes == 0
    assert 0 < ledger.device_peak_nbytes <= bound_nbytes(recipe, config)
    assert ledger.num_loads == 0


@pytest.mark.parametrize("exported", [False, True], ids=["", "after-export"])
@pytest.mark.parametrize("swap_times", [2, 4])
def test_state_created_late_comes_within_the_bound(swap_times: int, exported: bool) -> None:
    """Of every pair of parameters the second gets its first gradient in a later step: its state is created
    beside the staging buffer, and both together must not exceed what the batch needs from then on."""
    recipe = Recipe(cls=optim.AdamW, shapes=EQUAL)
    config = SwapConfig(swap_times=swap_times)
    twins = Twins(
        recipe, config, CpuDevice("lazy"), active=lambda step, index: index % 2 == 0 or step >= 2 + index // 4
    )
    if exported:  # an export before the first step reserves the mirrors of all parameters
        view = swapped_state(twins.swapped)
        assert all(view.values(param) for param in twins.params)
    ledger, bound = twins.device.ledger, bound_nbytes(recipe, config)
    for _ in range(6):
        ledger.reset_peak()
        twins.step()
        assert ledger.device_nbytes == 0
        assert ledger.device_peak_nbytes <= bound
    twins.check()


def test_changing_gradients_stay_within_the_bound() -> None:
    recipe = Recipe(cls=optim.AdamW, shapes=MIXED)
    config = SwapConfig(swap_times=3)
    twins = Twins(recipe, config, CpuDevice("random"), active=shifting)
    for _ in range(8):
        twins.step()
        assert twins.device.ledger.device_nbytes == 0
    assert twins.device.ledger.device_peak_nbytes <= bound_nbytes(recipe, config)


def test_kept_staging_buffers_are_all_that_an_idle_optimizer_holds() -> None:
    recipe = Recipe(cls=optim.AdamW, shapes=MIXED)
    config = SwapConfig(swap_times=4, staging_buffers=2, release_staging=False)
    twins = Twins(recipe, config, CpuDevice("thread"))
    held = bound_nbytes(recipe, config)
    twins.step(2)
    for _ in range(3):
        twins.step()
        assert twins.device.ledger.device_nbytes == held
    assert twins.device.ledger.device_peak_nbytes <= held


class CountingDevice(CpuDevice):
    """Counts allocations of staging buffers."""

    num_allocations = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.num_allocations += 1
        return super().allocate(nbytes)


@pytest.mark.parametrize("release_staging", [True, False])
def test_a_steady_step_allocates_each_staging_buffer_at_most_once(release_staging: bool) -> None:
    """Parameters too small to be swapped (biases, norms) share the batches: no state of theirs is to come, so
    no buffer is fitted to a batch, which would wait for the offload that is using it."""
    device = CountingDevice("thread")
    config = SwapConfig(swap_times=5, release_staging=release_staging)
    shapes = ((40, 50), (40,), (64, 32), (64,)) * 5 + ((70, 70), (70,))
    twins = Twins(Recipe(cls=optim.AdamW, shapes=shapes), config, device)
    twins.step(2)
    device.num_allocations = 0
    twins.step()
    assert device.num_allocations == (config.staging_buffers if release_staging else 0)


@pytest.mark.parametrize("steps_before", [0, 2], ids=["lazy-state", "existing-state"])
def test_host_bytes_are_bounded_by_the_slabs_growth(steps_before: int) -> None:
    shapes = ((256, 300),) * 12  # 300 KiB each
    config = SwapConfig(swap_times=6)
    twins = Twins(Recipe(cls=optim.AdamW, shapes=shapes), config, steps_before=steps_before)
    twins.step(2)
    state_nbytes = 2 * 12 * 256 * 300 * 4
    assert twins.swap.table.swapped_nbytes == state_nbytes
    ledger = twins.device.ledger
    assert state_nbytes <= ledger.host_nbytes <= 2 * state_nbytes + (1 << 20)
    before = ledger.host_nbytes
    twins.step(3)
    assert ledger.host_nbytes == ledger.host_peak_nbytes == before


def test_traffic_of_a_step_is_the_state_once_in_each_direction() -> None:
    recipe = Recipe(cls=optim.AdamW, shapes=EQUAL)
    config = SwapConfig(swap_times=4)
    twins = Twins(recipe, config)
    ledger = twins.device.ledger
    twins.step()
    assert (ledger.num_loads, ledger.loaded_nbytes) == (0, 0)
    assert ledger.offloaded_nbytes == twins.swap.table.swapped_nbytes
    loads, offloads = ledger.num_loads, ledger.num_offloads
    twins.step()
    assert (ledger.num_loads - loads, ledger.num_offloads - offloads) == (4, 4)  # one packed run a batch
    assert ledger.loaded_nbytes == twins.swap.table.swapped_nbytes
    assert ledger.offloaded_nbytes == 2 * twins.swap.table.swapped_nbytes


def test_per_tensor_transfers_move_the_same_bytes_in_one_copy_each() -> None:
    twins = Twins(Recipe(cls=optim.AdamW, shapes=EQUAL), SwapConfig(swap_times=4, packed=False))
    twins.step()
    twins.step()
    ledger = twins.device.ledger
    assert ledger.num_loads == ADAM_KEYS * len(EQUAL)
    assert ledger.loaded_nbytes == twins.swap.table.swapped_nbytes
