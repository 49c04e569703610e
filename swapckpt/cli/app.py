"""The command line: its verbs, and how it ends (0 done, 1 failed, 2 wrong usage)."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from swapckpt.cli.demo import demo
from swapckpt.cli.plan import plan
from swapckpt.cli.version import version
from swapckpt.errors import ConfigError, SwapCkptError

app = typer.Typer(
    name="swapckpt",
    help="Optimizer state in host memory, and checkpoints straight from there.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(plan)
app.command()(version)


def main() -> None:
    """Run the command line. Errors of swapckpt are shown as one message without a traceback."""
    try:
        app()
    except SwapCkptError as error:
        Console(stderr=True).print(
            f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        sys.exit(2 if isinstance(error, ConfigError) else 1)
