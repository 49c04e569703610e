"""Where the demo saves: a folder, or an S3 server that lives as long as the demo."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import fsspec

from swapckpt.errors import ConfigError
from swapckpt.storage import open_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swapckpt.demo.config import DemoConfig
    from swapckpt.storage import Files

_LOCALHOST = "127.0.0.1"


@contextmanager
def opened_store(config: DemoConfig) -> Iterator[Files]:
    """The folder of the demo's checkpoints, usable inside by this process and those that it starts.

    Raises:
        ConfigError: ``config.store`` is "s3" and the server is not installed.
    """
    with ExitStack() as servers:
        if config.store == "s3":
            servers.enter_context(_s3_server(config.checkpoints))
        yield open_files(config.checkpoints)


@contextmanager
def _s3_server(url: str) -> Iterator[None]:
    """A server on this machine with an empty bucket for ``url``; clients find it in the environment."""
    try:
        import s3fs  # noqa: F401 - fsspec asks for it by name
        from moto.server import ThreadedMotoServer
    except ImportError as error:
        msg = f"--store s3 needs s3fs and moto's server (pip install 'swapckpt[s3]'): {error}."
        raise ConfigError(msg) from error
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # else a line for each request
    server = ThreadedMotoServer(ip_address=_LOCALHOST, port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    before = dict(os.environ)
    os.environ.update(_settings(f"http://{host}:{port}"))
    clients = fsspec.get_filesystem_class("s3")
    clients.clear_instance_cache()  # those that were made before know another environment
    try:
        fsspec.filesystem("s3").makedirs(url.removeprefix("s3://").partition("/")[0], exist_ok=True)
        open_files(url).remove("")  # servers of one process share their content
        yield
    finally:
        clients.clear_instance_cache()
        os.environ.clear()
        os.environ.update(before)
        server.stop()


def _settings(endpoint: str) -> dict[str, str]:
    """For the environment. Nothing that a user has configured may lead to a real bucket instead."""
    unproxied = ",".join(filter(None, [os.environ.get("NO_PROXY", ""), _LOCALHOST]))
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "false",
        "AWS_ACCESS_KEY_ID": "demo",
        "AWS_SECRET_ACCESS_KEY": "demo",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": unproxied,
        "no_proxy": unproxied,
    }
