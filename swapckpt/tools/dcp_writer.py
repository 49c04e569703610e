"""Writes a DCP checkpoint through the commit protocol, one tensor in memory at a time."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from swapckpt.storage import SwapSavePlanner, SwapStorageWriter
from swapckpt.tools.content import whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

    from swapckpt.tools.content import Content


def write(content: Content, target: str, *, overwrite: bool, on_progress: Callable[[int], None]) -> None:
    """Save ``content`` as a checkpoint of one rank.

    Raises:
        CheckpointExistsError: One is committed, or other files are there.
        CorruptCheckpointError, UnsafePickleError: Of ``content``. Nothing is visible.
        StorageError: A store failed. Nothing is visible.
    """
    # One thread: each holds a tensor.
    writer = SwapStorageWriter(
        target, threads=1, overwrite=overwrite, on_written=lambda tensor: on_progress(tensor.nbytes)
    )
    state = {
        fqn: _placeholder(content, fqn) if fqn in content.tensors else content.value(fqn)
        for fqn in content.paths
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            save(state, storage_writer=writer, planner=_Planner(content), no_dist=True)
        except CheckpointException as error:
            writer.abandon()
            raise error.failures[min(error.failures)][0] from None


def _placeholder(content: Content, fqn: str) -> Tensor:
    info = content.tensors[fqn]
    return torch.empty(info.shape, dtype=info.dtype, device="meta")


class _Planner(SwapSavePlanner):
    """Plans with tensors that have no memory, and reads each when it is written."""

    def __init__(self, content: Content) -> None:
        super().__init__()
        self._content = content

    def set_up_planner(
        self,
        state_dict: dict[str, object],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - the signature is DCP's
    ) -> None:
        del storage_meta
        # Flat already, and its places may be none that flattening would give.
        self.state_dict = state_dict
        self.mappings = dict(self._content.paths)
        self.is_coordinator = is_coordinator

    def lookup_object(self, index: MetadataIndex) -> object:
        if index.fqn in self._content.tensors:
            return whole(self._content, index.fqn)
        return self.state_dict[index.fqn]
