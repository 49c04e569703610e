"""Which steps a load found damaged, so that a job that reaches one of them again may save it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from swapckpt.errors import StorageError
from swapckpt.storage.commit import version_of

if TYPE_CHECKING:
    from swapckpt.storage import Files

logger = logging.getLogger(__name__)


class Damage:
    """Steps that were found damaged, each with what was committed then. The coordinator's.

    Call sequence: ``found`` by loads, ``may_replace`` by the saves that follow.

    Args:
        files: The folder of checkpoints.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._versions: dict[int, str | None] = {}

    def found(self, step: int) -> None:
        """A load has read this step, and it is corrupt."""
        self._versions[step] = self._version(step)

    def may_replace(self, step: int) -> bool:
        """True when what is committed under this step is what was found damaged, and nothing newer."""
        if step not in self._versions or self._versions[step] != self._version(step):
            return False
        logger.warning("Step %d was found damaged when it was loaded: this save replaces it.", step)
        return True

    def replaced(self, step: int) -> None:
        """This step is committed anew."""
        self._versions.pop(step, None)

    def _version(self, step: int) -> str | None:
        try:
            return version_of(self._files, f"step-{step}")
        except (StorageError, OSError):  # what asks next meets it too, and says it on all ranks
            return None
