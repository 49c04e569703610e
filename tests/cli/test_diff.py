"""``swapckpt diff``: what differs, to the last bit, whatever the shards are."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from swapckpt.tools import content as contents
from swapckpt.tools.content import TensorInfo, boxes
from swapckpt.tools.values import as_json, same_value
from tests.cli.checkpoints import Evil, flip, place_of, save_sharded, state
from tests.storage.stores import save, stock_save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.conftest import Result
    from tests.multirank import RankRunner

    Cli = Callable[..., Result]


def differences(cli: Cli, a: Any, b: Any) -> dict[str, dict[str, Any]]:
    result = cli("diff", str(a), str(b), "--json")
    record = json.loads(result.stdout)
    assert result.code == (0 if record["equal"] else 1), result.stderr
    assert record["equal"] == (not record["differences"])
    return {each["fqn"]: each for each in record["differences"]}


def test_the_same_state_is_the_same(cli: Cli, tmp_path: Path, store_url: str) -> None:
    stock_save(state(), tmp_path / "stock")
    save(state(), f"{store_url}/step-1")
    result = cli("diff", str(tmp_path / "stock"), f"{store_url}/step-1")
    assert (result.code, result.stdout) == (0, "the same to the last bit: 5 tensors and 3 values\n")


@pytest.mark.parametrize("piece_nbytes", [390, 5000])
def test_shards_do_not_matter(
    cli: Cli, tmp_path: Path, run_ranks: RankRunner, monkeypatch: pytest.MonkeyPatch, piece_nbytes: int
) -> None:
    monkeypatch.setattr(contents, "PIECE_NBYTES", piece_nbytes)  # also rows longer than a piece
    run_ranks(2, save_sharded, str(tmp_path / "columns"), 2, 1)
    save(state(), tmp_path / "whole")
    assert differences(cli, tmp_path / "columns", tmp_path / "whole") == {}
    changed = state()
    changed["model"]["w"][299, 99] += 1
    save(changed, tmp_path / "changed")
    found = differences(cli, tmp_path / "columns", tmp_path / "changed")
    assert {fqn: each["num_differing"] for fqn, each in found.items()} == {"model.w": 1}


def test_every_kind_of_difference(cli: Cli, tmp_path: Path) -> None:
    a: dict[str, Any] = {
        "only_a": torch.ones(2),
        "both": torch.ones(3),
        "shape": torch.ones(2, 3),
        "dtype": torch.ones(2),
        "kind": torch.ones(2),
        "values": torch.arange(6.0),
        "lr": 0.1,
        "list": [1, 2],
        "long": ["a" * 200],
    }
    b: dict[str, Any] = {
        "both": torch.ones(3),
        "shape": torch.ones(3, 2),
        "dtype": torch.ones(2, dtype=torch.float64),
        "kind": "a string",
        "values": torch.tensor([0.0, 1.0, 2.5, 3.0, 4.0, 1.0]),
        "lr": 0.2,
        "list": [1, 2],
        "long": ["b" * 200],
        "only_b": 7,
    }
    save(a, tmp_path / "a")
    save(b, tmp_path / "b")
    found = differences(cli, tmp_path / "a", tmp_path / "b")
    long = found.pop("long")
    assert {fqn: (each["kind"], each["a"], each["b"]) for fqn, each in found.items()} == {
        "only_a": ("only in A", "float32 [2]", ""),
        "only_b": ("only in B", "", "7"),
        "shape": ("shape", "float32 [2, 3]", "float32 [3, 2]"),
        "dtype": ("dtype", "float32 [2]", "float64 [2]"),
        "kind": ("tensor and value", "float32 [2]", "'a string'"),
        "values": ("elements", "float32 [6]", "float32 [6]"),
        "lr": ("value", "0.1", "0.2"),
    }
    values = found["values"]
    assert (values["numel"], values["num_differing"], values["num_nan"], values["max_abs"]) == (6, 2, 0, 4.0)
    text = cli("diff", str(tmp_path / "a"), str(tmp_path / "b")).stdout
    assert "  values: float32 [6], 2 of 6 elements differ, by at most 4\n" in text
    assert f"  long:\n      {long['a']} in A\n      {long['b']} in B\n" in text
    assert "  lr: 0.1 in A, 0.2 in B\n" in text
    assert max(map(len, text.splitlines()[2:])) <= 80  # the first two are paths
    assert text.endswith("8 differences; the same: 1 tensor and 1 value\n")


@pytest.mark.parametrize(
    ("a", "b", "num_differing", "num_nan", "max_abs"),
    [
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), 1, 0, 0.0),
        (torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]), 0, 0, None),
        (torch.tensor([math.nan, 1.0]), torch.tensor([1.0, 1.5]), 2, 1, 0.5),
        (torch.tensor([math.nan]), torch.tensor([1.0]), 1, 1, None),
        (torch.tensor([math.inf, math.inf]), torch.tensor([math.inf, 0.0]), 1, 0, "inf"),
        (torch.tensor([1, 300]), torch.tensor([1, -300]), 1, 0, 600.0),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1, 0, 1.0),
        (torch.tensor([1 + 1j]), torch.tensor([1 - 1j]), 1, 0, 2.0),
        (torch.tensor([1 + 1j]).to(torch.complex128), torch.tensor([1 + 2j]).to(torch.complex128), 1, 0, 1.0),
        (torch.tensor([1.0, 2.0]).to(torch.bfloat16), torch.tensor([1.0, 4.0]).to(torch.bfloat16), 1, 0, 2.0),
        (
            torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
            torch.tensor([1.0, 4.0]).to(torch.float8_e4m3fn),
            1,
            0,
            2.0,
        ),
        (torch.tensor(1.0), torch.tensor(1.5), 1, 0, 0.5),
    ],
)
def test_bits_are_compared_and_distances_told(
    cli: Cli,
    tmp_path: Path,
    a: torch.Tensor,
    b: torch.Tensor,
    num_differing: int,
    num_nan: int,
    max_abs: float | str | None,
) -> None:
    save({"t": a}, tmp_path / "a")
    save({"t": b}, tmp_path / "b")
    found = differences(cli, tmp_path / "a", tmp_path / "b")
    assert bool(found) == bool(num_differing)
    if found:
        told = found["t"]
        assert (told["num_differing"], told["num_nan"], told["max_abs"]) == (num_differing, num_nan, max_abs)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (7, 3), (3, 0, 2), (2, 5, 40), (1, 1, 1), (100,)])
def test_pieces_cover_each_element_once_in_order(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for piece_nbytes in (4, 40, 1 << 20):
        monkeypatch.setattr(contents, "PIECE_NBYTES", piece_nbytes)
        whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
        read = []
        for box in boxes(TensorInfo(torch.float32, shape)):
            part = whole
            for dim, (offset, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
                part = part.narrow(dim, offset, length)
            assert part.shape == box.lengths
            assert part.nbytes <= piece_nbytes
            read += part.flatten().tolist()
        assert read == list(range(math.prod(shape)))


def test_a_damaged_checkpoint_is_an_error_that_names_the_item(cli: Cli, tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(state(), tmp_path / name)
    file, start, length = place_of(tmp_path / "b", "model.w")
    flip(file, start + length // 2)
    result = cli("diff", str(tmp_path / "a"), str(tmp_path / "b"))
    assert (result.code, result.stdout) == (1, "")
    assert "b/__0_0.distcp, item 'model.w' at (0, 0): block 0 of 2 contradicts its checksum" in result.stderr


def test_below_a_name(cli: Cli, tmp_path: Path) -> None:
    save({"model": state()["model"], "optimizer": {"lr": 1}}, tmp_path / "a")
    save(state()["model"], tmp_path / "b")
    arguments = ("diff", str(tmp_path / "a"), str(tmp_path / "b"))
    assert cli(*arguments).code == 1
    assert cli(*arguments, "--prefix-a", "model").code == 0
    nothing = cli(*arguments, "--prefix-b", "head")
    assert (nothing.code, "has nothing below 'head'." in nothing.stderr) == (2, True)


def test_a_value_with_code_is_refused_and_not_run(cli: Cli, tmp_path: Path) -> None:
    stock_save({"lr": Evil(tmp_path / "made")}, tmp_path / "a")
    stock_save({"lr": 0.1}, tmp_path / "b")
    result = cli("diff", str(tmp_path / "a"), str(tmp_path / "b"))
    assert (result.code, result.stdout) == (1, "")
    assert "item 'lr' needs posix.mkdir, which is not on the allow list" in result.stderr
    assert not (tmp_path / "made").exists()


def test_same_values_have_the_same_types_throughout() -> None:
    assert same_value({"a": [1, (2.0, "x")], "t": torch.ones(2)}, {"a": [1, (2.0, "x")], "t": torch.ones(2)})
    assert same_value(math.nan, math.nan)
    for a, b in ((1, 1.0), (1, True), ([1], (1,)), (0.0, -0.0), ({"a": 1}, {"a": 1, "b": 2}), ([1], [1, 2])):
        assert not same_value(a, b)


def test_json_holds_what_comes_back_the_same() -> None:
    kept: list[object] = [None, True, 3, 0.1, "x", [1, [2]], {"a": {"b": []}}]
    for value in kept:
        assert json.loads(as_json(value) or "") == value
    lost: list[object] = [(1, 2), {1: 2}, {"a": (1,)}, math.inf, math.nan, b"x", {1}, torch.ones(1), object()]
    for value in lost:
        assert as_json(value) is None
