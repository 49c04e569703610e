"""``swapckpt inspect``: what is in a checkpoint, without loading it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.cli.checkpoints import save_sharded, state, training, with_evil_metadata
from tests.storage.stores import save, stock_save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Result
    from tests.multirank import RankRunner

    Cli = Callable[..., Result]


def rows(result: Result) -> list[list[str]]:
    return [line.split() for line in result.stdout.splitlines()[3:]]


def test_the_tree_has_dtypes_shapes_ranks_and_bytes(cli: Cli, tmp_path: Path) -> None:
    save(state(), tmp_path / "step-7")
    result = cli("inspect", str(tmp_path / "step-7"))
    assert result.code == 0, result.stderr
    first, totals, blank = result.stdout.splitlines()[:3]
    assert first.startswith("step-7: saved ")
    assert " by 1 rank, swapckpt " in first
    assert totals.startswith("5 tensors, 3 values, 121 KiB; 3 files of ")
    assert blank == ""
    assert ["w", "117", "KiB", "0", "float32", "[300,", "100]"] in rows(result)
    assert ["half", "42", "B", "0", "bfloat16", "[7,", "3]"] in rows(result)
    assert [row[-1] for row in rows(result) if row[0] == "lr"] == ["value"]
    assert not [line for line in result.stdout.splitlines() if len(line) > 80]


def test_values_are_read_on_demand(cli: Cli, tmp_path: Path) -> None:
    save(state(), tmp_path / "step-7")
    result = cli("inspect", str(tmp_path / "step-7"), "--values")
    assert ["lr", "0.1"] in [[row[0], row[-1]] for row in rows(result)]
    assert "['a', 'b']" in result.stdout
    record = json.loads(cli("inspect", str(tmp_path / "step-7"), "--values", "--json").stdout)
    assert {each["fqn"]: each["value"] for each in record["entries"] if each["kind"] == "value"} == {
        "lr": "0.1",
        "names": "['a', 'b']",
        "betas": "(0.9, 0.999)",
    }


def test_depth_and_filter(cli: Cli, tmp_path: Path) -> None:
    save(state(), tmp_path / "step-7")
    folded = cli("inspect", str(tmp_path / "step-7"), "--depth", "1")
    assert ["model", "117", "KiB", "5", "tensors"] in rows(folded)
    assert "half" not in folded.stdout
    record = json.loads(cli("inspect", str(tmp_path / "step-7"), "--filter", "model.*s*", "--json").stdout)
    assert [each["fqn"] for each in record["entries"]] == ["model.ids", "model.step"]
    nothing = cli("inspect", str(tmp_path / "step-7"), "--filter", "optimizer.*")
    assert (nothing.code, nothing.stdout) == (2, "")
    assert "fits 'optimizer.*'" in nothing.stderr


def test_shards_and_the_ranks_that_wrote_them(cli: Cli, tmp_path: Path, run_ranks: RankRunner) -> None:
    run_ranks(3, save_sharded, str(tmp_path / "step-1"), 3, 0)
    result = cli("inspect", str(tmp_path / "step-1"))
    assert ["w", "117", "KiB", "3", "0-2", "float32", "[300,", "100]"] in rows(result)
    record = json.loads(cli("inspect", str(tmp_path / "step-1"), "--json").stdout)
    assert record["world_size"] == 3
    (entry,) = [each for each in record["entries"] if each["fqn"] == "model.w"]
    assert (entry["chunks"], entry["ranks"], entry["nbytes"]) == (3, [0, 1, 2], 300 * 100 * 4)
    assert entry["files"] == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]


def test_state_that_was_not_created_is_said(cli: Cli, tmp_path: Path) -> None:
    training(str(tmp_path / "step-0"), steps=0)
    training(str(tmp_path / "step-1"), steps=1)
    fresh, stepped = (
        json.loads(cli("inspect", str(tmp_path / f"step-{step}"), "--json").stdout) for step in (0, 1)
    )
    assert fresh["not_created"] == ["optimizer.state.bias", "optimizer.state.weight"]
    assert stepped["not_created"] == []
    folded = cli("inspect", str(tmp_path / "step-0"), "--depth", "3")
    assert folded.stdout.count("3 tensors, not created yet") == 2


def test_checkpoints_of_stock_torch_and_in_stores(cli: Cli, tmp_path: Path, store_url: str) -> None:
    stock_save(state(), tmp_path / "stock")
    result = cli("inspect", str(tmp_path / "stock"))
    assert result.code == 0
    assert "written by stock torch" in result.stdout
    assert ["w", "117", "KiB", "0", "float32", "[300,", "100]"] in rows(result)
    save(state(), f"{store_url}/step-1")
    assert cli("inspect", f"{store_url}/step-1", "--values").code == 0


def test_a_folder_of_checkpoints_is_one_message_that_names_them(cli: Cli, tmp_path: Path) -> None:
    for step in range(7):
        save({"lr": 0.1}, tmp_path / f"step-{step}")
    result = cli("inspect", str(tmp_path))
    assert (result.code, result.stdout) == (2, "")
    assert "is a folder of checkpoints, not a checkpoint. Name one of them (and 2 more):" in result.stderr
    assert result.stderr.splitlines()[-1] == "  - step-6"


def test_code_is_refused_and_not_run(cli: Cli, tmp_path: Path) -> None:
    stock_save(state(), tmp_path / "step-1")
    with_evil_metadata(tmp_path / "step-1", tmp_path / "made")
    result = cli("inspect", str(tmp_path / "step-1"))
    assert (result.code, result.stdout) == (1, "")
    assert "mkdir, which is not on the allow list. No code was run." in result.stderr
    assert not (tmp_path / "made").exists()
