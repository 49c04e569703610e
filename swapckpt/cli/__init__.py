"""The ``swapckpt`` command: one file per verb."""

from __future__ import annotations

from swapckpt.cli.app import app, main

__all__ = ["app", "main"]
