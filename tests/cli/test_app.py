"""The command must help, say its versions, and end with a code and one message that tell what happened."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from typing import TYPE_CHECKING

import pytest
import torch

import swapckpt
from swapckpt.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.conftest import Result

    Cli = Callable[..., Result]


def test_help_lists_the_verbs(cli: Cli) -> None:
    result = cli("--help")
    assert result.code == 0
    for verb in ("demo", "plan", "ls", "inspect", "verify", "diff", "convert", "prune", "doctor", "version"):
        assert f" {verb} " in result.stdout
    assert not [line for line in result.stdout.splitlines() if len(line) > 80]


def test_version_names_what_matters(cli_process: Cli) -> None:
    result = cli_process("version")
    assert result.code == 0
    assert result.stdout.splitlines() == [
        f"swapckpt {swapckpt.__version__}",
        f"torch {torch.__version__}",
        f"python {platform.python_version()}",
    ]


def test_command_is_installed() -> None:
    try:
        distribution("swapckpt")
    except PackageNotFoundError:
        pytest.skip("swapckpt is imported from its source tree, not installed")
    (script,) = entry_points(group="console_scripts", name="swapckpt")
    assert script.load() is main


def test_wrong_setting_is_one_message_and_code_2(cli: Cli) -> None:
    result = cli("demo", "--params", "huge")
    assert result.code == 2
    assert result.stderr == (
        "error: A model size is a positive number with K, M, B or T behind it (10M, 1.5B), got 'huge'.\n"
    )


@pytest.mark.parametrize("verb", ["ls", "inspect", "verify", "diff", "convert", "prune", "doctor"])
def test_help_of_a_verb_says_how_it_ends(cli: Cli, verb: str) -> None:
    result = cli(verb, "--help")
    assert result.code == 0
    assert "Exit status: 0" in result.stdout
    assert not [line for line in result.stdout.splitlines() if len(line) > 80]


def test_unknown_option_is_code_2(cli: Cli) -> None:
    assert cli("demo", "--no-such-option").code == 2
