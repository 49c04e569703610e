"""The accelerator device does what the protocol says, in every schedule; so do optimizers on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import optim

from swapckpt.device import AcceleratorDevice
from swapckpt.testing import DeviceSuite, OptimizerSuite
from tests import simaccel as sim

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Parameter
    from torch.optim import Optimizer

    from swapckpt.device import Device

SCHEDULES = [sim.EAGER, sim.LAZY, *sim.masks(3), *sim.seeds(3)]  # compute, load and offload stream


def factory(schedule: sim.Schedule) -> Callable[[], Device]:
    sim.use(schedule)
    return lambda: AcceleratorDevice(torch.device("sim:0"))


class TestAcceleratorDevice(DeviceSuite):
    @pytest.fixture(params=SCHEDULES, ids=str)
    def device_factory(self, request: pytest.FixtureRequest) -> Callable[[], Device]:
        return factory(request.param)


@pytest.mark.parametrize("cls", [optim.AdamW, optim.Adafactor, optim.SGD])
class TestOptimizers(OptimizerSuite):
    @pytest.fixture(params=[sim.LAZY, *sim.seeds(1)], ids=str)
    def device_factory(self, request: pytest.FixtureRequest) -> Callable[[], Device]:
        return factory(request.param)

    @pytest.fixture
    def optimizer_factory(self, cls: type[Optimizer]) -> Callable[[list[Parameter]], Optimizer]:
        return lambda params: cls(params, lr=0.01, foreach=True)  # type: ignore[call-arg]
