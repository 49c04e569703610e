"""Snapshots of a StateManager: exactly one moment, while steps go on, without a copy of the mirrors."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor, nn

from swapckpt import Snapshot, SwapConfig
from swapckpt.device import CpuDevice
from swapckpt.errors import LeaseTimeoutError, PhaseError, StepError
from swapckpt.fence import LeasingGate
from swapckpt.manager import StateManager
from tests.core.training import Recipe, Twins, always, bits, shifting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ADAMW = Recipe(cls=torch.optim.AdamW, options={"foreach": False})


def managed(
    config: SwapConfig, *, policy: str = "thread", steps: int = 2, **options: Any
) -> tuple[Twins, StateManager]:
    """Twins after some steps, and a manager over the swapped one."""
    twins = Twins(ADAMW, config, CpuDevice(policy, seed=3), **options)
    twins.step(steps)
    return twins, StateManager(nn.ParameterList(twins.params), twins.swapped)


def gate_of(twins: Twins) -> LeasingGate:
    gate = twins.swap.gate
    assert isinstance(gate, LeasingGate)
    return gate


def tensors(tree: object) -> Iterator[Tensor]:
    """All tensors of a state dict, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from tensors(value)


def contents(tree: object) -> list[bytes]:
    return [bits(tensor) for tensor in tensors(tree)]


