"""A folder served by rclone's WebDAV server."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from integration.stores.daemons import daemon, free_port, listens, wait_until
from integration.stores.debian import require

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def webdav_server(root: Path) -> Iterator[str]:
    """The URL of a running server of an empty folder below ``root``.

    Raises:
        UnavailableError: rclone is not installed and cannot be.
        RuntimeError: It does not start; with its output.
    """
    require(("rclone",), ("rclone",))
    folder, port, log = root / "served", free_port(), root / "rclone.log"
    folder.mkdir()
    config = root / "rclone.conf"
    config.touch()
    command = ["rclone", "--config", str(config), "serve", "webdav", str(folder)]
    with daemon([*command, "--addr", f"127.0.0.1:{port}"], log) as process:
        wait_until(lambda: listens(port), process, log)
        yield f"http://127.0.0.1:{port}"
