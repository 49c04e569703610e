"""``swapckpt convert``: to and from torch.save and safetensors, bit for bit, in bounded memory."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import zipfile
from collections import OrderedDict
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

import pytest
import safetensors
import safetensors.torch
import torch

from swapckpt.storage import open_checkpoint, open_files
from swapckpt.tools import convert as conversion
from swapckpt.tools.sources import open_content
from tests.cli.checkpoints import Evil, flip, place_of, save_sharded, state, training
from tests.storage.stores import equal, load, save, stock_load, stock_save, zeroed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Result
    from tests.multirank import RankRunner

    Cli = Callable[..., Result]

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32),
    *(torch.bool, torch.complex64),
]


def convert(cli: Cli, source: Any, target: Any, *options: str) -> str:
    result = cli("convert", str(source), str(target), *options)
    assert result.code == 0, result.stderr
    return result.stdout


def of_every_dtype() -> dict[str, Any]:
    torch.manual_seed(0)
    return {str(dtype).removeprefix("torch."): torch.randint(0, 2, (5, 3)).to(dtype) for dtype in DTYPES} | {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
    }


def test_to_torch_save_and_back(cli: Cli, tmp_path: Path, store_url: str) -> None:
    saved = {**state(), "dtypes": of_every_dtype(), "list": [torch.ones(2), 3]}
    save(saved, f"{store_url}/step-1")
    said = convert(cli, f"{store_url}/step-1", tmp_path / "all.pt")
    assert f"wrote {tmp_path / 'all.pt'}, a file of torch.save: 23 tensors, 4 values, " in said
    for options in ({}, {"mmap": True}):
        assert equal(torch.load(tmp_path / "all.pt", weights_only=True, **options), saved)
    convert(cli, tmp_path / "all.pt", f"{store_url}/step-2")
    assert equal(load(zeroed(saved), f"{store_url}/step-2"), saved)
    assert open_checkpoint(open_files(store_url), "step-2").manifest is not None  # committed by our protocol
    assert cli("diff", f"{store_url}/step-1", f"{store_url}/step-2").code == 0
    assert cli("diff", f"{store_url}/step-1", str(tmp_path / "all.pt")).code == 0


def test_files_in_stores(cli: Cli, tmp_path: Path, store_url: str) -> None:
    save(state(), tmp_path / "step-1")
    for name in ("model.pt", "model.safetensors"):
        convert(cli, tmp_path / "step-1", f"{store_url}/{name}", "--prefix", "model")
        convert(cli, f"{store_url}/{name}", tmp_path / f"from-{name.partition('.')[2]}")
        arguments = (str(tmp_path / "step-1"), f"{store_url}/{name}", "--prefix-a", "model")
        assert cli("diff", *arguments).code == 0
    assert equal(load(zeroed(state()["model"]), tmp_path / "from-pt"), state()["model"])
    assert equal(load(zeroed(state()["model"]), tmp_path / "from-safetensors"), state()["model"])


def test_archives_pass_the_checks_of_zip(cli: Cli, tmp_path: Path) -> None:
    save({**state(), "dtypes": of_every_dtype()}, tmp_path / "step-1")
    convert(cli, tmp_path / "step-1", tmp_path / "all.pt")
    with zipfile.ZipFile(tmp_path / "all.pt") as archive:
        assert archive.testzip() is None
        checksums = {info.filename: info.CRC for info in archive.infolist() if info.file_size}
    assert all(checksums.values())
    data = (tmp_path / "all.pt").read_bytes()
    for name, crc in checksums.items():  # zipfile looks into the directory only; torch can read the other one
        if "/data/" in name:
            assert b"PK\x07\x08" + crc.to_bytes(4, "little") in data


def test_tensors_keep_their_names_when_the_source_lists_them_out_of_order(tmp_path: Path) -> None:
    saved = {"a": {"x": torch.ones(2), "y": torch.ones(2) * 2}, "b": torch.ones(2) * 3}
    torch.save(saved, tmp_path / "a.pt")
    with closing(open_content(str(tmp_path / "a.pt"))) as content:
        content.paths = {fqn: content.paths[fqn] for fqn in ("a.x", "b", "a.y")}
        conversion.convert(content, str(tmp_path / "b.pt"))
    assert equal(torch.load(tmp_path / "b.pt", weights_only=True), saved)


def test_to_safetensors_and_back(cli: Cli, tmp_path: Path) -> None:
    saved: dict[str, Any] = {"model": of_every_dtype(), "lr": 0.1, "names": ["a", "b"]}
    save(saved, tmp_path / "step-1")
    convert(cli, tmp_path / "step-1", tmp_path / "all.safetensors")
    tensors = safetensors.torch.load_file(tmp_path / "all.safetensors")
    assert equal(tensors, {f"model.{name}": value for name, value in saved["model"].items()})
    with safetensors.safe_open(tmp_path / "all.safetensors", framework="pt") as file:
        assert file.metadata()["format"] == "pt"
    convert(cli, tmp_path / "all.safetensors", tmp_path / "back")
    assert cli("diff", str(tmp_path / "step-1"), str(tmp_path / "back")).code == 0


def test_from_the_library_s_own_safetensors(cli: Cli, tmp_path: Path) -> None:
    tensors = of_every_dtype()
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt", "by": "me"})
    convert(cli, tmp_path / "a.safetensors", tmp_path / "a.pt")
    assert equal(torch.load(tmp_path / "a.pt", weights_only=True), {**tensors, "__metadata__.by": "me"})
    convert(cli, tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert equal(safetensors.torch.load_file(tmp_path / "b.safetensors"), tensors)
    with safetensors.safe_open(tmp_path / "b.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "by": "me"}


def indexed(folder: Path, weight_map: dict[str, str]) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return path


def test_safetensors_files_are_read_by_their_index(cli: Cli, tmp_path: Path) -> None:
    tensors = of_every_dtype()
    names = {fqn: f"model-{n % 2 + 1:05}-of-00002.safetensors" for n, fqn in enumerate(tensors)}
    for file in set(names.values()):
        mine = {fqn: tensor for fqn, tensor in tensors.items() if names[fqn] == file}
        safetensors.torch.save_file(mine, tmp_path / file)
    index = indexed(tmp_path, names)
    convert(cli, index, tmp_path / "step-1")
    assert equal(load(zeroed(tensors), tmp_path / "step-1"), tensors)
    assert cli("diff", str(index), str(tmp_path / "step-1")).code == 0


def test_an_index_that_does_not_fit_its_files_says_all_that_is_wrong(cli: Cli, tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "1.safetensors")
    for weight_map, code, says in (
        (
            {"w": "1.safetensors", "b": "3.safetensors", "a": "2.safetensors"},
            2,
            "  - 2.safetensors\n  - 3.safe",
        ),
        ({"w": "1.safetensors", "v": "1.safetensors"}, 1, "  - v: not in 1.safetensors"),
        ({"w": "../1.safetensors"}, 1, "is not a path inside the checkpoint"),
        ({"w": 3}, 1, "is no index of safetensors files"),
    ):
        result = cli("convert", str(indexed(tmp_path, cast("Any", weight_map))), str(tmp_path / "out"))
        assert (result.code, result.stdout) == (code, ""), result
        assert says in result.stderr
    (tmp_path / "x.safetensors.index.json").write_text("[]")
    result = cli("convert", str(tmp_path / "x.safetensors.index.json"), str(tmp_path / "out"))
    assert (result.code, "is no index of safetensors files" in result.stderr) == (1, True)
    assert not (tmp_path / "out").exists()


def test_what_safetensors_cannot_hold_is_listed(cli: Cli, tmp_path: Path) -> None:
    save({"w": torch.ones(3), "betas": (0.9, 0.999), "limit": math.inf, "lr": 0.1}, tmp_path / "step-1")
    arguments = ("convert", str(tmp_path / "step-1"), str(tmp_path / "a.safetensors"))
    refused = cli(*arguments)
    assert (refused.code, refused.stdout) == (1, "")
    assert [line.split(":")[0] for line in refused.stderr.splitlines()[1:]] == ["  - betas", "  - limit"]
    assert list(tmp_path.iterdir()) == [tmp_path / "step-1"]
    result = cli(*arguments, "--drop-values", "--json")
    assert json.loads(result.stdout)["dropped"] == ["betas", "limit"]
    assert json.loads(result.stdout)["num_values"] == 1
    save({"z": torch.ones(2, dtype=torch.complex128)}, tmp_path / "step-2")
    refused = cli("convert", str(tmp_path / "step-2"), str(tmp_path / "b.safetensors"), "--drop-values")
    assert (refused.code, "  - z: complex128 [2]" in refused.stderr) == (1, True)


def test_state_dicts_as_people_save_them(cli: Cli, tmp_path: Path) -> None:
    """Views of one storage, other strides, parameters, ordered dicts with attributes, optimizer state."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    base = torch.randn(6, 5)
    saved: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "slice": base[2:4],
        "transposed": base.t(),
        "column": base[:, 1],
        "expanded": torch.ones(1, 3).expand(2, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "empty": {},
        "tuple": (torch.ones(1), 2),
    }
    torch.save(saved, tmp_path / "a.pt")
    convert(cli, tmp_path / "a.pt", tmp_path / "step-1")
    destination = {
        name: zeroed(saved[name]) for name in ("model", "slice", "transposed", "column", "expanded")
    }
    loaded = load(destination, tmp_path / "step-1")
    assert equal(loaded, {name: saved[name].clone() if name != "model" else saved[name] for name in loaded})
    assert cli("diff", str(tmp_path / "a.pt"), str(tmp_path / "step-1")).code == 0
    convert(cli, tmp_path / "step-1", tmp_path / "b.pt")
    assert cli("diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")).code == 0
    back = torch.load(tmp_path / "b.pt", weights_only=True)
    assert back["empty"] == {}
    assert back["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    fresh = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    fresh.load_state_dict(back["model"])
    assert equal(dict(fresh.state_dict()), dict(model.state_dict()))


def test_a_swapped_optimizer_s_checkpoint_as_one_file(cli: Cli, tmp_path: Path) -> None:
    training(str(tmp_path / "step-2"), steps=2)
    convert(cli, tmp_path / "step-2", tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert loaded["optimizer"]["state"]["weight"]["step"] == 2
    assert loaded["optimizer"]["param_groups"][0]["params"] == ["weight", "bias"]


def test_shards_are_put_together_and_stock_torch_reads_the_result(
    cli: Cli, tmp_path: Path, run_ranks: RankRunner
) -> None:
    run_ranks(3, save_sharded, str(tmp_path / "step-1"), 3, 0)
    convert(cli, tmp_path / "step-1", tmp_path / "a.pt")
    assert equal(torch.load(tmp_path / "a.pt", weights_only=True), state())
    convert(cli, tmp_path / "step-1", tmp_path / "one-rank")
    assert equal(stock_load(zeroed(state()), tmp_path / "one-rank"), state())


def test_nothing_is_replaced_unless_it_is_asked_for(cli: Cli, tmp_path: Path) -> None:
    save(state(), tmp_path / "step-1")
    for target in (tmp_path / "a.pt", tmp_path / "step-2"):
        convert(cli, tmp_path / "step-1", target)
        save(state(1), tmp_path / "other", overwrite=True)
        refused = cli("convert", str(tmp_path / "other"), str(target))
        assert (refused.code, refused.stdout) == (2, "")
        assert refused.stderr.endswith("; --overwrite replaces it.\n")
        assert cli("diff", str(tmp_path / "step-1"), str(target)).code == 0
        convert(cli, tmp_path / "other", target, "--overwrite")
        assert cli("diff", str(tmp_path / "other"), str(target)).code == 0


def test_a_damaged_source_leaves_nothing(cli: Cli, tmp_path: Path) -> None:
    save(state(), tmp_path / "step-1")
    torch.save(state(), tmp_path / "a.pt")
    file, start, length = place_of(tmp_path / "step-1", "model.w")
    flip(file, start + length // 2)
    flip(tmp_path / "a.pt", (tmp_path / "a.pt").stat().st_size // 2)
    before = set(tmp_path.iterdir())
    for source, says in (
        ("step-1", "item 'model.w' at (0, 0)"),
        ("a.pt", "a.pt, data/0 contradicts its checksum"),
    ):
        for target in ("b.pt", "b.safetensors", "b"):
            result = cli("convert", str(tmp_path / source), str(tmp_path / target), "--drop-values")
            assert (result.code, result.stdout) == (1, "")
            assert says in result.stderr
    assert set(tmp_path.iterdir()) == before


def test_code_is_refused_and_not_run(cli: Cli, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "lr": Evil(tmp_path / "made")}, tmp_path / "a.pt")
    stock_save({"w": torch.ones(2), "lr": Evil(tmp_path / "made")}, tmp_path / "step-1")
    for source in ("a.pt", "step-1"):
        result = cli("convert", str(tmp_path / source), str(tmp_path / "b.pt"))
        assert (result.code, result.stdout) == (1, "")
        assert "mkdir, which is not on the allow list" in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"a.pt", "step-1"}


def test_files_that_are_something_else_are_one_message(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("no archive at all")
    (tmp_path / "cut.safetensors").write_bytes((1000).to_bytes(8, "little") + b"{")
    (tmp_path / "odd.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]")
    header = b'{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'
    (tmp_path / "far.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    torch.save(state(), tmp_path / "cut.pt")
    os.truncate(tmp_path / "cut.pt", 5000)
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, tmp_path / "twice.pt")
    torch.save({"a": {torch.ones(1)}}, tmp_path / "set.pt")
    torch.save(OrderedDict(w=torch.ones(1)), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name, code, says in (
        ("text.pt", 2, "is neither a file of torch.save"),
        ("old.pt", 2, "is neither a file of torch.save (of torch 1.6 or later)"),
        ("cut.safetensors", 1, "was truncated in its header"),
        ("odd.safetensors", 1, "its header is no object"),
        ("far.safetensors", 1, "does not lie in bytes 0 to 36 of 0"),
        ("list.pt", 1, "holds a list, not a state dict"),
        ("cut.pt", 1, "is not a readable archive"),
        ("twice.pt", 1, "  - a.b: two entries have this name"),
        ("set.pt", 1, "  - a: has tensors in what is neither dict nor list"),
        ("none.pt", 2, "There is nothing at "),
    ):
        result = cli("convert", str(tmp_path / name), str(tmp_path / "out"))
        assert (result.code, result.stdout) == (code, ""), name
        assert says in result.stderr
        assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


PEAK = """
import resource, sys
import torch
from swapckpt.tools.convert import convert
from swapckpt.tools.sources import open_content

def peak_nbytes():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

source, small, *targets = sys.argv[1:]
convert(open_content(small), small + ".pt")  # whatever is imported and allocated once
convert(open_content(small), small + "-copy")
before = peak_nbytes()
for target in targets:
    convert(open_content(source), target)
    source = target
print(peak_nbytes() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the unit of ru_maxrss is Linux's")
def test_memory_is_that_of_a_tensor_not_of_the_checkpoint(tmp_path: Path) -> None:
    num_tensors, tensor_nbytes = 12, 8 << 20
    save(
        {str(n): torch.full((tensor_nbytes // 4,), float(n)) for n in range(num_tensors)}, tmp_path / "step-1"
    )
    save({"w": torch.ones(tensor_nbytes // 4)}, tmp_path / "small")
    targets = [str(tmp_path / name) for name in ("a.pt", "a.safetensors", "copy")]
    command = [sys.executable, "-c", PEAK, str(tmp_path / "step-1"), str(tmp_path / "small"), *targets]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 5 * tensor_nbytes  # of 12: one tensor, one piece, buffers of files
    loaded = torch.load(tmp_path / "a.pt", mmap=True, weights_only=True)
    assert [float(loaded[str(n)][-1]) for n in range(num_tensors)] == list(range(num_tensors))
