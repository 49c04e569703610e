"""SwapStorageReader: reads ours and stock's, only what is needed, verified, without running code."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from swapckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    PlanError,
    SchemaError,
    StorageError,
    UnsafePickleError,
)
from swapckpt.storage import fetch as fetching
from swapckpt.storage import reader
from swapckpt.storage.fetch import Box, SavedItem, fetch
from swapckpt.storage.items import payload, skeleton
from swapckpt.storage.manifest import BlockSums, ItemSums, block_nbytes
from swapckpt.storage.posix import PosixFiles
from swapckpt.storage.reader import SwapStorageReader
from swapckpt.storage.verification import verify as problems_of
from tests.storage.stores import HookedFiles, equal, load, save, stock_load, stock_save, unwrapped, zeroed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from swapckpt._torch import StorageInfo

SAVERS = {"ours": save, "stock": stock_save}


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "optim": {
            "large": torch.randn(500, 100),
            "small": torch.randn(20, 3),
            "transposed": torch.randn(300, 70).t(),
            "half": torch.randn(5).half(),
            "flags": torch.rand(7) > 0.5,
            "empty": torch.empty(0, 3),
            "step": torch.tensor(3.0),
            "fp8": torch.randn(33).to(torch.float8_e4m3fn),
        },
        "settings": {"lr": 0.1, "betas": (0.9, 0.99), "name": "adamw", "none": None},
        "list": [torch.randn(2), torch.arange(3)],
    }


@pytest.fixture(params=["ours", "stock"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint of :func:`state`."""
    SAVERS[request.param](state(), tmp_path / "step-1")
    return tmp_path / "step-1"


# -------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("verify", [True, False])
def test_ours_and_stock_s_are_read(saved: Path, threads: int, verify: bool) -> None:
    assert equal(load(zeroed(state()), saved, threads=threads, verify=verify), state())


def test_bytes_go_into_the_memory_of_the_destination(saved: Path) -> None:
    target = zeroed(state())
    tensors = target["optim"]
    places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    loaded = load(target, saved)
    assert {name: tensor.data_ptr() for name, tensor in loaded["optim"].items()} == places


def test_destinations_of_any_layout_are_filled(saved: Path) -> None:
    arena = torch.zeros(600, 240)
    target = {"optim": {"large": arena[50:550, 3:203:2], "transposed": torch.zeros(70, 300)}}
    load(target, saved)
    assert torch.equal(target["optim"]["large"], state()["optim"]["large"])
    assert torch.equal(target["optim"]["transposed"], state()["optim"]["transposed"])
    arena[50:550, 3:203:2] = 0
    assert not arena.any()


def test_little_memory_is_taken(tmp_path: Path) -> None:
    from pathlib import Path as _Path

    def memory_nbytes(field: str) -> int:
        lines = _Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

    tensors = {f"w{n}": torch.ones(4 << 20) for n in range(8)}  # 128 MB
    save(tensors, tmp_path / "ours")
    stock_save(tensors, tmp_path / "stock")
    for name in ("ours", "stock"):
        _Path("/proc/self/clear_refs").write_text("5")
        before = memory_nbytes("VmRSS")
        load(tensors, tmp_path / name)
        assert memory_nbytes("VmHWM") - before < 40 << 20


def test_large_tensors_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MEDIUM_NBYTES", 100_000)
    monkeypatch.setattr(reader, "PART_NBYTES", 100_000)
    tensor = torch.randn(1000, 100)
    save({"w": tensor}, tmp_path / "x")
    files = HookedFiles(PosixFiles(tmp_path), lambda *_: None)
    assert torch.equal(load({"w": torch.zeros(1000, 100)}, tmp_path / "x", files=files)["w"], tensor)
    assert len(reads_of_data(files)) >= 4


def reads_of_data(files: HookedFiles) -> list[tuple[str, str]]:
    return [call for call in files.calls if call[0].startswith("read") and call[1].endswith("distcp")]


