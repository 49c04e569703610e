"""``python -m swapckpt.cli``: the ``swapckpt`` command where scripts are not on the path."""

from __future__ import annotations

from swapckpt.cli import main

main()
