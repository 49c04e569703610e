"""Unpickling that runs no code: every global must be on an allow list, every opcode is checked beforehand.

[Note: why the opcodes are checked first]
Refusing globals keeps code from running but not memory from being taken: the C unpickler sizes its memo by
whatever index a ``LONG_BINPUT`` names, and a ``BYTEARRAY8`` by whatever length it claims, before it looks at
the data. :func:`check_opcodes` walks the stream once and refuses what reaches beyond its end, so that
unpickling takes memory in proportion to the bytes given.

[Note: stand-ins]
An allow list maps a global to *what stands for it*, not always to the object of that name. A class is a
global too, and the ``BUILD`` opcode can set attributes on whatever lies on the stack: with the real class
there, a pickle could rewrite torch's own ``Metadata`` for the rest of the process. :func:`maker` gives a
stand-in that makes instances of a class and cannot be written to, :class:`Call` one for functions.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

from swapckpt.errors import CorruptCheckpointError, UnsafePickleError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import BuiltinFunctionType, FunctionType

MAX_PROTOCOL = 5


@dataclass(frozen=True, slots=True)
class AllowList:
    """The globals a pickle may name: ``"module.qualified_name"`` to what stands for it."""

    entries: Mapping[str, object] = field(default_factory=dict)

    def extended(self, *allowed: type | FunctionType | BuiltinFunctionType) -> AllowList:
        """This list and the given classes and functions, under the names that pickle has for them."""
        named = {f"{item.__module__}.{item.__qualname__}": item for item in allowed}
        return AllowList({**self.entries, **named})


class _ReadOnlyClass(type):
    """Metaclass of stand-ins: a pickle's ``BUILD`` cannot set attributes on them."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise AttributeError(f"{cls.__name__}.{name} cannot be set by a pickle.")


class _Function(Protocol):
    def __call__(self, *args: object) -> object: ...


class Call(metaclass=_ReadOnlyClass):
    """Stand-in for a function or class that a pickle calls (``REDUCE``); cannot be modified either."""

    __slots__ = ("_function",)
    _function: _Function

    def __init__(self, function: object) -> None:
        object.__setattr__(self, "_function", cast("_Function", function))

    def __call__(self, *args: object) -> object:
        return self._function(*args)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} cannot be set by a pickle.")


def maker(made: type) -> type:
    """A stand-in whose ``NEWOBJ`` gives an empty instance of ``made``, and which cannot be modified."""

    def make(cls: type) -> object:  # noqa: ARG001 - the signature of __new__
        return object.__new__(made)

    return _ReadOnlyClass(f"Make{made.__name__}", (), {"__new__": make})


def unpickle(
    data: bytes | memoryview,
    allowed: AllowList,
    *,
    origin: str,
    persistent_load: Callable[[object], object] | None = None,
) -> object:
    """The object in ``data``, made with globals from ``allowed`` only.

    Args:
        data: One pickle of protocol 2 to 5.
        allowed: What its globals stand for.
        origin: File and item, for messages.
        persistent_load: Resolves persistent ids (the storages of ``torch.save``), or None to refuse them.

    Raises:
        UnsafePickleError: A global is not on the list.
        CorruptCheckpointError: The bytes are not a pickle, or one that reaches beyond its end.
    """
    check_opcodes(data, origin=origin)
    try:
        value: object = _Unpickler(data, allowed, origin=origin, persistent_load=persistent_load).load()
    except (UnsafePickleError, CorruptCheckpointError, MemoryError):
        raise
    # A damaged pickle can make the allowed constructors raise anything; all of it means the same.
    except Exception as error:
        raise CorruptCheckpointError(f"{origin} is not a valid pickle ({error!r}).") from error
    return value


class _Unpickler(pickle.Unpickler):  # noqa: S301 - made safe here
    def __init__(
        self,
        data: bytes | memoryview,
        allowed: AllowList,
        *,
        origin: str,
        persistent_load: Callable[[object], object] | None,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._allowed = allowed.entries
        self._origin = origin
        self._resolve = persistent_load

    def find_class(self, module: str, name: str) -> object:
        # Protocol 2, which torch.save uses, calls this module by its name in Python 2.
        qualified = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if qualified not in self._allowed:
            raise UnsafePickleError(
                f"{self._origin} needs {qualified}, which is not on the allow list. No code was run. "
                f"If you trust this checkpoint, pass allowed_globals=[{name}]."
            )
        return self._allowed[qualified]

    def persistent_load(self, pid: object) -> object:
        if self._resolve is None:
            raise CorruptCheckpointError(f"{self._origin} refers to data outside its pickle.")
        return self._resolve(pid)


# -------------------------------------------------------------------------------------------------- opcodes

_FORBIDDEN = frozenset(
    (
        # text forms of protocol 0: read line by line, without a bound
        *("INT", "LONG", "STRING", "UNICODE", "FLOAT", "GET", "PUT", "PERSID"),
        *("INST", "OBJ", "EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER", "NEWOBJ_EX"),
        *("BINSTRING", "SHORT_BINSTRING"),
    )
)
_LENGTH_NBYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_REFUSED, _SIZED, _MEMO, _GLOBAL, _STOP = 0, -1, -2, -3, -4


def _opcode_table() -> tuple[list[int], list[int]]:
    """Per opcode: bytes to advance (or one of the negative cases), and the width of its length field."""
    steps, widths = [_REFUSED] * 256, [0] * 256
    for opcode in pickletools.opcodes:
        code, arg_nbytes = ord(opcode.code), 0 if opcode.arg is None else opcode.arg.n
        if opcode.name in _FORBIDDEN:
            continue
        if arg_nbytes >= 0:
            steps[code] = 1 + arg_nbytes
        elif arg_nbytes in _LENGTH_NBYTES:
            steps[code], widths[code] = _SIZED, _LENGTH_NBYTES[arg_nbytes]
    steps[ord("r")], steps[ord("c")], steps[ord(".")] = _MEMO, _GLOBAL, _STOP
    return steps, widths


_STEPS, _WIDTHS = _opcode_table()


def check_opcodes(data: bytes | memoryview, *, origin: str) -> None:
    """Walk a pickle without running it (see the note at the top).

    Raises:
        CorruptCheckpointError: An opcode is unknown or of no use here, a length or memo index lies beyond the
            end, or bytes follow the end.
    """
    data = bytes(data)
    steps, end = _STEPS, len(data)
    at = 0
    while at < end:
        step = steps[data[at]]
        if step > 0:
            at += step
            continue
        if step == _STOP:
            if at + 1 != end:
                raise CorruptCheckpointError(f"{origin}: bytes follow the end of the pickle at {at}.")
            return
        at = _next_opcode(data, at, origin=origin)
    raise CorruptCheckpointError(f"{origin} is truncated: its pickle of {end} bytes has no end.")


def _next_opcode(data: bytes, at: int, *, origin: str) -> int:
    """Where the opcode after the one at ``at`` starts, for those whose argument must be looked at."""
    step, width = _STEPS[data[at]], _WIDTHS[data[at]]
    if step == _SIZED:
        return at + 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "little")
    if step == _MEMO and int.from_bytes(data[at + 1 : at + 5], "little") <= len(data):
        return at + 5
    if step == _GLOBAL:  # two lines: module and name
        first = data.find(b"\n", at)
        second = data.find(b"\n", first + 1)
        if 0 < first < second:
            return second + 1
    raise CorruptCheckpointError(f"{origin}: opcode {data[at]:#04x} at byte {at} is none of a checkpoint.")
