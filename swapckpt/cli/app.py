"""The command line: its verbs, and how it ends.

Exit status: 0 all is well, 1 something is wrong with what was looked at, 2 it could not be looked at (wrong
usage, nothing there, or the store failed).
"""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from swapckpt.cli.convert import convert
from swapckpt.cli.demo import demo
from swapckpt.cli.diff import diff
from swapckpt.cli.doctor import doctor
from swapckpt.cli.inspect import inspect
from swapckpt.cli.ls import ls
from swapckpt.cli.plan import plan
from swapckpt.cli.prune import prune
from swapckpt.cli.verify import verify
from swapckpt.cli.version import version
from swapckpt.errors import ConfigError, SwapCkptError

app = typer.Typer(
    name="swapckpt",
    help="Optimizer state in host memory, and checkpoints straight from there.\n\n"
    "Exit status: 0 all is well, 1 something is wrong with what was looked at, 2 it could not be looked at.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for verb in (demo, plan, ls, inspect, verify, diff, convert, prune, doctor, version):
    app.command()(verb)


def main() -> None:
    """Run the command line. Errors of swapckpt and of files are shown as one message without a traceback."""
    try:
        app()
    except (SwapCkptError, OSError) as error:
        Console(stderr=True).print(
            f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        sys.exit(2 if isinstance(error, ConfigError | OSError) else 1)
