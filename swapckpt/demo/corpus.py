"""Real text as byte tokens, and the batch of any step as a pure function of the seed and the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from swapckpt.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

BUNDLED_NAME = "pydoc_data.topics"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Byte tokens [length] of one text, and where they came from."""

    name: str
    tokens: Tensor  # uint8, [length]

    def batch(self, *, step: int, seed: int, size: int, time: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of ``step``, both int64 [size, time]; targets are inputs one byte later.

        Depends on the arguments alone, so a resumed run needs no saved data position.
        """
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.tokens) - time, (size, 1), generator=generator)
        windows = self.tokens[starts + torch.arange(time + 1)].long()  # [size, time + 1]
        return windows[:, :-1], windows[:, 1:]


def load_corpus(path: Path | None, *, min_nbytes: int) -> Corpus:
    """The file at ``path``, or the text that ships with CPython.

    Raises:
        ConfigError: The file cannot be read or is shorter than ``min_nbytes``, or CPython came without its
            text.
    """
    name, raw = (BUNDLED_NAME, _bundled_text()) if path is None else (str(path), _read(path))
    if len(raw) < min_nbytes:
        msg = f"--data {name} has {len(raw)} bytes, one sequence needs {min_nbytes}. Take a longer text."
        raise ConfigError(msg)
    return Corpus(name, torch.frombuffer(bytearray(raw), dtype=torch.uint8))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        msg = f"--data {path} cannot be read ({error.strerror or error}). Give a readable text file."
        raise ConfigError(msg) from error


def _bundled_text() -> bytes:
    """The language reference that ``help()`` shows: about 460 kB of English prose about Python."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        msg = (
            f"This Python has no {BUNDLED_NAME} (some distributions split it off). Give a text: --data FILE."
        )
        raise ConfigError(msg) from error
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()
