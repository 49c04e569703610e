"""Two workers share the tests by file: those of a file share what their fixtures make."""

from __future__ import annotations

import pytest

LIMIT_SECS = 480  # nearly all of it is Python that starts, beside that of the other worker


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "npu":
            item.add_marker(pytest.mark.xdist_group("npu"))  # they share a process, which has its own limits
        else:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
            item.add_marker(pytest.mark.timeout(LIMIT_SECS))