def test_items_of_a_medium_size_are_read_together_when_all_of_them_is_wanted(tmp_path: Path) -> None:
    tensors = {f"w{n}": torch.randn(512, 128) for n in range(6)}  # 256 KB each, in blocks of 64 KB
    save(tensors, tmp_path / "x")
    files = HookedFiles(PosixFiles(tmp_path), lambda *_: None)
    assert equal(load(zeroed(tensors), tmp_path / "x", files=files), tensors)
    assert len(reads_of_data(files)) == 1
    files = HookedFiles(PosixFiles(tmp_path), lambda *_: None)
    parts = {name: torch.zeros(128, 128) for name in tensors}
    source = SwapStorageReader(tmp_path / "x", files=files)
    dcp_load(parts, storage_reader=source, planner=RowsPlanner(first=128), no_dist=True)
    assert all(torch.equal(parts[name], tensors[name][128:256]) for name in tensors)
    assert len(reads_of_data(files)) == 6


class RowsPlanner(DefaultLoadPlanner):
    """Reads rows from ``first`` on, as many as the destination has, as a rank with a shard does."""

    def __init__(self, *, first: int) -> None:
        super().__init__()
        self._first = first

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(
            [
                ReadItem(
                    LoadItemType.TENSOR,
                    dest_index=MetadataIndex(fqn),
                    dest_offsets=torch.Size((0, 0)),
                    storage_index=MetadataIndex(fqn, torch.Size((0, 0))),
                    storage_offsets=torch.Size((self._first, 0)),
                    lengths=tensor.shape,
                )
                for fqn, tensor in self.state_dict.items()
            ]
        )


def test_small_items_are_read_together(tmp_path: Path) -> None:
    tensors = {f"w{n}": torch.full((100,), float(n)) for n in range(200)}
    save({**tensors, "lr": {f"l{n}": 0.1 for n in range(100)}}, tmp_path / "x")
    files = HookedFiles(PosixFiles(tmp_path), lambda *_: None)
    target = {**zeroed(tensors), "lr": {f"l{n}": 0.0 for n in range(100)}}
    loaded = load(target, tmp_path / "x", files=files)
    assert equal({name: loaded[name] for name in tensors}, tensors)
    assert set(loaded["lr"].values()) == {0.1}
    assert len(reads_of_data(files)) <= 2


# -------------------------------------------------------------------------------------- parts of tensors


