"""All optimizers of torch that can be stepped in batches, on a device that delays what nobody waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from torch import optim

from swapckpt.device import CpuDevice
from swapckpt.testing import OptimizerSuite
from tests.core.optimizers import Averaging
from tests.core.training import MATRICES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Parameter
    from torch.optim import Optimizer

    from swapckpt.device import Device

OPTIMIZERS = (
    *(optim.ASGD, optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax),
    *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
    Averaging,
)
OPTIONS = {optim.SGD: {"momentum": 0.9, "nesterov": True}, optim.RMSprop: {"momentum": 0.9, "centered": True}}


class OnTheCpu(OptimizerSuite):
    @pytest.fixture
    def device_factory(self) -> Callable[[], Device]:
        return lambda: CpuDevice("lazy")


@pytest.mark.parametrize("cls", OPTIMIZERS)
class TestElementwise(OnTheCpu):
    @pytest.fixture
    def optimizer_factory(self, cls: type[Optimizer]) -> Callable[[list[Parameter]], Optimizer]:
        return lambda params: cls(params, lr=0.01, **OPTIONS.get(cls, {}))  # type: ignore[call-arg]


class TestMuon(OnTheCpu):
    shapes = MATRICES

    @pytest.fixture
    def optimizer_factory(self) -> Callable[[list[Parameter]], Optimizer]:
        return lambda params: optim.Muon(params, lr=0.01)
