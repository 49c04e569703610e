"""Tools for those who test code that swaps, and for authors of devices: not needed to train."""

from __future__ import annotations

from swapckpt.testing.checked import CheckedDevice, WatchedGate
from swapckpt.testing.races import Race, RaceDetector

__all__ = ["CheckedDevice", "Race", "RaceDetector", "WatchedGate"]
