"""One checkpoint into all states: compared first, then read in place, then taken over, by all ranks."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp

from swapckpt.checkpointer.parts import recovery_of
from swapckpt.checkpointer.planners import PartLoadPlanner
from swapckpt.errors import SwapCkptError
from swapckpt.storage import SwapStorageReader, committed_steps, lost_steps, refuse_checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import BuiltinFunctionType, FunctionType

    from swapckpt.checkpointer.parts import Part
    from swapckpt.checkpointer.ranks import Ranks
    from swapckpt.config import CheckpointConfig
    from swapckpt.storage import Files


def loadable_steps(files: Files, step: int | None) -> list[int]:
    """Steps that a load considers, ascending: all committed ones, and what was committed and has lost its
    metadata where it is newer or asked for. That must be said: training would go on further back.

    Raises:
        ConfigError: The folder is a checkpoint itself.
    """
    refuse_checkpoint(files)
    committed = committed_steps(files)
    newest = max(committed, default=-1)
    lost = [each for each in lost_steps(files, committed) if each > newest or each == step]
    return sorted(committed + lost)


class Loader:
    """Loads checkpoints of one folder into the parts of a job.

    Call sequence (all ranks): ``load``, any number of times, while nothing is being saved.

    Args:
        files: The folder.
        folder: Its path or URL.
        parts: Where things go, by name.
        ranks: Who loads together.
        config: Threads and verification.
        allowed_globals: What values in a checkpoint may name beyond what is harmless.
    """

    def __init__(
        self,
        files: Files,
        folder: str,
        parts: Mapping[str, Part],
        *,
        ranks: Ranks,
        config: CheckpointConfig,
        allowed_globals: Sequence[type | FunctionType | BuiltinFunctionType],
    ) -> None:
        self._files = files
        self._folder = folder
        self._parts = parts
        self._ranks = ranks
        self._config = config
        self._allowed_globals = allowed_globals

    def load(self, step: int, *, allow_partial: bool, allow_cast: bool) -> None:
        """Load one step. Raises the same error on every rank."""
        what = f"Loading step {step}"
        reader = SwapStorageReader(
            f"{self._folder}/step-{step}",
            files=self._files,
            threads=self._config.threads,
            verify=self._config.verify_on_load,
            allow_cast=allow_cast,
            allow_partial=allow_partial,
            allowed_globals=self._allowed_globals,
        )
        with ExitStack() as recoveries:
            # State that is made in inference mode could not be stepped outside of it.
            recoveries.enter_context(torch.inference_mode(mode=False))
            for recovery in recovery_of(self._parts):
                recoveries.enter_context(recovery)
            destinations: dict[str, object] = {}
            error: BaseException | None = None
            try:
                destinations = self._destinations(reader, allow_partial=allow_partial)
            except Exception as caught:  # noqa: BLE001 - raised on all ranks
                error = caught
            self._ranks.agree(what, error=error)
            planner = PartLoadPlanner(
                {name: self._parts[name] for name in destinations},
                names=self._parts.keys(),
                allow_cast=allow_cast,
                allow_partial=allow_partial,
            )
            self._read(reader, destinations, planner=planner, what=what)
            try:
                for name, loaded in destinations.items():
                    self._parts[name].restored(loaded, allow_partial=allow_partial)
            except Exception as caught:  # noqa: BLE001 - raised on all ranks
                error = caught
            try:
                self._ranks.agree(what, error=error)
            except SwapCkptError as failure:
                for part in self._parts.values():
                    part.torn(failure)
                raise

    def _destinations(self, reader: SwapStorageReader, *, allow_partial: bool) -> dict[str, object]:
        metadata = reader.read_metadata()
        found = {
            name: part.destination(metadata, allow_partial=allow_partial)
            for name, part in self._parts.items()
        }
        return {name: destination for name, destination in found.items() if destination is not None}

    def _read(
        self,
        reader: SwapStorageReader,
        destinations: dict[str, object],
        *,
        planner: PartLoadPlanner,
        what: str,
    ) -> None:
        with self._ranks.raising(what):
            dcp.load(
                destinations,
                storage_reader=reader,
                planner=planner,
                process_group=self._ranks.group,
                no_dist=self._ranks.group is None,
            )