class MemoryReader:
    """Counts the bytes read of an item in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.nbytes = len(data)
        self.nbytes_read = 0

    def read_into(self, offset: int, view: memoryview) -> None:
        assert offset + len(view) <= self.nbytes
        self.nbytes_read += len(view)
        view[:] = self._data[offset : offset + len(view)]

    def is_cached(self, offset: int, nbytes: int) -> bool:
        return offset + nbytes <= self.nbytes

    def close(self) -> None: ...


def saved_item(tensor: Tensor, *, ours: bool) -> SavedItem:
    shape = tuple(tensor.shape)
    if not ours:
        stream = io.BytesIO()
        torch.save(tensor.clone(), stream)
        data = stream.getvalue()
        return SavedItem(MemoryReader(data), 0, len(data), tensor.dtype, shape, None, "w")
    frame = skeleton(tensor.dtype, shape)
    assert frame is not None
    elements = b"".join(bytes(view) for view in payload(tensor, name="w"))
    sums = BlockSums(len(elements))
    sums.add(memoryview(elements))
    data = frame.header + elements + frame.footer_with(sums.whole)
    item = ItemSums(0, len(data), len(frame.header), len(elements), 0, tuple(sums.checksums))
    return SavedItem(MemoryReader(data), 0, len(data), tensor.dtype, shape, item, "w")


@given(
    data=st.data(), sizes=st.lists(st.integers(0, 9), max_size=4), ours=st.booleans(), verify=st.booleans()
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_box_is_what_slicing_gives(
    monkeypatch: pytest.MonkeyPatch, data: st.DataObject, sizes: list[int], ours: bool, verify: bool
) -> None:
    # Small numbers, so that slabs, blocks, chunks and runs all end somewhere inside.
    monkeypatch.setattr(fetching, "SLAB_NBYTES", data.draw(st.integers(8, 600)))
    monkeypatch.setattr(fetching, "CHUNK_NBYTES", 512 * data.draw(st.integers(1, 4)))
    monkeypatch.setattr(fetching, "LONG_RUN_NBYTES", data.draw(st.integers(1, 300)))
    monkeypatch.setattr("swapckpt.storage.manifest.MIN_BLOCK_NBYTES", 256)
    tensor = torch.arange(float(torch.Size(sizes).numel())).reshape(sizes)
    offsets = [data.draw(st.integers(0, size)) for size in sizes]
    lengths = [data.draw(st.integers(0, size - offset)) for size, offset in zip(sizes, offsets, strict=True)]
    expected = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
    target = torch.full(lengths, -1.0)
    if data.draw(st.booleans()):
        target = torch.full([2 * length for length in lengths], -1.0)[
            tuple(slice(0, None, 2) for _ in lengths)
        ]
    if data.draw(st.booleans()):
        target = target.double()
    fetch(saved_item(tensor, ours=ours), Box(tuple(offsets), tuple(lengths)), target, verify=verify)
    assert torch.equal(target, expected.to(target.dtype))


def test_an_item_that_does_not_hold_its_elements_is_noticed() -> None:
    target = torch.zeros(100)
    ours, stock = (saved_item(torch.ones(100), ours=ours) for ours in (True, False))
    with pytest.raises(CorruptCheckpointError, match="400 bytes are saved, 800 make"):
        fetch(replace(ours, dtype=torch.float64), Box((0,), (100,)), target.double(), verify=True)
    with pytest.raises(CorruptCheckpointError, match=r"holds torch\.float32 .* has torch\.float64"):
        fetch(replace(stock, dtype=torch.float64), Box((0,), (100,)), target.double(), verify=True)
    with pytest.raises(CorruptCheckpointError, match="ends inside its elements"):
        fetch(replace(stock, nbytes=stock.nbytes - 870), Box((0,), (100,)), target, verify=True)
    assert not target.any()


@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_of_a_chunk_costs_little_more_than_its_bytes(dim: int) -> None:
    tensor = torch.zeros(2000, 4096)  # 32 MB in rows of 16 KB
    box = Box((750, 0), (250, 4096)) if dim == 0 else Box((0, 1500), (2000, 512))
    for ours, verify in ((True, True), (True, False), (False, False)):
        item = saved_item(tensor, ours=ours)
        fetch(item, box, torch.zeros(box.lengths), verify=verify)
        assert isinstance(item.source, MemoryReader)
        ratio = item.source.nbytes_read / (4 * 250 * 4096)
        # Columns lie in every block: to verify them, all is read. Without that, what lies between is skipped
        # only where it is worth a read of its own.
        assert ratio <= (1.2 if dim == 0 else 8.1)


def test_long_columns_are_read_without_what_lies_between() -> None:
    tensor = torch.zeros(4, 8, 32_768)
    item = saved_item(tensor, ours=False)
    fetch(item, Box((0, 3, 0), (4, 1, 32_768)), torch.zeros(4, 1, 32_768), verify=False)
    assert isinstance(item.source, MemoryReader)
    assert item.source.nbytes_read <= 1.05 * tensor.nbytes / 8


def test_blocks_are_at_most_a_128th_of_a_payload() -> None:
    for nbytes in (1, 1 << 16, 8 << 20, 9_999_999, 100 << 20, 5 << 30):
        block = block_nbytes(nbytes)
        assert block & (block - 1) == 0
        assert 1 << 16 <= block <= 1 << 20
        assert block <= max(nbytes / 128, 1 << 16)


def test_stock_checkpoints_without_checksums_are_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        stock_save(state(), tmp_path / "x")
    finally:
        torch.serialization.set_crc32_options(True)
    assert equal(load(zeroed(state()), tmp_path / "x"), state())
    assert problems_of(PosixFiles(tmp_path), "x") == []


# -------------------------------------------------------------------------------------- damage: C9


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def place_of(saved: Path, fqn: str) -> StorageInfo:
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    return next(place for index, place in metadata.storage_data.items() if index.fqn == fqn)


@pytest.mark.parametrize("fqn", ["optim.large", "optim.small", "optim.step", "settings.betas"])
def test_a_flipped_bit_names_file_and_item(saved: Path, fqn: str) -> None:
    place = place_of(saved, fqn)
    # The middle of the elements; of a value, the middle of its pickle.
    at = place.offset + (place.length // 2 if place.length > 10_000 else 705 if "optim" in fqn else 70)
    flip(saved / "__0_0.distcp", at)
    with pytest.raises(CorruptCheckpointError, match=rf"__0_0\.distcp, item '{fqn}'"):
        load(zeroed(state()), saved)
    if fqn.startswith("optim"):
        damaged = stock_load(zeroed(state()), saved)  # stock torch reads it without a word
        assert not equal(damaged["optim"], state()["optim"])


def test_a_flipped_bit_in_another_part_does_not_matter(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(4000, 1000)
    save({"w": tensor}, tmp_path / "x")
    flip(tmp_path / "x" / "__0_0.distcp", 8_000_000)
    item_of = place_of(tmp_path / "x", "w")
    assert item_of.offset < 8_000_000 < item_of.offset + item_of.length
    with pytest.raises(CorruptCheckpointError, match=r"block .* of .* contradicts"):
        load({"w": torch.zeros(4000, 1000)}, tmp_path / "x")
    assert not load({"w": torch.zeros(4000, 1000)}, tmp_path / "x", verify=False)["w"].equal(tensor)


@pytest.mark.parametrize("saver", [save, stock_save])
def test_every_part_of_what_the_page_cache_has_is_checked(
    tmp_path: Path, saver: Callable[[dict[str, Any], Path], None]
) -> None:
    tensor = torch.arange(1_000_000.0)
    saver({"w": tensor}, tmp_path / "x")
    path, start = tmp_path / "x" / "__0_0.distcp", place_of(tmp_path / "x", "w").offset
    assert load({"w": torch.zeros(1_000_000)}, tmp_path / "x")["w"].equal(tensor)
    for at in (start + 2000, start + (1 << 20) + 2000, start + (3 << 20)):
        flip(path, at)  # writes all of the file: the cache has it
        with pytest.raises(CorruptCheckpointError, match="contradicts"):
            load({"w": torch.zeros(1_000_000)}, tmp_path / "x")
        flip(path, at)


def test_nothing_is_checked_where_that_is_not_wanted(saved: Path) -> None:
    place = place_of(saved, "optim.large")
    flip(saved / "__0_0.distcp", place.offset + place.length // 2)
    loaded = load(zeroed(state()), saved, verify=False)
    assert not torch.equal(loaded["optim"]["large"], state()["optim"]["large"])
    assert torch.equal(loaded["optim"]["half"], state()["optim"]["half"])


@pytest.mark.parametrize("end", [0, 100, -1])
def test_a_truncated_file_is_noticed_before_anything_is_read(saved: Path, end: int) -> None:
    file = saved / "__0_0.distcp"
    os.truncate(file, end if end >= 0 else file.stat().st_size - 700)
    target = zeroed(state())
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp: \d+ bytes, .*expected"):
        load(target, saved)
    assert equal(target, zeroed(state()))


def test_a_missing_file_is_noticed(saved: Path) -> None:
    (saved / "__0_0.distcp").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp: missing"):
        load(zeroed(state()), saved)


def test_a_data_file_of_another_checkpoint_is_noticed(tmp_path: Path) -> None:
    other = state()
    other["optim"]["large"].add_(1)
    save(state(), tmp_path / "a")
    save(other, tmp_path / "b")
    shutil.copy(tmp_path / "b" / "__0_0.distcp", tmp_path / "a" / "__0_0.distcp")
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp, item 'optim.large'"):
        load(zeroed(state()), tmp_path / "a")


def test_metadata_of_another_checkpoint_is_noticed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(state(), tmp_path / name)
    shutil.copy(tmp_path / "b" / ".metadata", tmp_path / "a" / ".metadata")
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata is not what \.swapckpt\.json describes"):
        load(zeroed(state()), tmp_path / "a")


def test_a_lost_manifest_does_not_make_it_a_checkpoint_without_checksums(tmp_path: Path) -> None:
    save(state(), tmp_path / "a")
    (tmp_path / "a" / ".swapckpt.json").unlink()
    with pytest.raises(CorruptCheckpointError, match="lost its manifest"):
        load(zeroed(state()), tmp_path / "a")
    assert equal(stock_load(zeroed(state()), tmp_path / "a"), state())


def test_every_flipped_byte_of_the_manifest_is_noticed(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path / "a")
    file = tmp_path / "a" / ".swapckpt.json"
    original = file.read_bytes()
    for at in range(len(original)):
        flip(file, at)
        with pytest.raises(CorruptCheckpointError):
            load({"w": torch.zeros(3)}, tmp_path / "a")
        file.write_bytes(original)


# -------------------------------------------------------------------------------------- code: C11


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


class Settings:
    rate = 0.5


@pytest.mark.parametrize("saver", SAVERS)
def test_a_byte_item_with_code_is_refused_and_not_run(tmp_path: Path, saver: str) -> None:
    SAVERS[saver]({"w": torch.ones(2), "cfg": {"lr": Evil(tmp_path / "created")}}, tmp_path / "x")
    with pytest.raises(UnsafePickleError, match=r"item 'cfg\.lr' needs .*mkdir"):
        load({"w": torch.zeros(2), "cfg": {"lr": 0.0}}, tmp_path / "x")
    assert not (tmp_path / "created").exists()
    stock_load({"w": torch.zeros(2), "cfg": {"lr": 0.0}}, tmp_path / "x")  # the attack is real
    assert (tmp_path / "created").is_dir()


def test_metadata_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    stock_save({"w": torch.ones(2)}, tmp_path / "x")
    metadata = pickle.loads((tmp_path / "x" / ".metadata").read_bytes())
    metadata.planner_data = Evil(tmp_path / "created")
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsafePickleError, match="mkdir"):
        SwapStorageReader(tmp_path / "x").read_metadata()
    assert not (tmp_path / "created").exists()


def test_globals_are_allowed_explicitly(tmp_path: Path) -> None:
    save({"cfg": Settings()}, tmp_path / "x")
    with pytest.raises(UnsafePickleError, match=r"test_reader\.Settings"):
        load({"cfg": None}, tmp_path / "x")
    assert isinstance(load({"cfg": None}, tmp_path / "x", allowed_globals=[Settings])["cfg"], Settings)


def test_a_planner_gets_bytes_that_we_made(saved: Path) -> None:
    handed_over: dict[str, bytes] = {}

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            handed_over[read_item.dest_index.fqn] = value.getvalue()
            super().load_bytes(read_item, value)

    dcp_load(zeroed(state()), storage_reader=SwapStorageReader(saved), planner=Planner())
    assert torch.load(io.BytesIO(handed_over["settings.betas"]), weights_only=True) == (0.9, 0.99)
    assert len(handed_over) == 4


# -------------------------------------------------------------------------------------- mismatches: C10


def test_conversions_are_refused_and_listed_unless_allowed(saved: Path) -> None:
    large = torch.zeros(500, 100).bfloat16()
    target = {
        "optim": {"large": large, "step": torch.zeros(()), "half": torch.zeros(5)},
        "list": [torch.zeros(2), torch.zeros(3, dtype=torch.int8)],
    }
    with pytest.raises(SchemaError) as caught, unwrapped():
        dcp_load(target, storage_reader=SwapStorageReader(saved))
    assert str(caught.value).splitlines()[1:] == [
        "  - list.1: torch.int64 in the checkpoint, torch.int8 wanted",
        "  - optim.half: torch.float16 in the checkpoint, torch.float32 wanted",
        "  - optim.large: torch.float32 in the checkpoint, torch.bfloat16 wanted",
    ]
    assert not large.any()
    load(target, saved, allow_cast=True)
    assert torch.equal(large, state()["optim"]["large"].bfloat16())


def test_a_conversion_between_dtypes_of_one_width_converts(tmp_path: Path) -> None:
    """Among small tensors that are taken as they are."""
    save({"a": torch.arange(5.0), "b": torch.arange(5.0)}, tmp_path / "x")
    loaded = load(
        {"a": torch.zeros(5, dtype=torch.int32), "b": torch.zeros(5)}, tmp_path / "x", allow_cast=True
    )
    assert loaded["a"].tolist() == loaded["b"].tolist() == [0, 1, 2, 3, 4]


def test_a_tensor_of_which_parts_are_missing_is_refused_unless_allowed(tmp_path: Path) -> None:
    """As a rank's save without the others leaves it. Stock torch reads it and leaves the rest as it was."""
    stock_save({"w": torch.ones(4)}, tmp_path / "x")
    metadata = pickle.loads((tmp_path / "x" / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].size = torch.Size([6])
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(SchemaError, match="w: 4 of 6 elements"):
        load({"w": torch.zeros(6)}, tmp_path / "x")
    loaded = load({"w": torch.full((6,), -1.0)}, tmp_path / "x", allow_partial=True)
    assert loaded["w"].tolist() == [1, 1, 1, 1, -1, -1]


def test_destinations_whose_elements_share_memory_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    """As buffers that were expanded. Two rows of one element are not, whatever their strides are."""
    save({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(1, 5), "w": torch.ones(4)}, tmp_path / "x")
    expanded, whole = torch.zeros(3).expand(2, 3), torch.zeros(4)
    with pytest.raises(SchemaError, match=r"nothing was read.*contiguous\(\):\s+- a$"):
        load({"a": expanded, "b": torch.zeros(5).expand(1, 5), "w": whole}, tmp_path / "x")
    assert not whole.any()
    loaded = load({"a": expanded.contiguous(), "b": torch.zeros(5).expand(1, 5), "w": whole}, tmp_path / "x")
    assert loaded["a"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert loaded["b"].tolist() == [[1, 1, 1, 1, 1]]


def test_a_planner_that_resolves_another_shape_is_noticed(saved: Path) -> None:
    class Planner(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> Tensor:
            return super().resolve_tensor(read_item).reshape(-1)

    with pytest.raises(PlanError, match=r"asks for \(.*\) and resolves"), unwrapped():
        dcp_load(zeroed(state()), storage_reader=SwapStorageReader(saved), planner=Planner())


def test_an_item_that_is_not_what_the_metadata_says_is_noticed(tmp_path: Path) -> None:
    stock_save({"w": torch.ones(4), "v": torch.zeros(2, 2), "n": 1}, tmp_path / "x")
    metadata = pickle.loads((tmp_path / "x" / ".metadata").read_bytes())
    places = {index.fqn: index for index in metadata.storage_data}
    swapped = {**metadata.storage_data}
    swapped[places["w"]], swapped[places["v"]] = swapped[places["v"]], swapped[places["w"]]
    metadata.storage_data = swapped
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(
        CorruptCheckpointError, match=r"item 'w' .*holds .*\(2, 2\).* the metadata has .*\(4,\)"
    ):
        load({"w": torch.zeros(4)}, tmp_path / "x")
    del swapped[places["n"]]
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match="places 'n' nowhere"):
        load({"n": 0}, tmp_path / "x")


def test_stream_extensions_are_named(tmp_path: Path) -> None:
    stock_save({"w": torch.ones(4)}, tmp_path / "x")
    metadata = pickle.loads((tmp_path / "x" / ".metadata").read_bytes())
    (place,) = metadata.storage_data.values()
    place.transform_descriptors = ["zstd/1"]
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match="zstd/1"):
        load({"w": torch.zeros(4)}, tmp_path / "x")


# -------------------------------------------------------------------------------------- what is not there


def test_what_is_there_instead_of_a_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="nothing has this name"):
        SwapStorageReader(tmp_path / "step-1").read_metadata()
    with pytest.raises(CheckpointNotFoundError, match="there is no folder"):
        SwapStorageReader(tmp_path / "runs" / "step-1").read_metadata()
    with pytest.raises(CheckpointNotFoundError, match="Pass a path"):
        SwapStorageReader().read_metadata()
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "__0_0.distcp").write_bytes(b"x")
    with pytest.raises(CheckpointNotFoundError, match=r"has 1 files and no \.metadata"):
        SwapStorageReader(tmp_path / "step-2").read_metadata()


def test_a_read_error_fails_the_load(saved: Path) -> None:
    def before(_number: int, operation: str, path: str) -> None:
        if operation.startswith("read") and path.endswith("distcp"):
            raise StorageError("reading failed: Input/output error")

    with pytest.raises(StorageError, match="Input/output error"):
        load(zeroed(state()), saved, files=HookedFiles(PosixFiles(saved.parent), before))


def test_one_reader_loads_one_checkpoint_after_the_other(tmp_path: Path) -> None:
    loader = SwapStorageReader()
    for step in range(2):
        save({"w": torch.full((3,), float(step))}, tmp_path / f"step-{step}")
        target = {"w": torch.zeros(3)}
        dcp_load(target, storage_reader=loader, checkpoint_id=tmp_path / f"step-{step}")
        assert target["w"].tolist() == [step] * 3
    with pytest.raises(PlanError, match="without read_metadata"):
        SwapStorageReader(tmp_path / "step-1").read_data(None, None)  # type: ignore[arg-type]
