"""Unpickling that runs no code and takes no more memory than the bytes given."""

from __future__ import annotations

import collections
import contextlib
import io
import os
import pickle
import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from swapckpt._torch import StorageInfo
from swapckpt.errors import CorruptCheckpointError, SwapCkptError, UnsafePickleError
from swapckpt.storage.metadata import ALLOWED, check_name, dump_metadata, load_metadata
from swapckpt.storage.safe_pickle import AllowList, Call, check_opcodes, maker, unpickle


class Evil:
    """Creates a file when it is unpickled by the ordinary means."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


class Plain:
    pass


def small_metadata() -> Metadata:
    size = torch.Size([4, 2])
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 2])) for row in (0, 2)]
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), size, chunks)
    places = {
        MetadataIndex("w", torch.Size([row, 0]), n): StorageInfo("__0_0.distcp", 100 * n, 100)
        for n, row in enumerate((0, 2))
    }
    return Metadata({"w": tensor}, {"w": ("w",)}, places, None, "1.0.0")


# -------------------------------------------------------------------------------------- C11: no code is run


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "created"
    data = pickle.dumps({"lr": Evil(target)}, protocol=protocol)
    with pytest.raises(UnsafePickleError, match=r"step-5/x\.distcp, item 'lr' needs .*mkdir"):
        unpickle(data, AllowList(), origin="step-5/x.distcp, item 'lr'")
    assert not target.exists()
    pickle.loads(data)  # the attack is real: the ordinary loader runs it
    assert target.is_dir()


def test_code_in_metadata_is_refused_and_not_run(tmp_path: Path) -> None:
    metadata = small_metadata()
    metadata.planner_data = Evil(tmp_path / "created")
    with pytest.raises(UnsafePickleError, match="mkdir"):
        load_metadata(pickle.dumps(metadata), origin=".metadata")
    assert not (tmp_path / "created").exists()


def test_the_allow_list_is_extended_by_name() -> None:
    data = pickle.dumps(Plain())
    with pytest.raises(UnsafePickleError, match=r"test_safe_pickle\.Plain.*allowed_globals=\[Plain\]"):
        unpickle(data, AllowList(), origin="item")
    assert isinstance(unpickle(data, AllowList().extended(Plain), origin="item"), Plain)


@pytest.mark.parametrize(
    "name",
    ["os.system", "builtins.eval", "builtins.getattr", "torch.load", "torch._utils._rebuild_tensor_v2"],
)
def test_metadata_names_no_other_global(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    data = b"\x80\x02c" + module.encode() + b"\n" + attribute.encode() + b"\n."
    with pytest.raises(UnsafePickleError, match=name):
        load_metadata(data, origin=".metadata")


def build_on(global_name: bytes, attribute: str, value: object) -> bytes:
    """``setattr(<global>, attribute, value)`` in pickle: BUILD with a slot state."""
    state = pickle.dumps((None, {attribute: value}), protocol=2)[2:-1]
    return b"\x80\x02c" + global_name + b"\n" + state + b"b."


@pytest.mark.parametrize(
    "name",
    [
        "torch.distributed.checkpoint.metadata Metadata",
        "torch.distributed.checkpoint.metadata _MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem _StorageInfo",
        "torch Size",
        "pathlib PosixPath",
    ],
)
def test_a_pickle_cannot_rewrite_the_classes_it_names(name: str) -> None:
    data = build_on(name.replace(" ", "\n").encode(), "marked", 1)
    with pytest.raises(CorruptCheckpointError):
        load_metadata(data, origin=".metadata")
    for changed in (Metadata, StorageInfo, Path, maker, Call, *ALLOWED.entries.values()):
        assert not hasattr(changed, "marked")
    # Without the stand-in the same pickle succeeds: the attack is real.
    unpickle(build_on(b"a\nb", "marked", 1), AllowList({"a.b": Plain}), origin="x")
    assert Plain.marked == 1  # type: ignore[attr-defined]
    del Plain.marked  # type: ignore[attr-defined]


def test_a_pickle_cannot_replace_what_a_stand_in_calls() -> None:
    with pytest.raises(CorruptCheckpointError, match="cannot be set"):
        load_metadata(build_on(b"torch\nSize", "_function", 1), origin=".metadata")


def test_builtins_are_known_by_their_old_name_too() -> None:
    assert unpickle(pickle.dumps({1, 2}, protocol=2), AllowList({"builtins.set": set}), origin="x") == {1, 2}


# -------------------------------------------------------------------------------------- bounded memory

HUGE = 1 << 33


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x80\x04Nr" + struct.pack("<I", 1 << 28) + b".", id="memo index"),
        pytest.param(b"\x80\x05\x96" + struct.pack("<Q", HUGE) + b".", id="bytearray"),
        pytest.param(b"\x80\x04\x8e" + struct.pack("<Q", HUGE) + b".", id="bytes"),
        pytest.param(b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b".", id="long"),
        pytest.param(b"\x80\x02\x8b" + struct.pack("<i", -1) + b".", id="negative length"),
        pytest.param(b"\x80\x04\x95" + struct.pack("<Q", HUGE), id="frame without end"),
    ],
)
def test_lengths_and_indices_beyond_the_end_are_refused_before_memory_is_taken(data: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(CorruptCheckpointError):
        unpickle(data, AllowList(), origin="item")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_bytes_after_the_end_are_refused() -> None:
    with pytest.raises(CorruptCheckpointError, match="bytes follow"):
        check_opcodes(pickle.dumps(1) + b"N.", origin="item")


def test_every_truncation_of_metadata_is_an_error() -> None:
    data = dump_metadata(small_metadata())
    for end in range(len(data)):
        with pytest.raises(CorruptCheckpointError):
            load_metadata(data[:end], origin=".metadata")


def test_every_flipped_byte_of_metadata_is_read_or_refused_never_a_crash() -> None:
    data = dump_metadata(small_metadata())
    for at in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[at] ^= flip
            with contextlib.suppress(SwapCkptError):
                load_metadata(bytes(damaged), origin=".metadata")


# -------------------------------------------------------------------------------------- metadata


def test_metadata_of_stock_torch_reads_as_stock_torch_reads_it(tmp_path: Path) -> None:
    state = {
        "a": {"w": torch.zeros(3, 2), "h": torch.zeros(5, dtype=torch.float16)},
        "n": [1, torch.zeros(())],
    }
    state_dict_saver.save(state, checkpoint_id=tmp_path)
    data = (tmp_path / ".metadata").read_bytes()
    stock = pickle.loads(data)
    ours = load_metadata(data, origin=".metadata")
    assert ours.storage_meta is not None
    assert ours.storage_meta.checkpoint_id == str(tmp_path)
    stock.storage_meta.checkpoint_id = str(tmp_path)
    assert ours == stock


def test_metadata_survives_the_round_trip_and_stock_pickle_reads_it() -> None:
    metadata = small_metadata()
    data = dump_metadata(metadata)
    assert pickle.loads(data) == metadata
    assert load_metadata(data, origin="x") == metadata


def test_equal_records_are_written_once() -> None:
    tensors = {f"w{n}": small_metadata().state_dict_metadata["w"] for n in range(200)}
    origin = [torch.Size([0, 0]) for _ in tensors]
    many = Metadata(
        dict(tensors),
        {fqn: (fqn,) for fqn in tensors},
        {MetadataIndex(fqn, origin[n], 0): StorageInfo("f", n, 1) for n, fqn in enumerate(tensors)},
    )
    assert pickle.loads(dump_metadata(many)) == many
    shared = pickle.loads(dump_metadata(many)).state_dict_metadata.values()
    assert len({id(tensor.properties) for tensor in shared}) == 1
    assert len({id(chunk) for tensor in shared for chunk in tensor.chunks}) == 2
    assert len(dump_metadata(many)) < 0.6 * len(pickle.dumps(many))


def test_values_that_are_equal_but_not_alike_are_kept_apart() -> None:
    metadata = Metadata({}, {"a": ("x", 1), "b": ("x", True), "c": (1.0,)}, {})
    mapping = pickle.loads(dump_metadata(metadata)).planner_data
    assert [type(part) for path in mapping.values() for part in path] == [str, int, str, bool, float]


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../b", "", "a//b", "a\0b", "..\\x", "."])
def test_names_that_leave_the_folder_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not a path inside"):
        check_name(name)
    metadata = small_metadata()
    metadata.storage_data = {MetadataIndex("w"): StorageInfo(name, 0, 1)}
    with pytest.raises(CorruptCheckpointError, match="not a path inside"):
        load_metadata(pickle.dumps(metadata), origin=".metadata")


@pytest.mark.parametrize(
    ("chunk", "problem"),
    [
        (ChunkStorageMetadata(torch.Size([3, 0]), torch.Size([2, 2])), "reaches beyond"),
        (ChunkStorageMetadata((0, 0), torch.Size([2, 2])), "found a tuple where a Size"),  # type: ignore[arg-type]
        (ChunkStorageMetadata(torch.Size([0, 0]), (2, 2)), "found a tuple where a Size"),  # type: ignore[arg-type]
        (ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([-1, 2])), "negative"),
    ],
    ids=["outside", "tuple for an offset", "tuple for sizes", "negative"],
)
def test_each_geometry_is_looked_at_though_others_were_right(
    chunk: ChunkStorageMetadata, problem: str
) -> None:
    """A tuple is equal to the torch.Size that was right."""
    metadata = small_metadata()
    right = metadata.state_dict_metadata["w"]
    assert isinstance(right, TensorStorageMetadata)
    metadata.state_dict_metadata["x"] = replace(right, chunks=[*right.chunks, chunk])
    with pytest.raises(CorruptCheckpointError, match=problem):
        load_metadata(pickle.dumps(metadata), origin=".metadata")


@pytest.mark.parametrize(
    ("index", "place"),
    [
        (MetadataIndex("x", torch.Size([-1, 0])), StorageInfo("__0_0.distcp", 0, 1)),
        (MetadataIndex("x", torch.Size([0, 0])), StorageInfo("../x", 0, 1)),
    ],
    ids=["offset", "name"],
)
def test_each_place_is_looked_at_though_others_were_right(index: MetadataIndex, place: StorageInfo) -> None:
    metadata = small_metadata()
    metadata.storage_data[index] = place
    with pytest.raises(CorruptCheckpointError):
        load_metadata(pickle.dumps(metadata), origin=".metadata")


def damaged_metadata() -> dict[str, Metadata]:
    def make(**changes: object) -> Metadata:
        metadata = small_metadata()
        for name, value in changes.items():
            setattr(metadata, name, value)
        return metadata

    size, properties = torch.Size([4, 2]), TensorProperties()

    def tensor(
        size: object = size, offsets: tuple[int, ...] = (0, 0), properties: object = properties
    ) -> dict[str, object]:
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size([2] * len(offsets)))
        return {"w": TensorStorageMetadata(properties, size, [chunk])}  # type: ignore[arg-type]

    index = MetadataIndex("w")
    return {
        "no tensors": make(state_dict_metadata=None),
        "foreign entry": make(state_dict_metadata={"w": 1}),
        "key": make(state_dict_metadata={1: small_metadata().state_dict_metadata["w"]}),
        "chunk outside": make(state_dict_metadata=tensor(offsets=(3, 0))),
        "chunk negative": make(state_dict_metadata=tensor(offsets=(-1, 0))),
        "chunk rank": make(state_dict_metadata=tensor(offsets=(0,))),
        "size": make(state_dict_metadata=tensor(size=(4, 2))),
        "dtype": make(state_dict_metadata=tensor(properties=TensorProperties("f4"))),  # type: ignore[arg-type]
        "no places": make(storage_data=None),
        "place": make(storage_data={index: "somewhere"}),
        "index": make(storage_data={"w": StorageInfo("f", 0, 1)}),
        "negative offset": make(storage_data={index: StorageInfo("f", -1, 1)}),
        "offset type": make(storage_data={index: StorageInfo("f", 0.5, 1)}),  # type: ignore[arg-type]
        "storage_meta": make(storage_meta={"save_id": 1}),
    }


@pytest.mark.parametrize("name", damaged_metadata())
def test_records_of_the_wrong_type_or_range_are_refused(name: str) -> None:
    with pytest.raises(CorruptCheckpointError, match="is not the metadata of a checkpoint"):
        load_metadata(pickle.dumps(damaged_metadata()[name]), origin=".metadata")


def test_another_object_is_not_metadata() -> None:
    others: tuple[object, ...] = (None, {}, 3, "x")
    for value in others:
        with pytest.raises(CorruptCheckpointError, match="where a Metadata belongs"):
            load_metadata(pickle.dumps(value), origin=".metadata")


def test_persistent_ids_are_refused_where_nothing_resolves_them() -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> object:
            return ("storage", 0) if isinstance(obj, collections.OrderedDict) else None

    stream = io.BytesIO()
    Pickler(stream, protocol=2).dump([collections.OrderedDict()])
    with pytest.raises(CorruptCheckpointError, match="outside its pickle"):
        unpickle(stream.getvalue(), AllowList(), origin="item")
    resolved = unpickle(stream.getvalue(), AllowList(), origin="item", persistent_load=lambda pid: pid)
    assert resolved == [("storage", 0)]
