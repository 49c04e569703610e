"""Same numbers for whatever hypothesis draws: shapes, groups, missing gradients, splits and schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import optim

from swapckpt import SwapConfig
from swapckpt.device import CpuDevice, Policy
from tests.core.training import Recipe, Twins

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 5

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (optim.ASGD, {"t0": 2, "foreach": False}),
    (optim.Adadelta, {"foreach": True}),
    (optim.Adafactor, {}),
    (optim.Adagrad, {"fused": True}),
    (optim.Adam, {"foreach": True, "amsgrad": True}),
    (optim.AdamW, {"fused": True}),
    (optim.AdamW, {"foreach": False, "amsgrad": True}),
    (optim.Adamax, {"foreach": True}),
    (optim.NAdam, {"foreach": False}),
    (optim.RAdam, {"foreach": True}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True, "foreach": False}),
    (optim.Rprop, {"foreach": False}),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.3, "foreach": False}),
]

sizes = st.integers(0, 9)
shapes = st.one_of(
    st.just(()),
    st.tuples(sizes),
    st.tuples(sizes, sizes),
    st.tuples(st.just(1), sizes),
    st.tuples(sizes, st.just(1)),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
)
configs = st.builds(
    SwapConfig,
    swap_times=st.integers(1, 8),
    min_numel=st.sampled_from([0, 1, 6, 30]),
    packed=st.booleans(),
    staging_buffers=st.integers(2, 4),
    release_staging=st.booleans(),
)
devices = st.builds(CpuDevice, st.sampled_from(Policy), seed=st.integers(0, 9))


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    cls, options = draw(st.sampled_from(OPTIMIZERS))
    drawn = draw(st.lists(shapes, min_size=1, max_size=6))
    if cls is optim.Adafactor:  # divides by the number of elements
        drawn = [tuple(max(1, size) for size in shape) for shape in drawn]
    matrices = [index for index, shape in enumerate(drawn) if len(shape) == 2]
    owners = draw(st.lists(st.integers(0, 2), min_size=len(drawn), max_size=len(drawn)))
    return Recipe(
        cls=cls,
        options=options,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        shapes=tuple(drawn),
        transposed=tuple(draw(st.sets(st.sampled_from(matrices)))) if matrices else (),
        groups=tuple(
            tuple(index for index, owner in enumerate(owners) if owner == group) for group in range(3)
        ),
    )


@st.composite
def gradients(draw: st.DrawFn) -> Callable[[int, int], bool]:
    """Which of at most six parameters have gradients, per step."""
    rows = draw(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=STEPS, max_size=STEPS))

    def active(step: int, index: int) -> bool:
        return rows[step][index]

    return active


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    recipe=recipes(),
    config=configs,
    device=devices,
    active=gradients(),
    steps_before=st.integers(0, 2),
    frozen=st.sets(st.integers(0, 5), max_size=2),
    frozen_from=st.integers(0, STEPS),
)
def test_equals_the_unswapped_optimizer(
    *,
    recipe: Recipe,
    config: SwapConfig,
    device: CpuDevice,
    active: Callable[[int, int], bool],
    steps_before: int,
    frozen: set[int],
    frozen_from: int,
) -> None:
    twins = Twins(recipe, config, device, steps_before=steps_before, active=active)
    for step in range(steps_before, STEPS):
        if step == frozen_from:
            for index in frozen & set(range(len(twins.params))):
                twins.plain_params[index].requires_grad_(False)
                twins.params[index].requires_grad_(False)
        twins.step()
        twins.check()
        if config.release_staging:
            assert device.ledger.device_nbytes == 0
        assert device.ledger.device_peak_nbytes <= (
            config.staging_buffers * twins.swap.table.largest_batch_nbytes
        )
