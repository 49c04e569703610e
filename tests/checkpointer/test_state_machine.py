"""Any order of what a job does with its checkpoints: what a load gives is what was committed, bit for bit."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import swapckpt
from swapckpt.checkpointer.retention import retired
from swapckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
    SwapCkptError,
)
from tests.checkpointer.damages import flip, lose_metadata, lose_metadata_bytes, truncate
from tests.checkpointer.jobs import ASYNC, SYNC, Job, differing, hooked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapckpt.checkpointer.handle import SaveHandle

Contents = dict[str, object]

PINNED = replace(ASYNC, async_mode="async_with_pinned_mem")
CONFIGS = [SYNC, ASYNC, replace(SYNC, keep_latest=2), replace(ASYNC, keep_latest=2)]
STEPS = st.integers(0, 2)
DAMAGES = {each.__name__: each for each in (flip, truncate, lose_metadata_bytes, lose_metadata)}


@dataclass(frozen=True, slots=True)
class Pending:
    """A save that may still be under way; ``fails`` when its step is taken."""

    step: int
    contents: Contents
    handle: SaveHandle
    fails: bool


class Checkpoints(RuleBasedStateMachine):
    """train, save, overwrite, wait, load, damage, a store that fails, another Checkpointer, another job.

    ``committed`` is what the folder has, ``damaged`` what of it is damaged, ``lost`` what of that has no
    metadata, ``known`` what a load of this Checkpointer has found damaged.
    """

    configs: ClassVar = CONFIGS

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.committed: dict[int, Contents] = {}
        self.damaged: set[int] = set()
        self.lost: set[int] = set()
        self.strikes_in: int | None = None
        self._start(data)

    def _start(self, data: st.DataObject) -> None:
        self.job, self.number, self.is_torn = Job.build(), 0, False
        self._open(data)

    def _open(self, data: st.DataObject) -> None:
        self.known: set[int] = set()
        self.pending: Pending | None = None
        self.is_unread = False
        with hooked(self._before) as made:
            self.config = data.draw(st.sampled_from(self.configs))
            self.checkpointer = swapckpt.Checkpointer(self.folder, self.job.states, self.config)
        self.files = made[-1]

    def _before(self, _number: int, operation: str, path: str) -> None:
        if self.strikes_in is not None:
            self.strikes_in -= 1
            if self.strikes_in < 0:
                self.strikes_in = None
                raise StorageError(f"the disk is gone, at {operation} {path}")

    # ------------------------------------------------------------------------------------------ the model

    def _settle(self) -> None:
        """The save that was under way is over."""
        pending, self.pending = self.pending, None
        if pending is not None:
            assert pending.handle.done()
            self.is_unread = pending.fails
            if not pending.fails:
                self._commit(pending.step, pending.contents)

    def _commit(self, step: int, contents: Contents) -> None:
        self.committed[step] = contents
        for each in (self.damaged, self.lost, self.known):
            each.discard(step)
        for old in retired(sorted(self.committed.keys() - self.lost), self.config):
            if old != step:
                del self.committed[old]
                self.damaged.discard(old)

    @contextmanager
    def _raises_what_nobody_has_read(self) -> Iterator[bool]:
        """Inside is a call that waits. Yields whether it has to raise the failure of the save before."""
        fails = self.is_unread or (self.pending is not None and self.pending.fails)
        if fails:
            with pytest.raises(CheckpointExistsError):
                yield True
        else:
            yield False
        self._settle()
        self.is_unread = False

    def _is_taken(self, step: int) -> bool:
        return step in self.committed.keys() - self.lost - self.known

    # ------------------------------------------------------------------------------------------ the rules

    @rule(count=st.integers(1, 2))
    @precondition(lambda self: not self.is_torn)
    def train(self, count: int) -> None:
        for _ in range(count):
            self.number += 1
            self.job.step(self.number)

    @rule(step=STEPS, overwrite=st.booleans())
    @precondition(lambda self: not self.is_torn)
    def save(self, step: int, overwrite: bool) -> None:
        contents, is_async = self.job.contents(), self.config.async_mode is not SYNC.async_mode
        begun: SaveHandle | None = None
        with self._raises_what_nobody_has_read() as fails:
            if fails or is_async:
                begun = self.checkpointer.save(step, overwrite=overwrite)
        if fails:
            return
        is_refused = self._is_taken(step) and not overwrite
        if begun is not None:
            self.pending = Pending(step, contents, begun, is_refused)
        elif is_refused:
            with pytest.raises(CheckpointExistsError):
                self.checkpointer.save(step)
        else:
            self.checkpointer.save(step, overwrite=overwrite)
            self._commit(step, contents)

    @rule(step=STEPS, number=st.integers(0, 30))
    @precondition(lambda self: not self.is_torn and self.config.keep_latest is None)
    def save_on_a_failing_disk(self, step: int, number: int) -> None:
        """It fails at the n-th call, if it makes as many."""
        self.wait()
        contents, begin = self.job.contents(), len(self.files.calls)
        self.strikes_in = number
        try:
            self.checkpointer.save(step, overwrite=True).result()
        except SwapCkptError:
            assert self.strikes_in is None
            calls = self.files.calls[begin : begin + number]
            is_visible = any(name == "rename" and path.endswith(f"> step-{step}") for name, path in calls)
        else:
            is_visible = True  # what cleans up may fail
        self.strikes_in = None
        if is_visible:
            self._commit(step, contents)

    @rule()
    def wait(self) -> None:
        with self._raises_what_nobody_has_read():
            self.checkpointer.wait()

    @rule(step=st.none() | STEPS, fallback=st.booleans())
    def load(self, step: int | None, fallback: bool) -> None:
        if self.pending is not None:
            self.pending.handle.settle()
            self._settle()
        newest = max(self.committed.keys() - self.lost, default=-1)
        there = [
            each for each in sorted(self.committed) if each not in self.lost or each > newest or each == step
        ]
        if step is not None and step not in there:
            with pytest.raises(CheckpointNotFoundError):
                self.checkpointer.load(step, fallback=fallback)
            return
        tried = [each for each in reversed(there) if step is None or each <= step]
        whole = next((at for at, each in enumerate(tried) if each not in self.damaged), len(tried))
        self.known |= {*(tried[:whole] if fallback else tried[: min(whole, 1)])}
        if tried and (whole == len(tried) or (whole and not fallback)):
            with pytest.raises(CorruptCheckpointError):
                self.checkpointer.load(step, fallback=fallback)
            self.is_torn = True
            return
        found = self.checkpointer.load(step, fallback=fallback)
        assert found == (tried[whole] if tried else None)
        if found is not None:
            self.is_torn = False
            assert not differing(self.job.contents(), self.committed[found])

    @rule(kind=st.sampled_from(sorted(DAMAGES)))
    @precondition(lambda self: self.pending is None and self.committed.keys() - self.damaged)
    def damage_newest(self, kind: str) -> None:
        step = max(self.committed.keys() - self.damaged)
        DAMAGES[kind](self.folder / f"step-{step}")
        self.damaged.add(step)
        if kind == lose_metadata.__name__:
            self.lost.add(step)

    @rule(kind=st.sampled_from(sorted(DAMAGES)))
    @precondition(lambda self: self.pending is None and len(self.committed.keys() - self.damaged) > 1)
    def fall_back_and_come_again(self, kind: str) -> None:
        """What others do one by one, and by chance too seldom in this order."""
        step = max(self.committed.keys() - self.damaged)
        self.damage_newest(kind)
        self.load(None, fallback=True)
        self.save(step, overwrite=False)

    @rule(data=st.data(), is_new_job=st.booleans())
    def reopen(self, data: st.DataObject, is_new_job: bool) -> None:
        with self._raises_what_nobody_has_read():
            self.checkpointer.close()
        if is_new_job:
            self._start(data)
        else:
            self._open(data)

    @invariant()
    def lists_what_is_committed(self) -> None:
        if self.pending is None:
            assert self.checkpointer.steps() == sorted(self.committed.keys() - self.lost)

    def teardown(self) -> None:
        if hasattr(self, "checkpointer"):
            with suppress(CheckpointExistsError):
                self.checkpointer.close()
            shutil.rmtree(self.folder)


class PinnedCheckpoints(Checkpoints):
    """Written by a process, which takes a second to start."""

    configs: ClassVar = [PINNED]


Checkpoints.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
PinnedCheckpoints.TestCase.settings = settings(max_examples=2, stateful_step_count=25)
test_any_order_loads_what_was_committed = Checkpoints.TestCase
test_any_order_with_a_writer_process = PinnedCheckpoints.TestCase
