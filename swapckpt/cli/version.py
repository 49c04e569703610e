"""``swapckpt version``."""

from __future__ import annotations

import platform
from importlib.metadata import version as installed_version

import torch
import typer


def version() -> None:
    """Print the versions of swapckpt, torch and Python."""
    typer.echo(f"swapckpt {installed_version('swapckpt')}")
    typer.echo(f"torch {torch.__version__}")
    typer.echo(f"python {platform.python_version()}")
