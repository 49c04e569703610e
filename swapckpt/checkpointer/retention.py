"""Which checkpoints a job keeps."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from swapckpt.errors import StorageError
from swapckpt.storage import committed_steps
from swapckpt.storage.commit import discard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swapckpt.config import CheckpointConfig
    from swapckpt.storage import Files

logger = logging.getLogger(__name__)


def retired(steps: Sequence[int], config: CheckpointConfig) -> list[int]:
    """Of committed ``steps``, ascending, those to remove. Pure."""
    if config.keep_latest is None:
        return []
    old = steps[: -config.keep_latest]
    return [step for step in old if config.keep_every is None or step % config.keep_every]


def retire(files: Files, config: CheckpointConfig, *, saved: int) -> None:
    """Remove what is not to be kept. (coordinator, after the commit of step ``saved``)

    That one stays, also where a job went back to an earlier step and newer ones are there.
    A failure is no failure of the save: what could not be removed is tried again after the next one.
    """
    if config.keep_latest is None:
        return
    try:
        for step in retired(committed_steps(files), config):
            if step != saved:
                discard(files, f"step-{step}")
    except (StorageError, OSError) as error:
        logger.warning("%s: an old checkpoint was not removed: %s", files.url, error)