@pytest.mark.parametrize("policy", ["inline", "thread", "lazy", "random"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("active", [shifting, always])
@pytest.mark.parametrize("swap_times", [1, 4])  # with one batch some of its parameters have no gradient
def test_a_snapshot_keeps_its_values_while_steps_go_on(
    policy: str, packed: bool, active: Callable[[int, int], bool], swap_times: int
) -> None:
    config = SwapConfig(swap_times=swap_times, packed=packed, min_numel=16, spare_nbytes=1 << 30)
    twins, manager = managed(config, policy=policy, steps=4, active=active)
    with manager.snapshot() as snapshot:
        before = contents(snapshot.state_dict)
        for _ in range(4):
            twins.step()
            twins.check()
            assert contents(snapshot.state_dict) == before
    twins.step(2)
    twins.check()


def test_mirrors_are_leased_and_not_copied_and_everything_small_is() -> None:
    twins, manager = managed(SwapConfig(swap_times=4))
    mirrors = {tensor.host.data_ptr() for tensor in twins.swap.table.tensors()}
    held = twins.device.ledger.host_nbytes
    with manager.snapshot() as snapshot:
        found = {tensor.data_ptr() for tensor in tensors(snapshot.state_dict)}
        assert mirrors <= found
        live = {tensor.data_ptr() for tensor in tensors(manager.state_dict())}
        assert found & live == mirrors
    assert twins.device.ledger.host_nbytes == held
    assert gate_of(twins).spare_nbytes == 0


def test_group_settings_are_those_of_the_moment() -> None:
    twins, manager = managed(SwapConfig())
    with manager.snapshot() as snapshot:
        twins.swapped.param_groups[0]["lr"] = 123.0
        groups = snapshot.state_dict["param_groups"]
        assert isinstance(groups, list)
        assert groups[0]["lr"] == 0.01


def test_a_redirect_makes_the_spare_the_mirror_and_costs_at_most_the_budget() -> None:
    twins, manager = managed(SwapConfig(swap_times=4))
    table = twins.swap.table
    old = {str(tensor.id): tensor.host.data_ptr() for tensor in table.tensors()}
    budget = 2 * table.largest_batch_nbytes
    with manager.snapshot() as snapshot:
        threading.Timer(0.2, snapshot.close).start()
        twins.step()  # two batches are redirected at once, the others wait for the close
        moved = {str(t.id) for t in table.tensors() if t.host.data_ptr() != old[str(t.id)]}
    assert moved
    assert gate_of(twins).spare_nbytes <= budget
    twins.check()
    for param, state in twins.swapped.state.items():
        for key, tensor in table.entries[param].tensors.items():
            assert state[key] is tensor.mirror


def test_overlapping_snapshots_share_spares_after_they_end() -> None:
    twins, manager = managed(SwapConfig(swap_times=3, spare_nbytes=1 << 30))
    for _ in range(5):
        with manager.snapshot():
            twins.step()
    assert gate_of(twins).spare_nbytes <= sum(batch.staged_nbytes for batch in twins.swap.table.batches)
    twins.check()


def test_without_spares_a_step_waits_for_the_reader() -> None:
    twins, manager = managed(SwapConfig(swap_times=4, spare_nbytes=0))
    snapshot = manager.snapshot()
    order: list[str] = []

    def read() -> None:
        for segment in snapshot.segments:
            time.sleep(0.01)
            order.append("released")
            snapshot._lease.release(segment)

    reader = threading.Thread(target=read)
    reader.start()
    twins.step()
    order.append("stepped")
    reader.join()
    assert order[-1] == "stepped"
    assert order.count("released") == 4
    assert gate_of(twins).spare_nbytes == 0
    twins.check()


def test_a_step_that_waits_too_long_fails_and_says_why() -> None:
    twins, manager = managed(SwapConfig(swap_times=2, spare_nbytes=0, timeout_secs=0.05))
    with manager.snapshot():
        twins.set_gradients()
        with pytest.raises(StepError, match="snapshot still reads") as caught:
            twins.swapped.step()
        assert isinstance(caught.value.__cause__, LeaseTimeoutError)
    with pytest.raises(PhaseError):
        manager.snapshot()


def test_what_has_no_address_is_copied() -> None:
    sparse = torch.eye(3).to_sparse()
    snapshot = Snapshot({"x": sparse}, [])
    copied = snapshot.state_dict["x"]
    assert isinstance(copied, Tensor)
    assert copied is not sparse
    assert torch.equal(copied.to_dense(), torch.eye(3))
    assert snapshot.segment_of(copied) is None


def test_written_releases_a_segment_with_its_last_tensor() -> None:
    twins, manager = managed(SwapConfig(swap_times=2, spare_nbytes=0))
    snapshot = manager.snapshot()
    leased = [t for t in tensors(snapshot.state_dict) if snapshot.segment_of(t) is not None]
    for count, tensor in enumerate(leased):
        assert len(snapshot.segments) > 0, count
        snapshot.written(tensor)
    assert snapshot.segments == ()
    twins.step()  # nobody has to be waited for
    twins.check()


def test_segments_come_in_the_order_in_which_the_next_step_overwrites_them() -> None:
    twins, manager = managed(SwapConfig(swap_times=4, spare_nbytes=1 << 30))
    with manager.snapshot() as snapshot:
        leased = snapshot.segments
        overwritten = []
        gate = gate_of(twins)
        original = gate.before_overwrite

        def spy(segment: Any) -> Any:
            overwritten.append(segment)
            return original(segment)

        gate.before_overwrite = spy  # type: ignore[method-assign]
        twins.step()
    assert tuple(overwritten) == leased


def test_c1_an_asynchronous_save_holds_exactly_one_step(tmp_path: Path) -> None:
    """The trainer steps until each of five saves is done: every file holds the values of its step."""
    twins, manager = managed(SwapConfig(swap_times=4, min_numel=16))
    expected = []
    for number in range(5):
        snapshot = manager.snapshot()
        expected.append(contents(snapshot.state_dict))

        def save(path: str, snapshot: Snapshot = snapshot) -> None:
            with snapshot:
                time.sleep(0.05)
                dcp.save({"optimizer": snapshot.state_dict}, checkpoint_id=path, no_dist=True)

        saver = threading.Thread(target=save, args=(str(tmp_path / str(number)),))
        saver.start()
        while saver.is_alive():
            twins.step()
        saver.join()
        twins.check()
    for number, values in enumerate(expected):
        loaded = {"optimizer": manager.snapshot().state_dict}
        dcp.load(loaded, checkpoint_id=str(tmp_path / str(number)), no_dist=True)
        assert contents(loaded["optimizer"]) == values


def test_a_load_does_not_reach_a_snapshot() -> None:
    _, manager = managed(SwapConfig(swap_times=4, spare_nbytes=1 << 30))
    _, source = managed(SwapConfig(swap_times=4), steps=5)
    with manager.snapshot() as snapshot:
        before = contents(snapshot.state_dict)
        manager.load_state_dict(source.state_dict())
        assert contents(snapshot.state_dict) == before
        assert contents(manager.state_dict()) == contents(source.state_dict())


class Snapshots(RuleBasedStateMachine):
    """Steps, overlapping snapshots, writers of any speed; against a plain twin and a copy of each moment."""

    @initialize(
        packed=st.booleans(),
        spares=st.sampled_from([0, None, 1 << 30]),
        policy=st.sampled_from(["inline", "thread", "lazy", "random"]),
        swap_times=st.integers(1, 9),
    )
    def begin(self, packed: bool, spares: int | None, policy: str, swap_times: int) -> None:
        config = SwapConfig(
            swap_times=swap_times, packed=packed, spare_nbytes=spares, min_numel=16, timeout_secs=20
        )
        self.twins, self.manager = managed(config, policy=policy, steps=1, active=shifting)
        self.readers: list[threading.Thread] = []
        self.torn: list[str] = []

    @rule(count=st.integers(1, 3))
    def step(self, count: int) -> None:
        self.twins.step(count)

    @rule(pause_ms=st.sampled_from([0, 1, 3]), by_tensor=st.booleans())
    def snapshot(self, pause_ms: int, by_tensor: bool) -> None:
        snapshot = self.manager.snapshot()
        expected = contents(snapshot.state_dict)
        reader = threading.Thread(target=self._read, args=(snapshot, expected, pause_ms / 1000, by_tensor))
        reader.start()
        self.readers.append(reader)

    def _read(self, snapshot: Snapshot, expected: list[bytes], pause_secs: float, by_tensor: bool) -> None:
        with snapshot:
            for tensor, values in zip(tensors(snapshot.state_dict), expected, strict=True):
                time.sleep(pause_secs)
                if bits(tensor) != values:
                    self.torn.append(f"{tuple(tensor.shape)}")
                if by_tensor:
                    snapshot.written(tensor)

    @rule()
    def wait_for_readers(self) -> None:
        for reader in self.readers:
            reader.join(20)
        self.readers.clear()

    @invariant()
    def nothing_is_torn_and_the_numbers_are_those_of_the_plain_twin(self) -> None:
        if hasattr(self, "twins"):
            assert not self.torn
            self.twins.check()
            gate, table = gate_of(self.twins), self.twins.swap.table
            configured = self.twins.swap.config.spare_nbytes
            budget = 2 * table.largest_batch_nbytes if configured is None else configured
            assert gate.spare_nbytes <= budget

    def teardown(self) -> None:
        if hasattr(self, "twins"):
            self.wait_for_readers()
            assert not self.torn


Snapshots.TestCase.settings = settings(max_examples=60, stateful_step_count=12)
test_snapshots_under_steps_and_slow_writers = Snapshots.TestCase
