"""``swapckpt demo --quick``, from the command to the files it leaves."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING

import pytest

from swapckpt.demo.config import DemoConfig
from swapckpt.demo.story import prepare_folder
from swapckpt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Result

    Cli = Callable[..., Result]


@pytest.mark.slow
@pytest.mark.timeout(600)  # seconds of a busy machine; 30 of an idle one
@pytest.mark.xdist_group("multirank")
@pytest.mark.parametrize(("store", "ranks"), [("disk", 2), ("s3", 1)])
def test_quick_demo_is_equal_to_the_last_bit_and_writes_its_files(
    store: str, ranks: int, cli_process: Cli, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    if store == "s3":
        pytest.importorskip("moto.server")
    out = tmp_path / "out"
    options = ["--device", "cpu", "--store", store, "--ranks", str(ranks), "--out", str(out)]
    result = cli_process("demo", "--quick", *options)
    assert result.code == 0, result.stdout + result.stderr
    assert not [line for line in result.stdout.splitlines() if len(line) > 80 and str(out) not in line]
    assert "FAILED" not in result.stdout

    records = json.loads((out / "records.json").read_text())
    assert all(check["ok"] for check in records["verdict"])
    reference, swapped, resumed = (records["story"][run] for run in ("reference", "swapped", "resumed"))
    kill = records["story"]["kill"]
    losses = [step["loss_hex"] for step in reference["steps"]]
    assert len(losses) == 12
    trained = len(swapped["steps"])
    assert kill["step"] <= trained < 12
    assert [step["loss_hex"] for step in swapped["steps"]] == losses[:trained]
    assert [step["loss_hex"] for step in resumed["steps"]] == losses[kill["step"] - 3 :]
    assert float.fromhex(losses[-1]) < float.fromhex(losses[0]) - 1
    assert kill["written_nbytes"] >= kill["whole_nbytes"] // 2
    assert [info["step"] for info in kill["found"]] == [kill["step"] - 3, kill["step"]]
    check_saves(resumed["saves"], kept=records["story"]["kept"])
    assert (out / "checkpoints").exists() == (store == "disk")
    check_bytes(reference, swapped, resumed)
    check_timeline(json.loads((out / "timeline.json").read_text())["traceEvents"])
    for name in ("loss.png", "memory.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
        assert re.search(rf"wrote .*{re.escape(name)}$", result.stdout, re.MULTILINE)


def check_saves(saves: list[dict], *, kept: list[int]) -> None:
    """A save keeps training for a part of the time that it takes, and the last two remain."""
    assert [save["step"] for save in saves][-2:] == kept == [9, 12]
    assert all(0 < save["stalled_secs"] < save["secs"] for save in saves)


def check_bytes(reference: dict, swapped: dict, resumed: dict) -> None:
    """Unswapped state is on the device; swapped state on the host, in pieces on the device within a step."""
    (state_nbytes,) = {step["device_nbytes"] for step in reference["steps"]}
    for step in swapped["steps"] + resumed["steps"]:
        assert step["device_nbytes"] == 0
        assert 0 < step["device_peak_nbytes"] < state_nbytes / 2
        assert step["host_nbytes"] > 0.95 * state_nbytes  # small tensors are not swapped


def check_timeline(events: list[dict]) -> None:
    """Every batch is updated, and those with swapped state loaded and offloaded, each on its own stream."""
    spans = [event for event in events if event["ph"] == "X"]
    batches = {
        name: sorted(span["args"]["batch"] for span in spans if span["name"] == name)
        for name in ("load", "update", "offload")
    }
    assert batches["update"] == list(range(16))
    assert batches["load"] == batches["offload"]
    assert len(set(batches["load"])) > 10  # some batches hold small norms only
    assert len({span["tid"] for span in spans}) == 3


def test_folder_of_others_is_left_alone(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years")
    result = cli("demo", "--quick", "--out", str(tmp_path))
    assert result.code == 2
    assert "was not made by the demo" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_only_a_folder_that_a_demo_made_is_emptied(tmp_path: Path) -> None:
    config = DemoConfig(out=tmp_path / "out")
    prepare_folder(config)
    checkpoints = config.out / "checkpoints"
    checkpoints.mkdir()
    (config.out / "loss.png").write_bytes(b"old")
    (config.out / "notes.txt").write_text("mine")
    prepare_folder(config)
    assert {path.name for path in config.out.iterdir()} == {"records.json", "notes.txt"}
    (config.out / "records.json").write_text('{"made_by": "another tool"}')
    checkpoints.mkdir()
    with pytest.raises(ConfigError, match="was not made by the demo"):
        prepare_folder(config)
    assert checkpoints.exists()


def test_short_text_is_refused_before_anything_starts(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    result = cli("demo", "--quick", "--data", str(tmp_path / "short.txt"), "--out", str(tmp_path / "out"))
    assert result.code == 2
    assert "short.txt has 9 bytes, one sequence needs 65" in result.stderr


def test_s3_without_a_server_is_refused_before_anything_starts(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "moto.server", None)  # how Python marks what cannot be imported
    out = tmp_path / "out"
    result = cli("demo", "--quick", "--store", "s3", "--out", str(out))
    assert result.code == 2
    assert "pip install 'swapckpt[s3]'" in result.stderr
    assert not out.exists()
