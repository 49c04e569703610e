"""``MirrorStager``: lets stock ``dcp.async_save`` write mirrors without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from swapckpt.snapshot import Snapshot

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import Tensor

    from swapckpt.manager import StateManager


class MirrorStager:
    """A stager for ``dcp.async_save`` that leases the mirrors of state managers and copies everything else.

    Call sequence (per rank):

    1. ``dcp.async_save`` calls ``stage`` on the training thread;
    2. writer threads call ``written(tensor)`` as tensors are on their way: pass it to
       ``SwapStorageWriter(on_written=stager.written)``. Other writers do not, and keep all mirrors leased;
    3. when the save is over, ``release``: ``stager.release_after(future)`` arranges for it.

    A step that comes to a mirror that is still leased writes elsewhere while spare memory lasts, and then
    waits.

    Args:
        managers: State managers whose exports are in what is saved.
    """

    def __init__(self, *managers: StateManager) -> None:
        self._managers = managers
        self._snapshot: Snapshot | None = None

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: ``stage`` returns when nothing that happens later can reach the checkpoint."""
        return False

    def stage(self, state_dict: dict[str, object]) -> dict[str, object]:
        """``state_dict`` as it is now. What is still leased for an earlier save is released first."""
        self.release()
        swaps = [swap for manager in self._managers for swap in manager.swaps()]
        self._snapshot = Snapshot(state_dict, swaps)
        return self._snapshot.state_dict

    def synchronize_staging(self) -> None:
        """Nothing is left to be done when ``stage`` has returned."""

    def written(self, tensor: Tensor) -> None:
        """A tensor has been written; from any thread."""
        if self._snapshot is not None:
            self._snapshot.written(tensor)

    def release(self) -> None:
        """Give all mirrors back to the step."""
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None

    def release_after(self, save: Future[object] | AsyncSaveResponse) -> None:
        """Release when what ``dcp.async_save`` returned is done, however it went."""
        future = save.upload_completion if isinstance(save, AsyncSaveResponse) else save
        future.add_done_callback(lambda _: self.release())

    def close(self) -> None:
        """Called by DCP and by users when no save follows."""
        self.release()
