"""The demo's own S3 server must be the one that clients reach, and be gone afterwards."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from swapckpt.demo.checkpoints import Progress, progress
from swapckpt.demo.config import DemoConfig
from swapckpt.demo.store import opened_store
from swapckpt.storage import open_files
from swapckpt.storage.files import read_bytes

if TYPE_CHECKING:
    from pathlib import Path


def test_disk_is_the_folder_beside_the_pictures(tmp_path: Path) -> None:
    with opened_store(DemoConfig(out=tmp_path)) as files:
        files.make_folder("")
        files.put("object", b"content")
    assert (tmp_path / "checkpoints" / "object").read_bytes() == b"content"


def test_server_is_reached_whatever_the_user_has_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("moto.server")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9/another")
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of a real account")
    before = dict(os.environ)
    config = replace(DemoConfig(), store="s3")
    endpoint = ""
    for _ in range(2):  # a second server is another one, and empty
        with opened_store(config) as files:
            assert files.entries("") == []
            endpoint = os.environ["AWS_ENDPOINT_URL"]
            files.put("object", b"content")
            assert read_bytes(open_files(config.checkpoints), "object") == b"content"
    assert dict(os.environ) == before
    host, port = endpoint.removeprefix("http://").split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)


@pytest.mark.parametrize("store", ["disk", "s3"])
def test_what_is_written_counts_before_it_is_committed(store: str, tmp_path: Path) -> None:
    if store == "s3":
        pytest.importorskip("moto.server")
    with opened_store(DemoConfig(out=tmp_path, store=store)) as files:
        assert progress(files, 3) == Progress(0, is_committed=False)
        files.make_folder("")
        attempt = "5" * 32
        folder = f".swapckpt-{b'step-3'.hex()}-{attempt}.new" if store == "disk" else "step-3"
        assert progress(files, 3) == Progress(0, is_committed=False)
        files.make_folder(folder)
        files.put(f"{folder}/__0_0.{attempt}.distcp", b"12345")
        files.put(f"{folder}/.swapckpt.json", b"1")
        assert progress(files, 3) == Progress(5, is_committed=False)
        assert progress(files, 33) == Progress(0, is_committed=False)
        if store == "disk":
            files.rename(folder, "step-3")
        files.put("step-3/.metadata", b"1")
        assert progress(files, 3) == Progress(5, is_committed=True)
