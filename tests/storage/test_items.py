"""Items made around a tensor's memory are those of torch.save, and headers are read without unpickling."""

from __future__ import annotations

import io
import os
import zipfile
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from zlib_ng.zlib_ng import crc32, crc32_combine

from swapckpt.errors import CorruptCheckpointError, ReleasedStorageError
from swapckpt.storage import items
from swapckpt.storage.items import (
    SLAB_NBYTES,
    Dense,
    Header,
    bytes_of,
    is_dense,
    parse_header,
    payload,
    skeleton,
)

if TYPE_CHECKING:
    from pathlib import Path

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.bool),
    *(torch.complex64, torch.complex128),
]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 4), (2, 3, 4, 5), (70_000,)]


def stock_item(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def our_item(tensor: Tensor) -> bytes:
    frame = skeleton(tensor.dtype, tuple(tensor.shape))
    assert frame is not None
    data = b"".join(bytes(view) for view in payload(tensor, name="w"))
    assert frame.nbytes == len(frame.header) + len(data) + len(frame.footer_with(0))
    assert frame.header_crc == crc32(frame.header)
    return frame.header + data + frame.footer_with(crc32(data))


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    numel = torch.Size(shape).numel()
    raw = torch.randint(0, 2 if dtype is torch.bool else 100, (numel * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if numel else torch.empty(shape, dtype=dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bytes(bytes_of(a)) == bytes(bytes_of(b))


# -------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_item_is_what_torch_save_writes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_tensor(dtype, shape)
    ours, stock = our_item(tensor), stock_item(tensor)
    assert same(torch.load(io.BytesIO(ours), weights_only=True), tensor)
    archive, expected = zipfile.ZipFile(io.BytesIO(ours)), zipfile.ZipFile(io.BytesIO(stock))
    assert archive.testzip() is None
    # The last record is a hash over the checksums of the others, which nothing reads.
    *compared, ignored = expected.infolist()
    assert ignored.filename == "archive/.data/serialization_id"
    assert archive.namelist() == expected.namelist()
    for record in compared:
        assert archive.read(record.filename) == expected.read(record.filename)
    upto = ignored.header_offset
    assert ours[:upto] == stock[:upto]
    assert len(ours) == len(stock)


def test_an_item_larger_than_four_gigabytes(tmp_path: Path) -> None:
    nbytes = (4 << 30) + 4096
    frame = skeleton(torch.uint8, (nbytes,))
    assert frame is not None
    zeros = crc32(bytes(1 << 20))
    checksum = zeros
    for _ in range((nbytes >> 20) - 1):
        checksum = crc32_combine(checksum, zeros, 1 << 20)
    checksum = crc32_combine(checksum, crc32(bytes(4096)), 4096)
    path = tmp_path / "item"  # a file of holes: it takes no space
    with path.open("wb") as stream:
        stream.write(frame.header)
        stream.seek(nbytes, os.SEEK_CUR)
        stream.write(frame.footer_with(checksum))
    assert path.stat().st_size == frame.nbytes
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("archive/data/0")
        assert (info.file_size, info.CRC) == (nbytes, checksum)
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded.shape == (nbytes,)
    header = parse_header(frame.header, origin="x")
    dense = Dense(torch.uint8, (nbytes,), (1,), 0, nbytes)
    assert header == Header(dense, len(frame.header), is_checked=True, crc=None)
    assert header.checksum(frame.footer_with(checksum)[:8], origin="x") == checksum


def test_a_torch_that_writes_another_archive_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "parse_header", lambda *_, **__: None)
    assert skeleton.__wrapped__(torch.float32, (3,)) is None


def test_quantized_tensors_are_left_to_torch_save() -> None:
    assert skeleton(torch.qint8, (3,)) is None


def test_the_payload_is_the_tensor_s_own_memory() -> None:
    arena = torch.arange(100.0)
    tensor = arena[10:40].view(5, 6)
    (view,) = payload(tensor, name="w")
    view[:4] = b"\0\0\x80\x3f"  # 1.0
    assert tensor[0, 0] == 1.0
    assert len(view) == tensor.nbytes


def layouts() -> dict[str, Tensor]:
    base = torch.arange(24.0).reshape(2, 3, 4)
    large = torch.arange(3 * SLAB_NBYTES // 4, dtype=torch.int32).reshape(3, -1)
    return {
        "transposed": base.transpose(0, 2),
        "strided": base[:, ::2],
        "expanded": torch.arange(3.0).expand(4, 3),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugate": torch.randn(3, 4, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, 4, dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(3, 4).t()),
        "empty": torch.empty(3, 0).t(),
        "rows larger than a slab": torch.stack([large, large], dim=-1).transpose(0, 2),
        "many slabs": large.t(),
        "scalar": torch.arange(5.0)[3],
    }


@pytest.mark.parametrize("name", layouts())
def test_any_layout_is_written_in_row_major_order(name: str) -> None:
    tensor = layouts()[name]
    assert is_dense(tensor)
    pieces = [bytes(view) for view in payload(tensor, name="w")]
    expected = tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    assert b"".join(pieces) == bytes(bytes_of(expected))
    assert max(map(len, pieces)) <= SLAB_NBYTES


def test_a_released_storage_is_an_error_not_a_crash() -> None:
    tensor = torch.ones(1000)
    part = tensor[10:20]
    tensor.untyped_storage().resize_(0)
    for released in (tensor, part, torch.nn.Parameter(tensor)):
        with pytest.raises(ReleasedStorageError, match=r"optim\.w: the tensor of"):
            list(payload(released, name="optim.w"))


class Subclass(Tensor):
    pass


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.ones(3, device="meta"),
        torch.ones(3).as_subclass(Subclass),
    ],
    ids=["sparse", "meta", "subclass"],
)
def test_what_is_more_than_elements_in_memory_is_not_dense(tensor: Tensor) -> None:
    assert not is_dense(tensor)


# -------------------------------------------------------------------------------------- reading


@given(
    dtype=st.sampled_from(DTYPES),
    sizes=st.lists(st.integers(0, 4), max_size=4),
    order=st.randoms(use_true_random=False),
    start=st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_the_header_of_a_stock_item_says_where_its_bytes_are(
    dtype: torch.dtype, sizes: list[int], order: object, start: int
) -> None:
    dims = list(range(len(sizes)))
    order.shuffle(dims)  # type: ignore[attr-defined]
    tensor = random_tensor(dtype, (4 + start, *sizes))[start:].permute(0, *(dim + 1 for dim in dims))
    item = stock_item(tensor)
    header = parse_header(item, origin="x")
    assert header is not None
    found = header.tensor
    assert (found.dtype, found.shape, found.stride) == (dtype, tuple(tensor.shape), tensor.stride())
    assert found.storage_offset == tensor.storage_offset()
    nbytes = found.storage_numel * dtype.itemsize
    storage = torch.frombuffer(
        bytearray(item[header.payload_at :][:nbytes]) or bytearray(1), dtype=torch.uint8
    )
    if nbytes:
        rebuilt = storage.view(dtype).as_strided(found.shape, found.stride, found.storage_offset)
        assert same(rebuilt.contiguous(), tensor.contiguous())
        trailer, elements = item[header.payload_at + nbytes :][:8], item[header.payload_at :][:nbytes]
        assert header.checksum(trailer, origin="x") == crc32(elements)
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    assert found.is_row_major == (not tensor.numel() or (whole and tensor.is_contiguous()))


def test_the_first_bytes_of_a_stock_item_suffice() -> None:
    item = stock_item(torch.zeros(50_000))
    assert parse_header(item[:1024], origin="x") == parse_header(item, origin="x")
    for end in range(704):
        assert parse_header(item[:end], origin="x") is None


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(3).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
        {"w": torch.ones(2)},
        [torch.ones(2), torch.zeros(2)],
        {"lr": 0.1},
        torch.ones(3).as_subclass(Subclass),
    ],
    ids=["sparse", "parameter", "dict", "list", "plain", "subclass"],
)
def test_what_is_not_one_dense_tensor_is_left_to_others(value: object) -> None:
    assert parse_header(stock_item(value), origin="x") is None


def rewritten(data: bytes, changes: dict[str, bytes], *, compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, changes.get(name, old.read(name)))
    return stream.getvalue()


def test_archives_of_another_make_are_read_or_left_to_others() -> None:
    item = stock_item(torch.arange(3.0))
    described = zipfile.ZipFile(io.BytesIO(item)).read("archive/data.pkl")
    remade = parse_header(rewritten(item, {}), origin="x")  # lengths in front, no padding
    assert remade is not None
    assert remade.tensor.shape == (3,)
    assert remade.checksum(b"", origin="x") == crc32(bytes_of(torch.arange(3.0)))  # in front, too
    others = {
        "byte order": rewritten(item, {"archive/byteorder": b"big"}),
        "compressed": rewritten(item, {}, compression=zipfile.ZIP_DEFLATED),
        "other storage": rewritten(
            item, {"archive/data.pkl": described.replace(b"\x01\0\0\x000", b"\x01\0\0\x001")}
        ),
        "no storage next": rewritten(item, {}).replace(b"archive/data/0", b"archive/datas0"),
    }
    for name, other in others.items():
        assert other != rewritten(item, {}), name
        assert parse_header(other, origin="x") is None, name


def test_archives_without_checksums_are_known_as_such() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        item = stock_item(torch.arange(3.0))
    finally:
        torch.serialization.set_crc32_options(True)
    header = parse_header(item, origin="x")
    assert header is not None
    assert not header.is_checked
    assert header.checksum(item[header.payload_at + 12 :][:8], origin="x") is None


def test_a_lost_checksum_is_damage() -> None:
    item = stock_item(torch.arange(3.0))
    header = parse_header(item, origin="x")
    assert header is not None
    with pytest.raises(CorruptCheckpointError, match="checksum behind its elements is damaged"):
        header.checksum(bytes(8), origin="x")
    at = item.index(b"PK\x07\x08") + 4  # of the pickle
    with pytest.raises(CorruptCheckpointError, match="lost their checksums"):
        parse_header(item[:at] + bytes(4) + item[at + 4 :], origin="x")


def test_bytes_that_are_no_archive_have_no_header() -> None:
    for data in (b"", b"PK", b"\x80\x02N.", os.urandom(2000)):
        assert parse_header(data, origin="x") is None


def test_no_flipped_bit_of_a_header_changes_what_it_says() -> None:
    """Each is refused, unrecognized, or without effect: the elements are never looked for elsewhere."""
    item = stock_item(torch.arange(6.0).reshape(2, 3))
    expected = parse_header(item, origin="x")
    assert expected is not None
    recognized = 0
    for bit in range(8 * expected.payload_at):
        damaged = bytearray(item)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            header = parse_header(damaged, origin="x")
        except CorruptCheckpointError:
            continue
        if header is not None:
            assert (header.tensor, header.payload_at) == (expected.tensor, expected.payload_at)
            recognized += 1
    assert recognized  # padding, names and dates are not looked at
