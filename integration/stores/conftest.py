"""The stores of this folder, one server of each kind for all tests."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import fsspec
import pytest

from integration.stores.ceph import KEY, gateway
from integration.stores.debian import UnavailableError
from integration.stores.webdav import webdav_server

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an empty bucket; credentials and endpoint are in the environment, as users have them."""
    try:
        with gateway(tmp_path_factory.mktemp("ceph")) as url, pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", url)
            patch.setenv("AWS_ACCESS_KEY_ID", KEY)
            patch.setenv("AWS_SECRET_ACCESS_KEY", KEY)
            fsspec.filesystem("s3").mkdir("checkpoints")
            yield "s3://checkpoints"
            fsspec.filesystem("s3").clear_instance_cache()
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def webdav(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an empty folder; the server's address is in fsspec's configuration."""
    try:
        with webdav_server(tmp_path_factory.mktemp("webdav")) as url, pytest.MonkeyPatch.context() as patch:
            patch.setitem(fsspec.config.conf, "webdav", {"base_url": url})
            yield "webdav://checkpoints"
            filesystem = fsspec.filesystem("webdav")
            filesystem.clear_instance_cache()
            filesystem.client.http.close()
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["ceph", "webdav"])
def store_url(request: pytest.FixtureRequest) -> str:
    """A fresh folder on each kind of store."""
    return f"{request.getfixturevalue(request.param)}/{uuid.uuid4().hex}"
