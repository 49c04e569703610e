"""One item of a ``.distcp`` file: the archive that ``torch.save`` makes of a tensor, made around its bytes.

[Note: skeletons]
``torch.save`` of a tensor writes some records, the tensor's bytes, and more records. What stands before and
after the bytes depends on dtype and shape only, apart from the checksum of the bytes, which stands in two
places *behind* them. :func:`skeleton` lets torch itself write an archive without the bytes once per dtype and
shape; a save then writes header, memory of the tensor, and footer, with the checksum computed on the way. The
archive differs from torch's in one record that nothing reads, ``.data/serialization_id`` (a hash over the
checksums). Its modest price: a tensor is always written in row-major order, whatever its strides.

[Note: reading without unpickling] The pickle in the header of a dense tensor says nothing but dtype, size,
stride and storage. :func:`parse_header` reads it with stand-ins that note these down; the bytes are then read
from where they lie, straight into the destination.
"""

from __future__ import annotations

import functools
import struct
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch.serialization import skip_data
from zlib_ng.zlib_ng import crc32

from swapckpt.errors import CorruptCheckpointError, ReleasedStorageError
from swapckpt.storage.metadata import DTYPES
from swapckpt.storage.safe_pickle import AllowList, Call, unpickle

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

SLAB_NBYTES = 8 << 20
"""Bytes converted at a time where a tensor has to be copied (other device, other strides)."""
MAX_HEADER_NBYTES = 64 << 10
"""No header of a tensor is longer, whatever alignment torch was told to use for records."""

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_LOCAL_MAGIC, _DESCRIPTOR_MAGIC, _CENTRAL_MAGIC = 0x04034B50, b"PK\x07\x08", b"PK\x01\x02"
_HAS_DESCRIPTOR = 0x08


# -------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The archive of a tensor without its bytes.

    Attributes:
        header: What stands before the bytes.
        footer: What stands behind them, in pieces, between which their CRC-32 stands.
        payload_nbytes: Number of bytes in between.
        header_crc: CRC-32 of the header.
        nbytes: Length of the whole item.
    """

    header: bytes
    footer: tuple[bytes, ...]
    payload_nbytes: int
    header_crc: int
    nbytes: int

    def footer_with(self, checksum: int) -> bytes:
        """The footer for bytes of this CRC-32."""
        return checksum.to_bytes(4, "little").join(self.footer)


class _Sink:
    """Takes what ``torch.save`` writes, and where it skipped the bytes of the tensor."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.payload_before: int | None = None  # index into parts

    def write(self, data: bytes) -> int:
        self.parts.append(bytes(data))
        return len(data)

    def seek(self, _offset: int, _whence: int = 0) -> int:
        self.payload_before = len(self.parts)
        return 0

    def tell(self) -> int:
        return 0

    def flush(self) -> None: ...


@functools.lru_cache(maxsize=4096)
def skeleton(dtype: torch.dtype, shape: tuple[int, ...]) -> Skeleton | None:
    """The skeleton of a dense tensor, or None when this torch does not write it as this module expects: the
    tensor then goes through ``torch.save``."""
    if str(dtype).startswith("torch.q"):  # quantized: has scales besides its elements
        return None
    # Memory for a large tensor is reserved but never touched: nothing reads it.
    tensor = torch.empty(shape, dtype=dtype)
    sink = _Sink()
    with skip_data():
        torch.save(tensor, sink)  # type: ignore[arg-type]
    split = len(sink.parts) if sink.payload_before is None else sink.payload_before
    header, footer = b"".join(sink.parts[:split]), b"".join(sink.parts[split:])
    if not tensor.numel():
        return Skeleton(header, (), 0, crc32(header), len(header))
    parsed = parse_header(header, origin="a new item")
    name_at = footer.find(b"archive/data/0")
    entry = footer[name_at - 46 :]
    expected = Dense(dtype, tuple(shape), tensor.stride(), 0, tensor.numel())
    if (
        parsed is None
        or (parsed.tensor, parsed.payload_at) != (expected, len(header))
        or footer[:4] != _DESCRIPTOR_MAGIC
        or entry[:4] != _CENTRAL_MAGIC
    ):
        return None
    nbytes = len(header) + tensor.nbytes + len(footer)
    entry_at = name_at - 46 + 16
    pieces = (footer[:4], footer[8:entry_at], footer[entry_at + 4 :])
    return Skeleton(header, pieces, tensor.nbytes, crc32(header), nbytes)


def is_dense(tensor: Tensor) -> bool:
    """True when the tensor is nothing but elements in memory (no subclass, not sparse, not meta)."""
    plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    return plain and tensor.layout is torch.strided and not tensor.is_meta


