"""``swapckpt version``."""

from __future__ import annotations

import platform

import torch
import typer

import swapckpt


def version() -> None:
    """Print the versions of swapckpt, torch and Python."""
    typer.echo(f"swapckpt {swapckpt.__version__}")
    typer.echo(f"torch {torch.__version__}")
    typer.echo(f"python {platform.python_version()}")
