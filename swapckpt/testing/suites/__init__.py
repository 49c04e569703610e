"""Conformance suites: what swapckpt relies on in a device, an optimizer and a store, as tests to inherit.

    class TestMyDevice(DeviceSuite):
        @pytest.fixture
        def device_factory(self) -> Callable[[], Device]:
            return lambda: MyDevice(timeout_secs=5.0)

Each suite names the fixtures it wants; a factory that is called twice gives two independent things.
``pytest.register_assert_rewrite("swapckpt.testing.suites")`` in a ``conftest.py`` makes failures say more.
Nothing here imports pytest.
"""

from __future__ import annotations

from swapckpt.testing.suites.device import DeviceSuite
from swapckpt.testing.suites.files import FilesSuite
from swapckpt.testing.suites.optimizer import OptimizerSuite

__all__ = ["DeviceSuite", "FilesSuite", "OptimizerSuite"]
