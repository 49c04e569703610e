"""``swapckpt doctor`` on an accelerator: what it has, and whether host memory can be used for copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swapckpt.tools.findings import Level
from swapckpt.tools.machine import look_at_machine

if TYPE_CHECKING:
    import pytest


def test_the_accelerator_and_its_pinned_memory_are_found() -> None:
    found = {finding.name: finding for finding in look_at_machine()}
    assert found["accelerator"].message == "2 x sim"
    assert found["pinning"].level is Level.OK
    assert found["pinning"].message.startswith("pinned memory can be allocated")
    assert "cpu:gloo,sim:" in found["collective reads"].advice


def test_a_device_without_pinned_memory_is_a_problem_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def refusing(*args: object, **options: object) -> torch.Tensor:
        if options.get("pin_memory"):
            raise RuntimeError("out of pinned memory")
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", refusing)
    found = {finding.name: finding for finding in look_at_machine()}["pinning"]
    assert (found.level, found.message) == (Level.PROBLEM, "failed: out of pinned memory")
