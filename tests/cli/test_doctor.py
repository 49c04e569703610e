"""``swapckpt doctor``: what a machine and a store can do, and that nothing of the examination stays."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from swapckpt.storage import open_files
from tests.storage.stores import save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Result

    Cli = Callable[..., Result]


def findings(cli: Cli, *arguments: str) -> dict[str, dict[str, str]]:
    result = cli("doctor", *arguments, "--json")
    record = json.loads(result.stdout)
    assert result.code == (0 if record["ok"] else 1)
    assert record["ok"] == all(each["level"] != "problem" for each in record["findings"])
    return {each["name"]: each for each in record["findings"]}


def test_the_machine(cli: Cli) -> None:
    result = cli("doctor")
    assert result.code == 0
    assert not [line for line in result.stdout.splitlines() if len(line) > 80]
    found = findings(cli)
    assert found["torch"]["message"] == torch.__version__
    assert {"swapckpt", "python", "accelerator", "pinning", "ulimit -l", "host memory"} < found.keys()
    assert found["gloo"]["message"] == "works"
    assert "CPU backend in its group" in found["collective reads"]["message"]
    assert "torch_npu" not in sys.modules


@pytest.mark.parametrize(
    ("version", "level"),
    [("2.10.1", "problem"), ("2.11.0", "ok"), ("2.14.0+cu130", "ok"), ("2.15.0a0", "warning")],
)
def test_versions_of_torch(cli: Cli, monkeypatch: pytest.MonkeyPatch, version: str, level: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert findings(cli)["torch"]["level"] == level


def test_torch_npu_is_named_and_not_imported(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    (tmp_path / "torch_npu-2.9.0.dist-info").mkdir()
    metadata = tmp_path / "torch_npu-2.9.0.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.9.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = findings(cli)["torch_npu"]
    assert (found["level"], found["message"]) == ("warning", "2.9.0")
    base = torch.__version__.split("+")[0]
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {base}.post1\n")
    assert findings(cli)["torch_npu"]["level"] == "ok"


def test_every_store_is_examined_and_left_as_it_was(cli: Cli, store_url: str) -> None:
    save({"w": torch.ones(3)}, f"{store_url}/step-1")
    before = open_files(store_url).entries("")
    found = findings(cli, store_url)
    assert [entry.name for entry in open_files(store_url).entries("")] == [entry.name for entry in before]
    for name in ("writing", "listing", "reading parts"):
        assert found[name]["level"] == "ok"
    in_memory = store_url.startswith("memory://")
    assert found["committing"]["level"] == ("warning" if in_memory else "ok")
    assert ("free space" in found) == ("direct I/O" in found) == ("://" not in store_url)


def test_a_folder_that_does_not_exist_is_not_made(cli: Cli, tmp_path: Path) -> None:
    found = findings(cli, str(tmp_path / "a" / "b"))
    assert found["folder"]["message"] == f"{tmp_path}/a/b is not there yet; a save makes it, in {tmp_path}"
    assert found["writing"]["level"] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_written_is_a_problem(cli: Cli, tmp_path: Path, s3_bucket: str) -> None:
    (tmp_path / "file").write_text("text")
    for url in (str(tmp_path / "file" / "runs"), f"{s3_bucket}-none/runs"):
        found = findings(cli, url)["writing"]
        assert found["level"] == "problem"
        assert found["advice"]


def test_a_checkpoint_or_a_file_is_no_folder(cli: Cli, tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path / "step-1")
    (tmp_path / "file").write_text("text")
    for name, what in (("step-1", "a checkpoint"), ("file", "a file")):
        found = findings(cli, str(tmp_path / name))["folder"]
        assert (found["level"], found["message"]) == ("problem", f"{tmp_path / name} is {what}")
