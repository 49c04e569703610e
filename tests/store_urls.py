"""Stores to test on: folders, fsspec's memory, and a real S3 server of this test session."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING

import fsspec
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    """The URL of an empty bucket; credentials and endpoint are in the environment, as users have them."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("checkpoints")
        yield "s3://checkpoints"
        fsspec.filesystem("s3").clear_instance_cache()
    server.stop()


@pytest.fixture(params=["posix", "buffered", "memory", "s3"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh folder on each kind of store."""
    if request.param == "s3":
        return f"{request.getfixturevalue('s3_bucket')}/{uuid.uuid4().hex}"
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    return os.fspath(tmp_path / "root")
