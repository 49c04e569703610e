"""Conformance of an optimizer."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from swapckpt.device import CpuDevice
from swapckpt.manager import StateManager
from swapckpt.optimizer import release, swap_of, swap_optimizer
from swapckpt.testing.checked import CheckedDevice
from swapckpt.testing.races import RaceDetector
from swapckpt.testing.suites.run import CONFIGS, SHAPES, OptimizerFactory, Run, differences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from swapckpt.config import SwapConfig
    from swapckpt.device import Device


class OptimizerSuite:
    """What swapping must not change about an optimizer.

    Fixtures: ``optimizer_factory(params) -> Optimizer``, equal settings each time;
    ``device_factory() -> Device``, for example ``lambda: CpuDevice("lazy")``, which delays every copy as long
    as it may, so that an optimizer that keeps state tensors for itself is found.
    """

    shapes: tuple[tuple[int, ...], ...] = SHAPES
    """Of the parameters; an optimizer for matrices only gives its own."""

    def test_steps_equal_those_without_swapping(
        self, optimizer_factory: OptimizerFactory, device_factory: Callable[[], Device]
    ) -> None:
        for name, config in CONFIGS.items():
            plain, swapped = self._twins(optimizer_factory, device_factory(), config)
            for step in range(6):
                plain.step()
                swapped.step()
                wrong = differences(swapped, plain)
                assert not wrong, f"{name}, after step {step}: {wrong}"

    def test_state_that_exists_is_adopted_and_given_back(
        self, optimizer_factory: OptimizerFactory, device_factory: Callable[[], Device]
    ) -> None:
        device = device_factory()
        plain, swapped = (Run(optimizer_factory, device.device, self.shapes) for _ in range(2))
        for change in (
            lambda: swap_optimizer(swapped.optimizer, CONFIGS["packed"], device=device),
            lambda: release(swapped.optimizer),
            lambda: None,
        ):
            plain.step(2)
            swapped.step(2)
            change()
            assert not differences(swapped, plain)
        devices = {value.device for value in _tensors(swapped.optimizer.state) if value.numel() > 1}
        assert devices <= {device.device}

    def test_saved_state_is_continued_swapped_or_not(
        self, optimizer_factory: OptimizerFactory, device_factory: Callable[[], Device]
    ) -> None:
        for flat in (False, True):
            first = Run(optimizer_factory, device_factory().device, self.shapes)
            manager = StateManager(first.model, first.optimizer, CONFIGS["packed"], flat=flat)
            first.step(4)
            saved = copy.deepcopy(manager.state_dict())
            params = [param.detach().clone() for param in first.params]
            first.step(2)
            for config in (CONFIGS["each-2-buffers"], None):
                device = device_factory()
                other = Run(optimizer_factory, device.device, self.shapes)
                StateManager(
                    other.model, other.optimizer, config, device=device if config else None
                ).load_state_dict(saved)
                other.continue_from(params, 4)
                other.step(2)
                assert not differences(other, first), f"flat={flat}, {config}"

    def test_state_is_described_before_it_exists(
        self, optimizer_factory: OptimizerFactory, device_factory: Callable[[], Device]
    ) -> None:
        """A checkpoint is loaded into a fresh optimizer: what it offers is what a first step makes."""
        device = device_factory()
        run = Run(optimizer_factory, device.device, self.shapes)
        manager = StateManager(run.model, run.optimizer, CONFIGS["packed"], device=device)
        described = _geometry(manager.state_dict()["state"])
        run.step(3)  # every parameter has had a gradient
        assert described == _geometry(manager.state_dict()["state"])

    def test_a_group_that_is_added_is_swapped_too(
        self, optimizer_factory: OptimizerFactory, device_factory: Callable[[], Device]
    ) -> None:
        device = device_factory()
        runs = [Run(optimizer_factory, device.device, self.shapes, in_first_group=3) for _ in range(2)]
        swap_optimizer(runs[0].optimizer, CONFIGS["packed"], device=device)
        for run in runs:
            run.step(2)
            run.optimizer.add_param_group({"params": run.params[3:], "lr": 0.001})
            run.step(3)
        assert not differences(*runs)

    def test_a_copy_goes_its_own_way(
        self, optimizer_factory: OptimizerFactory, device_factory: Callable[[], Device]
    ) -> None:
        plain, swapped = self._twins(optimizer_factory, device_factory(), CONFIGS["packed"])
        plain.step(3)
        swapped.step(3)
        copied = copy.deepcopy(swapped)
        plain.step(2)
        swapped.step(2)
        assert not differences(swapped, plain)
        copied.step(2)
        assert not differences(copied, plain)

    def test_the_device_holds_no_state_between_steps(
        self, optimizer_factory: OptimizerFactory, device_factory: Callable[[], Device]
    ) -> None:
        device = device_factory()
        _, swapped = self._twins(optimizer_factory, device, CONFIGS["packed"])
        for _ in range(4):
            swapped.step()
            assert device.ledger.device_nbytes == 0
        largest_nbytes = swap_of(swapped.optimizer).table.largest_batch_nbytes
        assert device.ledger.device_peak_nbytes <= CONFIGS["packed"].staging_buffers * largest_nbytes

    def test_every_access_is_ordered(self, optimizer_factory: OptimizerFactory) -> None:
        """On the CPU, by a race detector: no luck with the schedule is involved."""
        detector = RaceDetector()
        device = CheckedDevice(detector, CpuDevice("inline"))
        _, swapped = self._twins(optimizer_factory, device, CONFIGS["each-2-buffers"])
        with detector.watching():
            for _ in range(4):
                swapped.step()
                for tensor in _tensors(swapped.optimizer.state):
                    detector.read(tensor, "a reader of optimizer.state")
        detector.check()

    def _twins(
        self, optimizer_factory: OptimizerFactory, device: Device, config: SwapConfig
    ) -> tuple[Run, Run]:
        plain, swapped = (Run(optimizer_factory, device.device, self.shapes) for _ in range(2))
        swap_optimizer(swapped.optimizer, config, device=device)
        return plain, swapped


def _tensors(state: Mapping[Tensor, Mapping[str, object]]) -> Iterator[Tensor]:
    for values in state.values():
        yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def _geometry(state: object) -> dict[tuple[str, str], object]:
    """Shape and dtype of tensors, type of everything else."""
    assert isinstance(state, dict)
    return {
        (name, key): (value.shape, value.dtype) if isinstance(value, torch.Tensor) else type(value)
        for name, values in state.items()
        for key, value in values.items()
    }
