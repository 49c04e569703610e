"""What a writer process is told and what it answers.

[Note: messages] Over one socket pair, as pickles; a descriptor follows the message that announces it.

    trainer -> writer: ``Settings`` once; then per save any number of ``Mapped`` (each followed by a
    descriptor) and ``Unmapped``, then one ``Job``.
    writer -> trainer: ``Ready`` once; then per job any number of ``Written``, then ``Done`` or ``Failed``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from swapckpt.errors import SwapCkptError
    from swapckpt.storage.commit import Attempt
    from swapckpt.storage.datafile import DataFile, PlannedFile


@dataclass(frozen=True, slots=True)
class Settings:
    """Once, at the start: what the trainer has configured in its own process."""

    fsspec: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Ready:
    """The writer has imported what it needs."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """Memory to map under a number. Its descriptor follows."""

    number: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Unmapped:
    """Memory that is not needed any more."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the items of one file come from. Columns, for there are tens of thousands.

    Attributes:
        numbers: Of the memory that each item lies in; anything for one that comes along.
        offsets_nbytes: Its first byte there.
        strides: In elements, by the number of the item; of those that do not lie row by row.
        data: By the number of the item, of those that come along.
    """

    numbers: npt.NDArray[np.int64]
    offsets_nbytes: npt.NDArray[np.int64]
    strides: Mapping[int, tuple[int, ...]]
    data: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class Job:
    """The data files of one rank.

    Attributes:
        url: The folder that checkpoints are in.
        sync: Make files durable.
        drop_page_cache: Forget cached pages of what was written.
        attempt: Where they are written.
        rank: Whose they are.
        plan: The files; None for those of the job before.
        sources: Of each file.
    """

    url: str
    sync: bool
    drop_page_cache: bool
    attempt: Attempt
    rank: int
    plan: Sequence[PlannedFile] | None
    sources: Sequence[Sources]


@dataclass(frozen=True, slots=True)
class Written:
    """Items whose memory may change: number of the file, of the first in it, and of the first behind them."""

    runs: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Done:
    """All files are written."""

    files: tuple[DataFile, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """The job failed; its files are removed where that was possible."""

    error: SwapCkptError
