"""Byte items are opened with an allow list and reach a planner only as archives of our own making (C11)."""

from __future__ import annotations

import collections
import datetime as dt
import io
import os
import pathlib
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from swapckpt.errors import CorruptCheckpointError, UnsafePickleError
from swapckpt.storage import values
from swapckpt.storage.values import ALLOWED, ByteItems, load_item

if TYPE_CHECKING:
    from pathlib import Path


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


class Settings:
    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self.rate == other.rate

    __hash__ = None  # type: ignore[assignment]


def item(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def rewritten(data: bytes, records: dict[str, bytes], *, compression: int = zipfile.ZIP_STORED) -> bytes:
    """The archive with records added or replaced."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w", compression) as new:
        contents = {name: old.read(name) for name in old.namelist()} | records
        for name, content in contents.items():
            new.writestr(name, content)
    return stream.getvalue()


PLAIN = [
    *(None, True, 3, -(1 << 70), 0.5, 1 + 2j, "text", b"\x00\xff", (0.9, 0.999), [1, [2]], {"lr": 1e-3}),
    *(
        {1, 2},
        frozenset({3}),
        range(3),
        slice(1, None),
        collections.OrderedDict(a=1),
        collections.deque([1], 3),
    ),
    *(torch.float32, torch.Size([2]), torch.device("cpu"), torch.strided, pathlib.Path("a/b")),
    *(
        dt.datetime(2026, 1, 2, tzinfo=dt.timezone.utc),
        dt.timedelta(seconds=3),
        dt.date(2026, 1, 2),
        dt.time(3),
    ),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{type(value).__name__}")
def test_plain_values_arrive_as_they_were(value: object) -> None:
    assert load_item(item(value), origin="x") == value
    handed_over = torch.load(ByteItems(ALLOWED).safe(item(value), origin="x"), weights_only=False)
    assert handed_over == value
    assert type(handed_over) is type(value)


def test_tensors_inside_values_arrive_with_their_geometry_and_sharing() -> None:
    base = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    value = {
        "base": base,
        "part": base.t()[1:3],
        "list": [torch.empty(0, 2), torch.tensor(True), torch.zeros(3, dtype=torch.float8_e4m3fn)],
        "parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
    }
    loaded = torch.load(ByteItems(ALLOWED).safe(item(value), origin="x"), weights_only=False)
    assert torch.equal(loaded["base"], base)
    assert torch.equal(loaded["part"], base.t()[1:3])
    assert loaded["part"].stride() == base.t()[1:3].stride()
    loaded["base"][0, 1] = 100
    assert loaded["part"][0, 0] == 100  # one storage still
    assert [tensor.shape for tensor in loaded["list"]] == [(0, 2), (), (3,)]
    assert loaded["list"][2].dtype is torch.float8_e4m3fn
    assert isinstance(loaded["parameter"], torch.nn.Parameter)
    assert not loaded["parameter"].requires_grad


def test_code_in_a_byte_item_is_refused_and_not_run(tmp_path: Path) -> None:
    data = item({"lr": Evil(tmp_path / "created")})
    with pytest.raises(UnsafePickleError, match=r"__0_0\.distcp, item 'opt' needs .*mkdir"):
        ByteItems(ALLOWED).safe(data, origin="__0_0.distcp, item 'opt'")
    assert not (tmp_path / "created").exists()
    torch.load(io.BytesIO(data), weights_only=False)  # the attack is real
    assert (tmp_path / "created").is_dir()


def test_own_classes_are_allowed_by_name() -> None:
    data = item([Settings(0.1)])
    with pytest.raises(UnsafePickleError, match="Settings"):
        load_item(data, origin="x")
    items = ByteItems(ALLOWED.extended(Settings))
    assert torch.load(items.safe(data, origin="x"), weights_only=False) == [Settings(0.1)]


def test_bytes_are_decoded_by_no_other_codec() -> None:
    pickled = b"\x80\x02c_codecs\nencode\nX\x01\0\0\0aX\x04\0\0\0zlib\x86R."
    with pytest.raises(CorruptCheckpointError, match="encoded as 'zlib'"):
        load_item(rewritten(item(1), {"archive/data.pkl": pickled}), origin="x")


def test_what_is_odd_about_an_archive_does_not_reach_a_planner(tmp_path: Path) -> None:
    """A TorchScript archive, a second pickle: torch.load would look at them, we hand over the value alone."""
    evil = zipfile.ZipFile(io.BytesIO(item(Evil(tmp_path / "x")))).read("archive/data.pkl")
    odd = rewritten(item(0.1), {"archive/constants.pkl": evil, "archive/extra.pkl": evil})
    handed_over = ByteItems(ALLOWED).safe(odd, origin="x")
    assert torch.load(handed_over, weights_only=False) == 0.1
    assert handed_over.getvalue() == item(0.1)


def test_small_items_are_remembered_and_values_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(data: bytes, **kwargs: Any) -> object:
        calls.append(data)
        return load_item(data, **kwargs)

    monkeypatch.setattr(values, "load_item", counted)
    items = ByteItems(ALLOWED)
    first, second = (torch.load(items.safe(item([1]), origin="x"), weights_only=False) for _ in range(2))
    assert len(calls) == 1
    first.append(2)
    assert second == [1]
    for _ in range(2):
        items.safe(item("x" * 5000), origin="x")
    assert len(calls) == 3  # too large to be kept


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"not an archive", id="other"),
        pytest.param(item(1)[:-30], id="truncated"),
        pytest.param(rewritten(item("x" * 9999), {}, compression=zipfile.ZIP_DEFLATED), id="compressed"),
        pytest.param(rewritten(item(1), {"archive/byteorder": b"big"}), id="byte order"),
        pytest.param(rewritten(item(1), {"archive/data.pkl": b"\x80\x02"}), id="pickle"),
        pytest.param(item(torch.ones(3)).replace(b"archive/data/0", b"archive/data/9"), id="no storage"),
    ],
)
def test_a_damaged_item_is_named(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match="item 'lr'"):
        load_item(data, origin="__0_0.distcp, item 'lr'")


def test_records_that_overlap_are_refused() -> None:
    """A hundred entries over the same bytes would unfold to a hundred times the item."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", item(1))
        archive.writestr("archive/data/0", bytes(10_000))
        archive.filelist.extend([archive.getinfo("archive/data/0")] * 100)
        archive._didModify = True  # type: ignore[attr-defined]
    with pytest.raises(CorruptCheckpointError, match="larger than it is"):
        load_item(stream.getvalue(), origin="x")


