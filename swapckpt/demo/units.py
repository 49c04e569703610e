"""Numbers as people read them."""

from __future__ import annotations


def human_nbytes(nbytes: float) -> str:
    """Bytes with a binary unit and three digits: ``"0 B"``, ``"4.25 MiB"``, ``"75.0 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1000 or unit == "GiB":
            break
        nbytes /= 1024
    decimals = 0 if unit == "B" else max(0, 2 - len(f"{nbytes:.0f}") + 1)
    return f"{nbytes:.{decimals}f} {unit}"
