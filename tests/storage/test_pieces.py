"""Bytes gathered in pieces arrive whole and in order, whatever the device does meanwhile."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swapckpt.errors import StorageError
from swapckpt.storage import pieces as module
from swapckpt.storage.files import ALIGNMENT, address_of, private_memory
from swapckpt.storage.pieces import MAX_GIVEN, PIECE_NBYTES, Pieces
from tests.storage.content import same


class Out:
    """A file in memory. ``fail_at`` is the number of the append that fails."""

    def __init__(self, *, fail_at: int = -1, secs: float = 0.0) -> None:
        self.data = bytearray()
        self.lengths: list[int] = []
        self._fail_at, self._secs = fail_at, secs

    @property
    def position(self) -> int:
        return len(self.data)

    def append(self, data: memoryview) -> None:
        time.sleep(self._secs)
        if len(self.lengths) == self._fail_at:
            raise StorageError("No space left on device")
        self.lengths.append(len(data))
        self.data += data

    def close(self) -> None: ...
    def abort(self) -> None: ...


def put(pieces: Pieces, data: bytes) -> None:
    pieces.reserve(len(data))
    pieces.put(data)


OPERATIONS = st.tuples(st.sampled_from(["put", "copy", "others"]), st.integers(0, 3 * ALIGNMENT))


@given(operations=st.lists(OPERATIONS, max_size=30))
@settings(max_examples=60, deadline=None)
def test_any_sequence_arrives_in_order(operations: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_NBYTES", 4 * ALIGNMENT)
        patch.setattr(module, "MAX_PUT_NBYTES", 3 * ALIGNMENT)
        out = Out()
        pieces, expected = Pieces(out), b""
        for number, (operation, nbytes) in enumerate(operations):
            data = bytes((number + 1,)) * nbytes
            if operation == "others":
                pieces.flush()
                out.append(memoryview(data))
                pieces.passed(nbytes)
            elif operation == "put" or not nbytes:
                put(pieces, data)
            else:
                pieces.reserve(nbytes)
                assert pieces.copy(address_of(memoryview(data)), nbytes) == data
            expected += data
            assert pieces.position == len(expected)
        pieces.flush()
        pieces.close()
    assert out.data == expected


def test_pieces_end_at_pages_of_the_file_and_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(nbytes: int) -> memoryview:
        made.append(nbytes)
        return private_memory(nbytes)

    monkeypatch.setattr(module, "private_memory", counted)
    out = Out(secs=0.002)
    pieces = Pieces(out)
    expected = [bytes((number % 251,)) * 100_000 for number in range(300)]
    for data in expected:
        put(pieces, data)
    pieces.flush()
    pieces.close()
    assert same(bytes(out.data), b"".join(expected))
    assert all(nbytes % ALIGNMENT == 0 for nbytes in out.lengths[:-1])
    assert min(out.lengths[:-1]) >= PIECE_NBYTES - ALIGNMENT
    assert 1 < len(made) <= MAX_GIVEN + 1


@pytest.mark.parametrize("fail_at", [0, 1, 5])
def test_what_goes_wrong_meanwhile_is_raised(fail_at: int) -> None:
    out = Out(fail_at=fail_at)
    pieces = Pieces(out)

    def fill() -> None:
        for _ in range(300):
            put(pieces, b"x" * 100_000)
        pieces.flush()

    with pytest.raises(StorageError, match="No space left"):
        fill()
    pieces.close()
    assert len(out.lengths) >= fail_at
    assert not [each for each in threading.enumerate() if each.name.startswith("swapckpt-append")]


def test_closing_waits_for_what_is_on_its_way() -> None:
    out = Out(secs=0.05)
    pieces = Pieces(out)
    for _ in range(50):
        put(pieces, b"x" * 100_000)
    pieces.close()
    length = len(out.data)
    time.sleep(0.1)
    assert len(out.data) == length
