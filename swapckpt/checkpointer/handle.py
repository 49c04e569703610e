"""What ``save`` returns: the way to wait for a save and to learn how it went."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class SaveStats:
    """How a save went, on this rank.

    Attributes:
        step: The step.
        nbytes: Bytes that this rank wrote.
        staged_secs: Until parameters were staged, from the start of the background work.
        write_secs: Planning, writing, commit, and removal of checkpoints that are not kept.
    """

    step: int
    nbytes: int
    staged_secs: float
    write_secs: float


class SaveHandle:
    """A save that is under way, or over. All methods may be called from any thread.

    Attributes:
        step: The step that is saved.
        stalled_secs: How long ``save`` kept the training thread.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.stalled_secs = 0.0
        self._over = threading.Event()
        self._stats: SaveStats | None = None
        self._error: BaseException | None = None
        self._is_read = False

    def done(self) -> bool:
        """True when the save is committed, or has failed."""
        return self._over.is_set()

    def wait(self, timeout_secs: float | None = None) -> bool:
        """Wait until the save is over. Returns False when it is not within ``timeout_secs``.

        Raises the save's failure, as ``result`` does.
        """
        if not self._over.wait(timeout_secs):
            return False
        self.result()
        return True

    def result(self) -> SaveStats:
        """Wait, and return how it went. Raises the save's failure: nothing of it is visible then, unless
        it says so (see the guide on commits)."""
        self._over.wait()
        self._is_read = True
        if self._error is not None:
            raise self._error
        assert self._stats is not None
        return self._stats

    def __repr__(self) -> str:
        if not self.done():
            how = "under way"
        elif self._error is None:
            how = "committed"
        else:
            how = f"failed: {type(self._error).__name__}"
        return f"SaveHandle(step={self.step}, {how})"

    # ---------------------------------------------------------------- for the checkpointer

    def run(self, work: Callable[[], SaveStats]) -> None:
        """Do the work of the save and keep what comes of it, whatever that is."""
        try:
            self._stats = work()
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            self._error = error
        finally:
            self._over.set()

    def settle(self) -> None:
        """Wait without asking for the result."""
        self._over.wait()

    def unread_error(self) -> BaseException | None:
        """A failure that nobody has seen yet. The caller raises it."""
        error = None if self._is_read else self._error
        self._is_read = True
        return error
