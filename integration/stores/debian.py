"""Programs that Debian packages: found, or installed where that is possible."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess


class UnavailableError(Exception):
    """A program is not there and could not be installed. The message is a reason to skip."""


def require(programs: tuple[str, ...], packages: tuple[str, ...]) -> None:
    """Make sure that all ``programs`` are there, which ``packages`` bring.

    Raises:
        UnavailableError: Some are not there and cannot be installed.
    """
    missing = [program for program in programs if shutil.which(program) is None]
    if not missing:
        return
    what = f"{', '.join(missing)} not found (apt install {' '.join(packages)})"
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise UnavailableError(f"{what}; installing needs root and apt-get.")
    try:
        _update()
        _apt("install", "--yes", "--no-install-recommends", *packages)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        output = (error.stderr or b"").decode(errors="replace").strip().splitlines()
        raise UnavailableError(f"{what}; {error}: {output[-1:]}") from error


@functools.cache
def _update() -> None:
    _apt("update")


def _apt(*arguments: str) -> None:
    subprocess.run(
        ["apt-get", "--quiet", *arguments],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        check=True,
        capture_output=True,
        timeout=300,
    )
