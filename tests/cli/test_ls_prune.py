"""``swapckpt ls`` and ``prune``: what is in a folder, and what goes."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
import torch

from swapckpt.storage import committed_steps, open_files
from tests.cli.checkpoints import state, with_evil_metadata
from tests.storage.stores import save, stock_save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Result

    Cli = Callable[..., Result]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Complete, corrupt, unfinished and stock checkpoints, and what is none."""
    folder = tmp_path / "runs"
    for step in (10, 20, 30):
        save({"w": torch.ones(1000)}, folder / f"step-{step}")
    os.truncate(folder / "step-20" / "__0_0.distcp", 100)
    (folder / "step-40").mkdir()
    (folder / "step-40" / "__0_0.distcp").write_bytes(b"x" * 50)
    stock_save({"w": torch.ones(1000)}, folder / "stock")
    (folder / "logs").mkdir()
    (folder / "logs" / "log.txt").write_text("text")
    return folder


def test_ls_shows_each_checkpoint_with_its_state(cli: Cli, runs: Path) -> None:
    result = cli("ls", str(runs))
    assert result.code == 1
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines()}
    assert rows["step-10"][1] == "complete"
    assert rows["step-10"][-1] == "1"  # ranks
    assert (rows["stock"][1], rows["stock"][-1]) == ("complete", "-")
    assert rows["step-20"][1] == "corrupt"
    assert "      - __0_0.distcp: 100 bytes, " in result.stdout
    assert rows["step-40"][1:4] == ["incomplete", "50", "B"]
    assert "a save that did not finish" in result.stdout
    assert "logs" not in result.stdout


def test_ls_in_json(cli: Cli, runs: Path) -> None:
    result = cli("ls", str(runs), "--json")
    record = json.loads(result.stdout)
    assert result.code == 1
    assert record["folder"] == str(runs)
    states = {each["name"]: each["state"] for each in record["checkpoints"]}
    assert states == {
        "step-10": "complete",
        "step-20": "corrupt",
        "step-30": "complete",
        "step-40": "incomplete",
        "stock": "complete",
    }
    first = record["checkpoints"][0]
    assert (first["step"], first["world_size"], first["problem"]) == (10, 1, "")
    assert first["nbytes"] == sum(path.stat().st_size for path in (runs / "step-10").iterdir())
    assert record["leftovers"] == []


def test_on_every_store(cli: Cli, store_url: str) -> None:
    for step in (1, 2):
        save({"w": torch.ones(10)}, f"{store_url}/step-{step}")
    result = cli("ls", store_url)
    assert result.code == 0, result.stderr
    assert [line.split()[:2] for line in result.stdout.splitlines()[1:]] == [
        ["step-1", "complete"],
        ["step-2", "complete"],
    ]
    assert cli("prune", store_url, "--keep-latest", "1", "--yes").code == 0
    assert committed_steps(open_files(store_url)) == [2]


def test_ls_of_a_store_shows_files_that_no_checkpoint_uses(cli: Cli, store_url: str) -> None:
    files = open_files(store_url)
    if files.renames:
        pytest.skip("attempts are folders there, and listed as such")
    save({"w": torch.ones(10)}, f"{store_url}/step-1")
    files.put(f"step-1/__0_0.{'0' * 32}.distcp", b"left by a save")
    result = cli("ls", store_url)
    assert f"1 leftover, 14 B:\n    step-1/__0_0.{'0' * 32}.distcp" in result.stdout
    assert cli("prune", store_url, "--min-age-secs", "0", "--yes").code == 0
    assert "leftover" not in cli("ls", store_url).stdout


def test_prune_only_says_what_it_would_do(cli: Cli, runs: Path) -> None:
    result = cli("prune", str(runs), "--keep-latest", "1", "--min-age-secs", "0")
    assert result.code == 0
    paths = [line.split()[0] for line in result.stdout.splitlines()[1:-1]]
    assert paths == ["step-10", "step-40"]
    assert "would remove 2 entries, " in result.stdout
    assert "nothing was removed" in result.stdout
    assert (runs / "step-10").exists()


def test_prune_says_what_it_leaves_because_a_save_may_be_going_on(cli: Cli, runs: Path) -> None:
    lines = cli("prune", str(runs), "--keep-latest", "1", "--yes").stdout.splitlines()
    assert lines[-3] == "left, changed in the last 3600 s, perhaps by a save that goes on:"
    assert lines[-2] == "  step-40"
    assert (runs / "step-40").exists()
    record = json.loads(cli("prune", str(runs), "--json").stdout)
    assert ([each["path"] for each in record["left"]], record["removals"]) == (["step-40"], [])
    assert "left" not in cli("prune", str(runs), "--min-age-secs", "0", "--yes").stdout
    assert not (runs / "step-40").exists()


def test_prune_removes_with_yes_and_says_how_much(cli: Cli, runs: Path) -> None:
    nbytes = sum(path.stat().st_size for path in (runs / "step-10").iterdir())
    result = cli("prune", str(runs), "--keep-latest", "1", "--yes", "--json")
    record = json.loads(result.stdout)
    assert (record["removed"], record["nbytes"]) == (True, nbytes)
    assert [each["path"] for each in record["removals"]] == ["step-10"]
    assert not (runs / "step-10").exists()
    assert {"step-20", "step-30", "step-40", "stock", "logs"} == {path.name for path in runs.iterdir()}


def test_prune_keeps_multiples(cli: Cli, tmp_path: Path) -> None:
    for step in (5, 10, 12, 14):
        save({"w": torch.ones(10)}, tmp_path / f"step-{step}")
    cli("prune", str(tmp_path), "--keep-latest", "1", "--keep-every", "10", "--yes")
    assert committed_steps(open_files(tmp_path)) == [10, 14]
    assert cli("prune", str(tmp_path), "--keep-latest", "0").code == 2
    result = cli("prune", str(tmp_path))
    assert (result.code, result.stdout) == (0, f"nothing to remove in {tmp_path}\n")


def test_a_checkpoint_with_code_is_listed_as_corrupt(cli: Cli, tmp_path: Path) -> None:
    stock_save(state(), tmp_path / "runs" / "step-1")
    with_evil_metadata(tmp_path / "runs" / "step-1", tmp_path / "made")
    result = cli("ls", str(tmp_path / "runs"))
    assert result.code == 1
    assert "mkdir, which is not on the allow list" in result.stdout
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("verb", ["ls", "prune"])
def test_what_is_no_folder_of_checkpoints_is_one_message_and_code_2(
    cli: Cli, tmp_path: Path, verb: str
) -> None:
    save({"w": torch.ones(10)}, tmp_path / "runs" / "step-1")
    (tmp_path / "file").write_text("text")
    for path, says in (
        (tmp_path / "none", "There is nothing at "),
        (tmp_path / "file", "is a file, not a folder of checkpoints."),
        (tmp_path / "runs" / "step-1", "is a checkpoint, not a folder of checkpoints."),
        ("memory://none/there", "There is nothing at memory://none/there."),
        ("no-such-protocol://x", "opening no-such-protocol://x failed"),
    ):
        result = cli(verb, str(path))
        assert result.code == 2
        assert result.stderr.startswith("error: ")
        assert says in result.stderr
        assert result.stderr.count("\n") == 1
        assert result.stdout == ""


def test_an_empty_folder_has_no_checkpoints(cli: Cli, tmp_path: Path) -> None:
    result = cli("ls", str(tmp_path))
    assert (result.code, result.stdout) == (0, f"no checkpoints in {tmp_path}\n")