def geometry(size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> bytes:
    """A tensor of three floats that claims another geometry."""

    class Claim:
        def __init__(self, tensor: Tensor) -> None:
            self.storage = tensor.storage()

        def __reduce__(self) -> tuple[object, ...]:
            hooks: dict[str, object] = collections.OrderedDict()
            return torch._utils._rebuild_tensor_v2, (self.storage, offset, size, stride, False, hooks)

    return item(Claim(torch.ones(3)))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize(
    ("size", "stride", "offset"), [((4,), (1,), 0), ((3,), (1,), 1), ((2,), (1 << 40,), 0), ((3,), (1,), -1)]
)
def test_a_tensor_beyond_its_storage_is_refused(size: tuple[int], stride: tuple[int], offset: int) -> None:
    assert load_item(geometry((3,), (1,), 0), origin="x").tolist() == [1, 1, 1]  # type: ignore[attr-defined]
    with pytest.raises(CorruptCheckpointError):
        load_item(geometry(size, stride, offset), origin="x")


def test_a_value_nested_too_deeply_is_refused() -> None:
    depth = 100_000
    pickled = b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."
    with pytest.raises(CorruptCheckpointError, match="too deeply"):
        ByteItems(ALLOWED).safe(rewritten(item(1), {"archive/data.pkl": pickled}), origin="x")
