"""The few operations of a store: the same on every kind. Its addresses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swapckpt.errors import CorruptCheckpointError, StorageError
from swapckpt.storage.files import Files, open_files, read_bytes, split_url
from swapckpt.storage.posix import BUFFER_NBYTES, PosixFiles
from tests.storage.content import aligned, same, write


@pytest.fixture
def files(store_url: str, request: pytest.FixtureRequest) -> Files:
    if "buffered" in request.node.name:
        return PosixFiles(store_url, direct=False, drop_page_cache=True)
    return open_files(store_url)


# -------------------------------------------------------------------------------------- every store


def test_what_is_written_is_listed_and_read_at_any_position(files: Files) -> None:
    files.make_folder("a")
    data = write(files, "a/x", b"head", aligned(100_000), b"", b"tail" * 3)
    write(files, "a/y", b"other")
    assert [(entry.name, entry.nbytes, entry.is_folder) for entry in files.entries("a")] == [
        ("x", len(data), False),
        ("y", 5, False),
    ]
    assert [(entry.name, entry.is_folder) for entry in files.entries("")] == [("a", True)]
    reader = files.open("a/x")
    assert reader.nbytes == len(data)
    for start, end in ((0, len(data)), (3, 9), (len(data) - 1, len(data)), (4096, 80_000)):
        view = memoryview(bytearray(end - start))
        reader.read_into(start, view)
        assert same(view, data[start:end])
    with pytest.raises(CorruptCheckpointError, match=r"a/x ends at byte .* 1 bytes too early"):
        reader.read_into(len(data) - 3, memoryview(bytearray(4)))
    reader.close()


def test_more_than_one_part_or_buffer(files: Files) -> None:
    files.make_folder("")
    data = write(files, "big", b"x", aligned(BUFFER_NBYTES + 12_345), b"y" * 77, aligned(2 * BUFFER_NBYTES))
    assert same(read_bytes(files, "big"), data)


def test_a_put_never_overwrites(files: Files) -> None:
    files.make_folder("")
    files.put("m", b"first")
    with pytest.raises(FileExistsError):
        files.put("m", b"second")
    assert read_bytes(files, "m") == b"first"


def test_remove_takes_files_and_folders_and_what_is_not_there(files: Files) -> None:
    files.make_folder("step-1")
    files.make_folder("step-10")
    for path in ("step-1/a", "step-1/b", "step-10/a"):
        files.put(path, b"x")
    files.remove("step-1/a")
    files.remove("step-1/a")
    assert [entry.name for entry in files.entries("step-1")] == ["b"]
    files.remove("step-1")
    files.remove("step-1")
    assert [entry.name for entry in files.entries("")] == ["step-10"]
    assert read_bytes(files, "step-10/a") == b"x"


def test_an_aborted_file_is_not_there(files: Files) -> None:
    files.make_folder("")
    writer = files.create("x", nbytes=3 * BUFFER_NBYTES)
    writer.append(aligned(2 * BUFFER_NBYTES))
    writer.abort()
    del writer  # a stream of fsspec publishes what it has when it is collected
    assert files.entries("") == []
    assert files.uploads("") == []


def test_a_missing_file_is_reported_as_such(files: Files) -> None:
    files.make_folder("")
    with pytest.raises(FileNotFoundError):
        files.open("x")
    with pytest.raises(FileNotFoundError):
        read_bytes(files, "folder/x")


def test_no_store_syncs_the_whole_machine(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sync", lambda: pytest.fail("os.sync() stops every process of the machine"))
    files.make_folder("a")
    write(files, "a/x", b"data")
    files.put("a/m", b"m")
    files.sync_folder("a")
    files.sync_folder("")


# -------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("url", "parent", "name"),
    [
        ("/runs/a/step-5", "/runs/a", "step-5"),
        ("/runs/a/step-5/", "/runs/a", "step-5"),
        ("s3://bucket/runs/step-5", "s3://bucket/runs", "step-5"),
        ("s3://bucket/step-5", "s3://bucket", "step-5"),
        ("memory://step-5/x", "memory://step-5", "x"),
    ],
)
def test_a_url_is_split_into_folder_and_name(url: str, parent: str, name: str) -> None:
    assert split_url(url) == (parent, name)


def test_a_relative_path_is_split_below_the_current_folder() -> None:
    assert split_url(Path("runs/step-5")) == (str(Path.cwd() / "runs"), "step-5")


@pytest.mark.parametrize("url", ["s3://bucket", "memory://x", "/", "s3://"])
def test_a_checkpoint_needs_a_folder_above_it(url: str) -> None:
    with pytest.raises(StorageError, match="no folder above it"):
        split_url(url)


def test_local_urls_are_files_of_the_system(tmp_path: Path) -> None:
    for url in (tmp_path, str(tmp_path), f"file://{tmp_path}"):
        files = open_files(url)
        assert isinstance(files, PosixFiles)
        assert files.url == str(tmp_path)


def test_an_unknown_protocol_is_named() -> None:
    with pytest.raises(StorageError, match="nosuch://x"):
        open_files("nosuch://x/y")
