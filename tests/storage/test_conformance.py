"""Every kind of store does what the protocol says."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from swapckpt.storage.files import open_files
from swapckpt.storage.posix import PosixFiles
from swapckpt.testing import FilesSuite

if TYPE_CHECKING:
    from collections.abc import Callable

    from swapckpt.storage.files import Files


class TestStores(FilesSuite):
    @pytest.fixture
    def files_factory(self, store_url: str, request: pytest.FixtureRequest) -> Callable[[], Files]:
        numbers = itertools.count()

        def make() -> Files:
            url = f"{store_url}-{next(numbers)}"
            if "buffered" in request.node.name:
                return PosixFiles(url, direct=False, drop_page_cache=True)
            return open_files(url)

        return make