def is_in_order(tensor: Tensor) -> bool:
    """True when the memory of a dense tensor holds its elements as they are saved: on the host, row by row,
    and all of them there."""
    return is_row_by_row(tensor) and (
        tensor.untyped_storage().nbytes() >= tensor.nbytes + tensor.storage_offset() * tensor.itemsize
    )


def is_row_by_row(tensor: Tensor) -> bool:
    """True when a dense tensor on the host has its elements in the order in which they are saved. Whether
    there is memory behind it is another question."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def check_storage(tensor: Tensor, *, name: str) -> None:
    """Raise ReleasedStorageError when there is no memory behind a tensor: to read it crashes the process."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return
    storage_nbytes = tensor.untyped_storage().nbytes()
    numel = tensor.numel() if tensor.is_contiguous() else span(tensor.shape, tensor.stride())
    if storage_nbytes < (tensor.storage_offset() + numel) * tensor.itemsize:
        raise ReleasedStorageError(
            f"{name}: the tensor of {tensor.nbytes} bytes has a storage of {storage_nbytes}. "
            "It was released (swapped out, or resized): save the tensors that state_dict() hands out."
        )


def payload(tensor: Tensor, *, name: str) -> Iterator[memoryview]:
    """The bytes of a dense tensor in row-major order: its own memory where it is so on the host, else
    converted piece by piece. Each view is valid until the next is asked for.

    Raises:
        ReleasedStorageError: The tensor's storage was released.
    """
    tensor = tensor.detach()
    check_storage(tensor, name=name)
    if is_row_by_row(tensor):
        yield bytes_of(tensor)
        return
    for slab in slabs(tensor):
        yield bytes_of(slab.resolve_conj().resolve_neg().cpu().contiguous())


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one in memory."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def slabs(tensor: Tensor) -> Iterator[Tensor]:
    """Consecutive parts in row-major order, of about ``SLAB_NBYTES``."""
    if tensor.nbytes <= SLAB_NBYTES or not tensor.dim():
        yield tensor
        return
    row_nbytes = tensor.nbytes // len(tensor)
    if row_nbytes > SLAB_NBYTES:
        for row in tensor:
            yield from slabs(row)
        return
    yield from torch.split(tensor, SLAB_NBYTES // row_nbytes)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous host tensor, writable. The view keeps the memory alive."""
    if not tensor.numel():
        return memoryview(b"")
    # Not reshape: a dimension of size one may have any stride, and view(dtype) looks at the last one.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data


# -------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class Dense:
    """A dense tensor as its pickle describes it: geometry, and its first element's place in the storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
    storage_numel: int

    @property
    def is_row_major(self) -> bool:
        """True when the storage holds these elements in row-major order and nothing else."""
        if 0 in self.shape:
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return self.storage_offset == 0 and self.storage_numel == expected


@dataclass(frozen=True, slots=True)
class Header:
    """The first records of an item.

    Attributes:
        tensor: What they describe.
        payload_at: Where in the item its storage starts.
        is_checked: False when torch was told to leave out checksums: they are all zero then.
        crc: CRC-32 of the storage; None where it stands behind it.
    """

    tensor: Dense
    payload_at: int
    is_checked: bool
    crc: int | None

    def checksum(self, trailer: bytes, *, origin: str) -> int | None:
        """CRC-32 of the storage, None when there is none.

        Args:
            trailer: The 8 bytes behind the storage.
            origin: File and item, for messages.

        Raises:
            CorruptCheckpointError: There should be one, and is not.
        """
        if not self.is_checked or self.crc is not None:
            return self.crc if self.is_checked else None
        if trailer[:4] != _DESCRIPTOR_MAGIC:
            raise CorruptCheckpointError(f"{origin}: the checksum behind its elements is damaged.")
        return int.from_bytes(trailer[4:8], "little")


def parse_header(head: bytes | memoryview, *, origin: str) -> Header | None:
    """What the first bytes of an item say, or None when it is not one dense tensor with its storage next.

    Args:
        head: The item, or its first ``MAX_HEADER_NBYTES``.
        origin: File and item, for messages.

    Raises:
        CorruptCheckpointError: A record contradicts its own checksum.
    """
    data, at, described = bytes(head), 0, None
    checked = unchecked = 0
    while True:
        record = _local_record(data, at)
        if record is None:
            return None
        if record.end is None:
            break
        name, body = record.name.partition("/")[2], data[record.start : record.end]
        if crc32(body) == record.crc:
            checked += 1
        elif record.crc == 0:
            unchecked += 1
        else:
            raise CorruptCheckpointError(f"{origin}: the record {name!r} contradicts its checksum.")
        if name == "data.pkl":
            described = _describe(body)
        elif name == "byteorder" and body != sys.byteorder.encode():
            return None
        at = record.next
    if described is None:
        return None
    if checked and unchecked:
        raise CorruptCheckpointError(f"{origin}: some of its records have lost their checksums.")
    return Header(described, record.start, is_checked=not unchecked, crc=record.crc)


@dataclass(frozen=True, slots=True)
class _Record:
    name: str
    start: int
    end: int | None  # None for the first storage, which need not be at hand
    crc: int | None  # None where it stands behind what is not at hand
    next: int


def _local_record(data: bytes, at: int) -> _Record | None:
    """The record whose local header is at ``at``; None for what is not stored plainly."""
    if len(data) < at + _LOCAL.size:
        return None
    magic, _, flags, method, _, _, crc, nbytes, _, name_nbytes, extra_nbytes = _LOCAL.unpack_from(data, at)
    if magic != _LOCAL_MAGIC or method != 0:
        return None
    name_at = at + _LOCAL.size
    start = name_at + name_nbytes + extra_nbytes
    name = data[name_at : name_at + name_nbytes].decode("utf-8", errors="replace")
    if start > len(data) or not _is_extra(data[start - extra_nbytes : start]):
        return None
    if name.endswith("/data/0"):
        return _Record(name, start, None, None if flags & _HAS_DESCRIPTOR else crc, start)
    end = following = start + nbytes
    if flags & _HAS_DESCRIPTOR and nbytes == 0:
        found = _descriptor(data, start)
        if found is None:
            return None
        end, crc = found
        following = end + 16
    return _Record(name, start, end, crc, following)


def _is_extra(extra: bytes) -> bool:
    """True when the padding in front of a record is as long as it says: nothing else vouches for the place
    where the record starts."""
    at = 0
    while at < len(extra):
        at += 4 + int.from_bytes(extra[at + 2 : at + 4], "little")
    return at == len(extra)


def _descriptor(data: bytes, start: int) -> tuple[int, int] | None:
    """End and checksum of a record whose length stands behind it."""
    at = data.find(_DESCRIPTOR_MAGIC, start)
    while at >= 0:
        crc, nbytes = struct.unpack_from("<II", data.ljust(at + 12, b"\0"), at + 4)
        if nbytes == at - start:
            return at, crc
        at = data.find(_DESCRIPTOR_MAGIC, at + 1)
    return None


_STORAGE_DTYPES = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64,
}  # fmt: skip
STORAGES: dict[str, object] = {
    **{f"torch.{name}Storage": dtype for name, dtype in _STORAGE_DTYPES.items()},
    "torch.storage.UntypedStorage": torch.uint8,
}
"""The dtype that stands for each storage class in the pickle of a tensor."""


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A persistent id of ``torch.save``: which record holds a storage, its element type and their number."""

    dtype: torch.dtype
    key: str
    numel: int


def storage_ref(pid: object) -> StorageRef:
    """The storage that a persistent id names. Raises ValueError for anything else."""
    if type(pid) is tuple and len(pid) == 5:
        kind, dtype, key, _device, numel = cast("tuple[object, ...]", pid)
        if kind == "storage" and isinstance(dtype, torch.dtype) and type(key) is str and type(numel) is int:
            return StorageRef(dtype, key, numel)
    raise ValueError("a persistent id is not that of a storage")


def _dense(*args: object) -> Dense:
    """Stands for ``_rebuild_tensor_v2`` and ``_v3`` (which has the dtype at the end)."""
    storage, offset, size, stride = args[:4]
    dtype = next((arg for arg in args[6:] if isinstance(arg, torch.dtype)), None)
    if type(storage) is not StorageRef or storage.key != "0":
        raise ValueError("not the first storage")
    sizes, strides = _ints(size), _ints(stride)
    if type(offset) is not int or min((offset, *sizes, *strides)) < 0 or len(sizes) != len(strides):
        raise ValueError("not a geometry")
    numel = storage.numel if dtype is None else storage.numel // dtype.itemsize
    return Dense(dtype or storage.dtype, sizes, strides, offset, numel)


def _ints(values: object) -> tuple[int, ...]:
    if type(values) is not tuple or any(type(value) is not int for value in values):
        raise ValueError("not a tuple of numbers")
    return cast("tuple[int, ...]", values)


def _no_hooks() -> None:
    """Stands for the empty dict of a tensor's hooks. Adding one to it fails."""


_DESCRIBED = AllowList(
    {
        **DTYPES,
        **STORAGES,
        "torch._utils._rebuild_tensor_v2": Call(_dense),
        "torch._utils._rebuild_tensor_v3": Call(_dense),
        "collections.OrderedDict": Call(_no_hooks),
    }
)


@functools.lru_cache(maxsize=4096)
def _describe(pickled: bytes) -> Dense | None:
    """The tensor that a header's pickle describes; None when it is anything but one dense tensor."""
    try:
        described = unpickle(pickled, _DESCRIBED, origin="header", persistent_load=storage_ref)
    except ValueError:  # also what is refused: whoever reads the whole item says so
        return None
    return described if isinstance(described, Dense) else None
