"""Python's cyclic garbage collector, out of the way while many records are made."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collections inside. For stretches of pure computation: with tens of thousands of records alive,
    every few thousand new ones start a search through all of them, which takes longer than making them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
