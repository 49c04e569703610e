"""The CPU device does what the protocol says, under every policy."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from swapckpt.device import CpuDevice, Policy
from swapckpt.testing import DeviceSuite

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapckpt.device import Device


@pytest.mark.parametrize("policy", Policy)
class TestCpuDevice(DeviceSuite):
    @pytest.fixture
    def device_factory(self, policy: Policy) -> Callable[[], Device]:
        seeds = itertools.count()
        return lambda: CpuDevice(policy, seed=next(seeds))
