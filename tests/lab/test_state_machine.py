"""Any order of everything a training job does to its optimizer, against plain torch, equal as bits
throughout."""

from __future__ import annotations

import copy
import io
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

import swapckpt
from swapckpt import SwapConfig
from swapckpt.errors import RebindError, StepError
from swapckpt.manager import StateManager
from swapckpt.swap import Phase
from tests.core.devices import FailingDevice
from tests.core.training import Recipe, Twins, bits
from tests.lab.scenarios import tensors

if TYPE_CHECKING:
    from swapckpt import Snapshot

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"foreach": False, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "dampening": 0.3}),
    "NAdam": (torch.optim.NAdam, {"foreach": False}),
    "Adafactor": (torch.optim.Adafactor, {"foreach": False}),
    "Rprop": (torch.optim.Rprop, {"foreach": False}),
}


@dataclass(frozen=True)
class Saved:
    """A checkpoint of both twins: parameters, the plain state dict, and the manager's as bytes of a file."""

    params: list[torch.Tensor]
    plain: dict[str, Any]
    file: bytes
    num_groups: int
    steps: int


class Life(RuleBasedStateMachine):
    """adopt, step, partial gradients, new groups, snapshots under slow readers, save, load, failures,
    rebinding, release."""

    @initialize(
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        policy=st.sampled_from(["inline", "thread", "lazy", "random"]),
        swap_times=st.integers(1, 6),
        staging_buffers=st.integers(2, 4),
        packed=st.booleans(),
        spares=st.sampled_from([0, None]),
        steps_before=st.integers(0, 2),
        sliced=st.booleans(),
    )
    def begin(
        self,
        optimizer: str,
        policy: str,
        swap_times: int,
        staging_buffers: int,
        packed: bool,
        spares: int | None,
        steps_before: int,
        sliced: bool,
    ) -> None:
        cls, options = OPTIMIZERS[optimizer]
        self.config = SwapConfig(
            swap_times=swap_times,
            staging_buffers=staging_buffers,
            packed=packed,
            spare_nbytes=spares,
            split_oversized=None if sliced else False,
            min_slice_numel=1,
            min_numel=16,
            timeout_secs=20,
        )
        self.device = FailingDevice(policy, seed=5)
        self.mask = [True] * 32
        self.twins = Twins(
            Recipe(cls=cls, options=options, shapes=((20, 130), (7,), (33, 16), (500,))),
            self.config,
            self.device,
            steps_before=steps_before,
            active=lambda step, index: self.mask[(step + index) % len(self.mask)],
        )
        for each in (self.twins.plain, self.twins.swapped):
            each.defaults.setdefault("differentiable", False)  # as torch's own load_state_dict adds it
        self.readers: list[threading.Thread] = []
        self.problems: list[str] = []
        self.saved: Saved | None = None
        self._manage()

    def _manage(self) -> None:
        self.manager = StateManager(nn.ParameterList(self.twins.params), self.twins.swapped)

    @property
    def is_adopted(self) -> bool:
        return swapckpt.is_swapped(self.twins.swapped)

    @rule(mask=st.lists(st.booleans(), min_size=32, max_size=32), count=st.integers(1, 3))
    def step(self, mask: list[bool], count: int) -> None:
        self.mask = mask
        self.twins.step(count)

    @rule(rows=st.integers(1, 40))
    @precondition(lambda self: len(self.twins.params) < 7)
    def add_group(self, rows: int) -> None:
        self._join_readers()
        for params, optimizer in (
            (self.twins.plain_params, self.twins.plain),
            (self.twins.params, self.twins.swapped),
        ):
            params.append(nn.Parameter(torch.full((rows, 20), 0.5)))
            optimizer.add_param_group({"params": [params[-1]], "lr": 0.05})
        self._manage()

    @rule(pause_ms=st.sampled_from([0, 2]), by_tensor=st.booleans())
    def snapshot(self, pause_ms: int, by_tensor: bool) -> None:
        snapshot = self.manager.snapshot()
        expected = [bits(tensor) for tensor in tensors(snapshot.state_dict)]
        reader = threading.Thread(target=self._read, args=(snapshot, expected, pause_ms / 1000, by_tensor))
        reader.start()
        self.readers.append(reader)

    def _read(self, snapshot: Snapshot, expected: list[bytes], pause_secs: float, by_tensor: bool) -> None:
        with snapshot:
            for tensor, values in zip(tensors(snapshot.state_dict), expected, strict=True):
                time.sleep(pause_secs)
                if bits(tensor) != values:
                    self.problems.append(f"torn snapshot: {tuple(tensor.shape)}")
                if by_tensor:
                    snapshot.written(tensor)

    def _join_readers(self) -> None:
        for reader in self.readers:
            reader.join(20)
        self.readers.clear()

    @rule()
    def save(self) -> None:
        file = io.BytesIO()
        torch.save(self.manager.state_dict(), file)
        self.saved = Saved(
            [param.detach().clone() for param in self.twins.params],
            copy.deepcopy(self.twins.plain.state_dict()),
            file.getvalue(),
            len(self.twins.swapped.param_groups),
            self.twins.steps,
        )

    @rule()
    @precondition(lambda self: self._can_load())
    def load(self) -> None:
        self._load(accept_parameters=False)

    def _can_load(self) -> bool:
        return self.saved is not None and self.saved.num_groups == len(self.twins.swapped.param_groups)

    def _load(self, *, accept_parameters: bool) -> None:
        saved = self.saved
        assert saved is not None
        self._join_readers()
        with torch.no_grad():
            for params in (self.twins.plain_params, self.twins.params):
                for param, value in zip(params, saved.params, strict=True):
                    param.copy_(value)
        self.twins.plain.load_state_dict(copy.deepcopy(saved.plain))
        state_dict = torch.load(io.BytesIO(saved.file), weights_only=True)
        self.manager.load_state_dict(state_dict, accept_parameters=accept_parameters)
        self.twins.steps = saved.steps

    @rule(copies=st.integers(0, 5), direction=st.sampled_from(["load", "offload"]))
    @precondition(lambda self: self.is_adopted and self._can_load())
    def fail(self, copies: int, direction: str) -> None:
        stream = self.device.load if direction == "load" else self.device.offload
        stream.copies_left = copies
        self.twins.set_gradients()
        try:
            self.twins.swapped.step()
        except StepError:
            if self.twins.swap.phase is Phase.FAILED:
                self._load(accept_parameters=True)
                return
            self.twins.swapped.step()  # nothing was updated: the same step can be taken again
        stream.copies_left = None
        self.twins.plain.step()

    @rule(chosen=st.sets(st.integers(0, 6), min_size=1), forgets=st.booleans())
    def rebind(self, chosen: set[int], forgets: bool) -> None:
        """Some parameters are replaced; before that, perhaps, by a map in which one is missing."""
        new_to_old: dict[torch.Tensor, torch.Tensor] = {}
        for index, old in enumerate(self.twins.params):
            if index in chosen:
                new = self.twins.params[index] = nn.Parameter(old.detach().clone())
                new_to_old[new] = old
        model = nn.ParameterList(self.twins.params)
        if forgets and new_to_old:
            _, *rest = new_to_old.items()
            with pytest.raises(RebindError, match="not in the map"):
                self.manager.rebind(dict(rest), model=model)
        self.manager.rebind(new_to_old, model=model)

    @rule()
    @precondition(lambda self: self.is_adopted)
    def release(self) -> None:
        self._join_readers()
        swapckpt.release(self.twins.swapped)
        self._manage()

    @rule()
    @precondition(lambda self: not self.is_adopted)
    def adopt(self) -> None:
        swapckpt.swap_optimizer(self.twins.swapped, self.config, device=self.device)
        self._manage()

    @invariant()
    def equal_to_plain_torch(self) -> None:
        if not hasattr(self, "twins"):
            return
        assert not self.problems
        self.twins.check()
        assert self.device.ledger.device_nbytes == 0

    def teardown(self) -> None:
        if hasattr(self, "twins"):
            self._join_readers()
            assert not self.problems


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=20)
test_any_order_equals_plain_torch = Life.TestCase
