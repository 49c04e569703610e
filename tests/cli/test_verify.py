"""``swapckpt verify``: cases C9 and C11 at the command line."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from swapckpt.cli import output
from tests.cli.checkpoints import flip, place_of, state, with_evil_metadata
from tests.storage.stores import save, stock_save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Result

    Cli = Callable[..., Result]


def problems(result: Result) -> list[tuple[str, str]]:
    (checkpoint,) = json.loads(result.stdout)["checkpoints"]
    return [(each["file"], each["fqn"]) for each in checkpoint["problems"]]


def test_a_sound_checkpoint_is_ok(cli: Cli, store_url: str) -> None:
    save(state(), f"{store_url}/step-1")
    result = cli("verify", f"{store_url}/step-1")
    assert result.code == 0, result.stderr
    assert result.stdout.startswith("step-1: ok, ")
    assert " GB/s" in result.stdout


@pytest.mark.parametrize("saver", [save, stock_save])
def test_a_flipped_bit_is_named_with_file_and_fqn(cli: Cli, tmp_path: Path, saver: Callable) -> None:
    saver(state(), tmp_path / "step-1")
    file, start, length = place_of(tmp_path / "step-1", "model.w")
    flip(file, start + length // 2)
    result = cli("verify", str(tmp_path / "step-1"))
    assert result.code == 1
    assert "1 problem in " in result.stdout
    assert "__0_0.distcp, model.w:" in result.stdout
    assert "item 'model.w' at (0, 0)" in result.stdout
    as_json = cli("verify", str(tmp_path / "step-1"), "--json")
    assert (as_json.code, problems(as_json)) == (1, [("__0_0.distcp", "model.w")])


def test_a_truncated_file_is_named_with_every_item_it_lost(cli: Cli, tmp_path: Path) -> None:
    save(state(), tmp_path / "step-1")
    file, start, length = place_of(tmp_path / "step-1", "model.w")
    lost = {
        ("__0_0.distcp", fqn)
        for fqn in ("model.w", "model.half", "model.ids", "model.none", "model.step", "lr", "names", "betas")
        if sum(place_of(tmp_path / "step-1", fqn)[1:]) > start + length - 1
    }
    assert len(lost) > 1
    os.truncate(file, start + length - 1)
    result = cli("verify", str(tmp_path / "step-1"), "--json")
    assert result.code == 1
    assert set(problems(result)) == {("__0_0.distcp", ""), *lost}


def test_a_data_file_of_another_run_is_named_with_its_items(cli: Cli, tmp_path: Path) -> None:
    for run in (0, 1):
        save(state(run), tmp_path / f"run-{run}" / "step-1")
    shutil.copy(tmp_path / "run-1" / "step-1" / "__0_0.distcp", tmp_path / "run-0" / "step-1")
    result = cli("verify", str(tmp_path / "run-0" / "step-1"), "--json")
    assert result.code == 1
    random = {("__0_0.distcp", f"model.{name}") for name in ("w", "half", "ids")}
    assert set(problems(result)) == random  # what is the same in both runs is not damaged


def test_code_is_refused_and_not_run(cli: Cli, tmp_path: Path) -> None:
    stock_save(state(), tmp_path / "step-1")
    with_evil_metadata(tmp_path / "step-1", tmp_path / "made")
    result = cli("verify", str(tmp_path / "step-1"))
    assert result.code == 1
    assert "mkdir, which is not on the allow list. No code was run." in result.stdout
    assert not (tmp_path / "made").exists()


def test_all_of_a_folder(cli: Cli, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(state(step), tmp_path / f"step-{step}")
    file, start, length = place_of(tmp_path / "step-2", "lr")
    flip(file, start + length // 2)
    (tmp_path / "step-3" / ".metadata").unlink()
    result = cli("verify", str(tmp_path), "--json")
    record = json.loads(result.stdout)
    assert result.code == 1
    assert [(each["checkpoint"], each["ok"]) for each in record["checkpoints"]] == [
        (f"{tmp_path}/step-1", True),
        (f"{tmp_path}/step-2", False),
    ]
    assert record["unfinished"] == ["step-3"]
    assert "step-3: not finished, not verified" in cli("verify", str(tmp_path)).stdout


def test_many_problems_are_cut_and_all_are_shown_on_demand(cli: Cli, tmp_path: Path) -> None:
    save({str(n): n for n in range(30)}, tmp_path / "step-1")
    (tmp_path / "step-1" / "__0_0.distcp").unlink()
    result = cli("verify", str(tmp_path / "step-1"))
    assert "step-1: 31 problems" in result.stdout
    assert "  and 11 more; --all shows them" in result.stdout
    assert cli("verify", str(tmp_path / "step-1"), "--all").stdout.count("in a file that is missing") == 30


def test_progress_is_plain_lines_without_a_terminal(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(state(), tmp_path / "step-1")
    assert cli("verify", str(tmp_path / "step-1")).stderr == ""  # too short to need any
    monkeypatch.setattr(output, "PLAIN_MIN_NBYTES", 0)
    lines = cli("verify", str(tmp_path / "step-1")).stderr.splitlines()
    assert 1 <= len(lines) <= output.PLAIN_STEPS
    assert lines[-1].startswith("verifying step-1: 100 % of ")
    assert cli("verify", str(tmp_path / "step-1"), "--json").stderr == ""


def test_what_is_no_checkpoint_is_one_message_and_code_2(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun" / "step-1").mkdir(parents=True)
    (tmp_path / "begun" / "step-1" / "__0_0.distcp").write_bytes(b"x")
    for path, says in (
        (tmp_path / "none", "There is nothing at "),
        (tmp_path / "file", "is a file, not a checkpoint."),
        (tmp_path / "empty", "has 0 entries, and none is of a checkpoint."),
        (tmp_path / "begun" / "step-1", "as a save leaves it that did not finish"),
    ):
        result = cli("verify", str(path))
        assert (result.code, result.stdout) == (2, "")
        assert says in result.stderr
        assert result.stderr.count("\n") == 1
