"""The tests of this folder run on the simulated accelerator, in a process of their own (see process.py)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import simaccel as sim
from tests.simaccel.process import INLINE, DeviceProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

_FOLDER = Path(__file__).parent
_process = DeviceProcess()


def _runs_elsewhere() -> bool:
    return INLINE not in os.environ


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _FOLDER not in item.path.parents or not _runs_elsewhere():
            continue
        if item.get_closest_marker("xdist_group") is None:  # one worker: starting the process takes seconds
            item.add_marker(pytest.mark.xdist_group("simaccel"))
        item.add_marker(pytest.mark.timeout(0))  # the limit holds in the process that runs the test


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if not _runs_elsewhere():
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _process.run(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_unconfigure() -> None:
    _process.close()


@pytest.fixture(autouse=True)
def _fresh_device() -> Iterator[None]:
    sim.load()
    sim.reset()
    yield
    sim.reset()
