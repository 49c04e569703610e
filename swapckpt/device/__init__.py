"""Devices that swapping runs on: one protocol, the CPU and any ``torch.accelerator`` behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swapckpt.device.accelerator import AcceleratorDevice
from swapckpt.device.base import CopyPair, Device, Event, Ledger, Stream
from swapckpt.device.cpu import CpuDevice, Policy

if TYPE_CHECKING:
    import torch

__all__ = [
    "AcceleratorDevice",
    "CopyPair",
    "CpuDevice",
    "Device",
    "Event",
    "Ledger",
    "Policy",
    "Stream",
    "device_for",
]


def device_for(device: torch.device, *, timeout_secs: float) -> Device:
    """The device that parameters on ``device`` are swapped through."""
    if device.type == "cpu":
        return CpuDevice(timeout_secs=timeout_secs)
    return AcceleratorDevice(device, timeout_secs=timeout_secs)
