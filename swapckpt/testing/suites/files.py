"""Conformance of a store."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import TYPE_CHECKING

import torch

from swapckpt.errors import CorruptCheckpointError, StorageError
from swapckpt.storage.files import read_bytes
from swapckpt.testing.suites.run import BOUND_SECS, raises

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapckpt.storage.files import Files


class FilesSuite:
    """What every :class:`~swapckpt.storage.files.Files` does.

    Fixture: ``files_factory() -> Files``, each over a folder of its own that is empty or does not exist yet.
    """

    def test_bytes_are_read_back_at_any_position(self, files_factory: Callable[[], Files]) -> None:
        files = files_factory()
        files.make_folder("a")
        data = _write(files, "a/x", b"head", _noise(300_000), b"", b"tail" * 5)
        assert read_bytes(files, "a/x") == data
        with closing(files.open("a/x")) as reader:
            assert reader.nbytes == len(data)
            for start, end in ((0, len(data)), (3, 9), (len(data) - 1, len(data)), (4096, 80_000)):
                view = memoryview(bytearray(end - start))
                reader.read_into(start, view)
                assert view == data[start:end]
            with raises(CorruptCheckpointError):
                reader.read_into(len(data) - 3, memoryview(bytearray(4)))

    def test_files_larger_than_any_buffer_or_part(self, files_factory: Callable[[], Files]) -> None:
        files = files_factory()
        files.make_folder("")
        noise = _noise(23 << 20)
        data = _write(files, "x", b"1", noise, b"23", noise[:12_345])
        assert read_bytes(files, "x") == data

    def test_appended_memory_may_be_used_again(self, files_factory: Callable[[], Files]) -> None:
        files = files_factory()
        files.make_folder("")
        piece = bytearray(100_000)
        writer = files.create("x", nbytes=3 * len(piece))
        for value in (1, 2, 3):
            piece[:] = bytes([value]) * len(piece)
            writer.append(memoryview(piece))
        piece[:] = bytes(len(piece))
        assert writer.position == 300_000
        writer.close()
        assert read_bytes(files, "x") == b"".join(bytes([value]) * 100_000 for value in (1, 2, 3))

    def test_threads_read_one_file_at_once(self, files_factory: Callable[[], Files]) -> None:
        files = files_factory()
        files.make_folder("")
        data = _write(files, "x", _noise(400_000))
        wrong: list[int] = []
        with closing(files.open("x")) as reader:

            def read(start: int) -> None:
                for _ in range(3):
                    view = memoryview(bytearray(50_000))
                    reader.read_into(start, view)
                    if view != data[start : start + 50_000]:
                        wrong.append(start)

            threads = [threading.Thread(target=read, args=(n * 50_000,)) for n in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(BOUND_SECS)
                assert not thread.is_alive()
        assert not wrong

    def test_entries_are_those_of_the_folder_itself(self, files_factory: Callable[[], Files]) -> None:
        files = files_factory()
        files.make_folder("b")
        files.make_folder("b/deep")
        files.put("b/deep/x", b"1")
        files.put("b/z", b"123")
        files.put("b/a", b"")
        files.put("top", b"12")
        found = {path: files.entries(path) for path in ("", "b")}
        assert [(each.name, each.is_folder) for each in found[""]] == [("b", True), ("top", False)]
        assert [(each.name, each.is_folder) for each in found["b"]] == [
            *(("a", False), ("deep", True), ("z", False))
        ]
        assert {each.name: each.nbytes for each in found["b"] if not each.is_folder} == {"a": 0, "z": 3}

    def test_a_put_never_overwrites(self, files_factory: Callable[[], Files]) -> None:
        files = files_factory()
        files.make_folder("")
        files.put("x", b"first")
        with raises(FileExistsError):
            files.put("x", b"second")
        assert read_bytes(files, "x") == b"first"

    def test_a_file_is_replaced_only_at_the_version_that_was_seen(
        self, files_factory: Callable[[], Files]
    ) -> None:
        """Where folders can be renamed files are never replaced."""
        files = files_factory()
        files.make_folder("")
        files.put("x", b"1")
        if files.renames:
            return
        version = files.version("x")
        files.swap("x", b"2", version=version)
        assert read_bytes(files, "x") == b"2"
        if version is not None:
            with raises(FileExistsError):
                files.swap("x", b"3", version=version)
            assert read_bytes(files, "x") == b"2"

    def test_a_folder_is_renamed_with_all_that_is_in_it(self, files_factory: Callable[[], Files]) -> None:
        """Where it cannot be done in one step it is refused."""
        files = files_factory()
        files.make_folder("attempt")
        files.put("attempt/x", b"1")
        if not files.renames:
            with raises(StorageError):
                files.rename("attempt", "final")
            return
        files.sync_folder("attempt")
        files.rename("attempt", "final")
        files.sync_folder("")
        assert [each.name for each in files.entries("")] == ["final"]
        assert read_bytes(files, "final/x") == b"1"

    def test_a_folder_with_content_is_never_replaced_by_a_rename(
        self, files_factory: Callable[[], Files]
    ) -> None:
        """Two jobs rename their attempts to one name: the second must fail."""
        files = files_factory()
        if not files.renames:
            return
        for folder in ("first", "second"):
            files.make_folder(folder)
            files.put(f"{folder}/x", folder.encode())
        version = files.version("first/x")
        files.rename("first", "final")
        with raises(FileExistsError):
            files.rename("second", "final")
        assert read_bytes(files, "final/x") == b"first"
        if version is not None:
            assert files.version("final/x") == version != files.version("second/x")

    def test_an_aborted_file_was_never_there(self, files_factory: Callable[[], Files]) -> None:
        files = files_factory()
        files.make_folder("")
        writer = files.create("x", nbytes=20 << 20)
        writer.append(_noise(12 << 20))
        writer.abort()
        del writer
        assert files.entries("") == []
        assert files.uploads("") == []

    def test_uploads_that_nobody_finishes_can_be_given_up(self, files_factory: Callable[[], Files]) -> None:
        files = files_factory()
        files.make_folder("a")
        writer = files.create("a/x", nbytes=20 << 20)
        writer.append(_noise(12 << 20))
        listed = [each.name for each in files.uploads("a")]
        assert listed in ([], ["a/x"])  # a file system shows the file itself
        files.abort_uploads("a")
        assert files.uploads("") == []
        writer.abort()

    def test_what_is_removed_is_gone_and_nothing_else(self, files_factory: Callable[[], Files]) -> None:
        files = files_factory()
        for folder in ("step-1", "step-10"):
            files.make_folder(folder)
            files.put(f"{folder}/a", b"x")
            files.put(f"{folder}/b", b"x")
        for path in ("step-1/a", "step-1/a", "step-1/nothing"):
            files.remove(path)
        assert [each.name for each in files.entries("step-1")] == ["b"]
        for _ in range(2):
            files.remove("step-1")
        assert [each.name for each in files.entries("")] == ["step-10"]
        assert read_bytes(files, "step-10/a") == b"x"

    def test_what_is_missing_is_reported_as_missing(self, files_factory: Callable[[], Files]) -> None:
        files = files_factory()
        files.make_folder("")
        for path in ("x", "folder/x"):
            with raises(FileNotFoundError):
                files.open(path)


def _write(files: Files, path: str, *pieces: bytes | memoryview) -> bytes:
    writer = files.create(path, nbytes=sum(map(len, pieces)))
    for piece in pieces:
        writer.append(memoryview(piece))
    writer.close()
    return b"".join(pieces)


def _noise(nbytes: int) -> memoryview:
    generator = torch.Generator().manual_seed(nbytes)
    drawn = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return memoryview(drawn.numpy().tobytes())
