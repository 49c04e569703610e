"""The accelerator device does what the protocol says on the real torch_npu."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from swapckpt.device import AcceleratorDevice
from swapckpt.testing import DeviceSuite

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapckpt.device import Device


@pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format:UserWarning")
class TestAcceleratorDevice(DeviceSuite):
    @pytest.fixture
    def device_factory(self) -> Callable[[], Device]:
        return lambda: AcceleratorDevice(torch.device("npu:0"))
