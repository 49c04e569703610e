"""Tools for those who test code that swaps, and for authors of devices: not needed to train."""

from __future__ import annotations

from swapckpt.testing.checked import CheckedDevice, WatchedGate
from swapckpt.testing.races import Race, RaceDetector
from swapckpt.testing.suites import DeviceSuite, FilesSuite, OptimizerSuite

__all__ = [
    "CheckedDevice",
    "DeviceSuite",
    "FilesSuite",
    "OptimizerSuite",
    "Race",
    "RaceDetector",
    "WatchedGate",
]
