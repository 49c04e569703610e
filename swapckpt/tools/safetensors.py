"""safetensors files, read and written tensor by tensor (the library's own writer wants all in memory).

[Note: values] The format holds tensors, and strings in ``__metadata__``. Values that JSON can hold are
written there under ``swapckpt.values``, by FQN, and are values again when the file is read. Other strings
that are there (of other programs, ``format`` excepted) are values below ``__metadata__``.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, cast

import torch

from swapckpt.errors import CorruptCheckpointError, SchemaError, listing
from swapckpt.storage.fetch import SavedItem, fetch_plain
from swapckpt.storage.items import bytes_of
from swapckpt.tools.content import TensorInfo, pieces
from swapckpt.tools.values import as_json, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from swapckpt.storage.fetch import Box
    from swapckpt.storage.files import FileReader, FileWriter
    from swapckpt.tools.content import Content, Path

MAX_HEADER_NBYTES = 100_000_000
"""The library refuses longer ones."""
VALUES = "swapckpt.values"
METADATA = "__metadata__"

_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32",
    "U32": "uint32", "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
DTYPES: dict[str, torch.dtype] = {
    name: dtype
    for name, torch_name in _NAMES.items()
    if isinstance(dtype := vars(torch).get(torch_name), torch.dtype)
}
"""The dtypes of the format that are torch's too."""


# ------------------------------------------------------------------------------------------------- reading


class SafetensorsContent:
    """A :class:`~swapckpt.tools.content.Content`. The format has no checksums. Closes ``source``.

    Raises:
        CorruptCheckpointError: It is not in the format, or points outside itself.
    """

    def __init__(self, source: FileReader, *, where: str) -> None:
        self.where = where
        self._source = source
        header, self._data_at = _header(source, where=where)
        strings = cast("Mapping[str, object]", header.pop(METADATA, {}))
        self._starts: dict[str, int] = {}
        tensors: dict[str, TensorInfo] = {}
        try:
            self._values = _values(strings)
            for fqn, entry in header.items():
                tensors[fqn], self._starts[fqn] = _tensor(entry, source.nbytes - self._data_at)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CorruptCheckpointError(f"{where} is not in the format of safetensors: {error}.") from error
        self.tensors: Mapping[str, TensorInfo] = tensors
        self.paths: Mapping[str, Path] = {fqn: (fqn,) for fqn in (*tensors, *self._values)}

    def read(self, fqn: str, box: Box, target: Tensor) -> None:
        info, start = self.tensors[fqn], self._data_at + self._starts[fqn]
        name = f"{self.where}, {fqn!r}"
        item = SavedItem(self._source, start, info.nbytes, info.dtype, info.shape, None, name)
        fetch_plain(item, box, target)

    def value(self, fqn: str) -> object:
        return self._values[fqn]

    def close(self) -> None:
        self._source.close()


def _header(source: FileReader, *, where: str) -> tuple[dict[str, object], int]:
    """The JSON in front, and where the data begins."""
    head = bytearray(8)
    if source.nbytes < len(head):
        raise CorruptCheckpointError(f"{where} has {source.nbytes} bytes, too few for safetensors.")
    source.read_into(0, memoryview(head))
    nbytes = int.from_bytes(head, "little")
    if nbytes > min(MAX_HEADER_NBYTES, source.nbytes - len(head)):
        raise CorruptCheckpointError(f"{where} is no safetensors file, or was truncated in its header.")
    data = bytearray(nbytes)
    source.read_into(len(head), memoryview(data))
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{where} is not in the format of safetensors: {error}.") from error
    if type(header) is not dict or type(header.get(METADATA, {})) is not dict:
        raise CorruptCheckpointError(f"{where} is not in the format of safetensors: its header is no object.")
    return header, len(head) + nbytes


def _tensor(entry: object, data_nbytes: int) -> tuple[TensorInfo, int]:
    """A tensor of the header, and where it starts in the data."""
    if type(entry) is not dict:
        raise TypeError("a tensor is no object")
    shape, (start, end) = entry["shape"], entry["data_offsets"]
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"torch has no dtype {entry['dtype']!r}")
    if any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        raise ValueError("a size or offset is no number")
    info = TensorInfo(DTYPES[entry["dtype"]], tuple(shape))
    if end - start != info.nbytes or end > data_nbytes:
        raise ValueError(f"{info} does not lie in bytes {start} to {end} of {data_nbytes}")
    return info, start


def _values(strings: Mapping[str, object]) -> dict[str, object]:
    values = json.loads(cast("str", strings.get(VALUES, "{}")))
    if type(values) is not dict:
        raise TypeError(f"{VALUES} is no object")
    others = {key: text for key, text in strings.items() if key not in {"format", VALUES}}
    return {**values, **{f"{METADATA}.{key}": text for key, text in others.items()}}


# ------------------------------------------------------------------------------------------------- writing


def unwritable(content: Content) -> tuple[list[str], dict[str, str]]:
    """Tensors of dtypes that safetensors does not have, and values that JSON does not."""
    known = set(DTYPES.values())
    tensors = [f"{fqn}: {info}" for fqn, info in content.tensors.items() if info.dtype not in known]
    values = {
        fqn: f"a {type(value).__name__} that JSON does not give back: {shown(value)}"
        for fqn in content.paths
        if fqn not in content.tensors and as_json(value := content.value(fqn)) is None
    }
    return tensors, values


def header_of(content: Content) -> tuple[bytes, list[str]]:
    """The file up to its data, and the order in which tensors follow. Values that JSON cannot hold are left
    out.

    Raises:
        SchemaError: A tensor has a dtype that the format does not have.
    """
    tensors, _ = unwritable(content)
    if tensors:
        raise SchemaError(f"safetensors has no such dtype:{listing(tensors)}")
    names = {dtype: name for name, dtype in DTYPES.items()}
    order = sorted(content.tensors, key=lambda fqn: (-content.tensors[fqn].dtype.itemsize, fqn))
    header: dict[str, object] = {METADATA: _strings(content)}
    at = 0
    for fqn in order:
        info = content.tensors[fqn]
        end = at + math.prod(info.shape) * info.dtype.itemsize
        header[fqn] = {"dtype": names[info.dtype], "shape": list(info.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data is aligned
    if len(text) > MAX_HEADER_NBYTES:
        raise SchemaError(f"The header would have {len(text):,} bytes, {MAX_HEADER_NBYTES:,} are allowed.")
    return len(text).to_bytes(8, "little") + text, order


def _strings(content: Content) -> dict[str, str]:
    """What goes into the ``__metadata__`` of the file."""
    strings, values = {"format": "pt"}, {}
    for fqn in content.paths:
        if fqn not in content.tensors:
            value = content.value(fqn)
            if fqn.startswith(f"{METADATA}.") and isinstance(value, str):
                strings[fqn.removeprefix(f"{METADATA}.")] = value
            elif as_json(value) is not None:
                values[fqn] = value
    if values:
        strings[VALUES] = json.dumps(values)
    return strings


def write(content: Content, out: FileWriter, *, on_progress: Callable[[int], None]) -> None:
    """Append a whole file. Raises as :func:`header_of`, and what reading raises."""
    header, order = header_of(content)
    out.append(memoryview(header))
    for fqn in order:
        for piece in pieces(content, fqn):
            out.append(bytes_of(piece))
            on_progress(piece.nbytes)
