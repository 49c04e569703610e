"""For all tests: thread limits, seeds, hypothesis profiles, and ranks that do not run against each other."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# Before torch is imported, here or in a child: workers and ranks share few cores, and the CPU device brings
# threads of its own.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
# An installed torch_npu without its runtime breaks `import torch`; tests that want it say so themselves.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import hypothesis  # noqa: E402 - after the limits
import pytest  # noqa: E402

from tests.multirank import RankRunner  # noqa: E402
from tests.store_urls import s3_bucket, store_url  # noqa: E402, F401 - fixtures, one server for all

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from swapckpt.testing import RaceDetector

# Wall-clock deadlines fail on a busy machine; a failure anywhere must be repeatable from its printed blob.
RACES = "SWAPCKPT_RACES"

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on ranks form one group: two at a time would be up to eight processes on two cores.

    Slow ones come first: one that starts last leaves the other worker without work.
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        if isinstance(item, pytest.Function) and "run_ranks" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("multirank"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture
def run_ranks(tmp_path: Path) -> RankRunner:
    """``run_ranks(2, function, *args)``: the values of ``function(*args)`` on two gloo ranks."""
    return RankRunner(tmp_path)


@pytest.fixture(autouse=RACES in os.environ)
def race_checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[RaceDetector]:
    """The test under the race detector: it fails if anything is left unordered.

    Every optimizer that is adopted on a CPU device is watched. With SWAPCKPT_RACES=1 in the environment this
    holds for all tests of a run.
    """
    from swapckpt import optimizer
    from swapckpt.device import CpuDevice
    from swapckpt.swap import Swap
    from swapckpt.testing import CheckedDevice, RaceDetector

    detector = RaceDetector()

    def watched(*args: Any, device: Any, **options: Any) -> Swap:
        checked = CheckedDevice(detector, device) if isinstance(device, CpuDevice) else device
        return Swap(*args, device=checked, **options)

    monkeypatch.setattr(optimizer, "Swap", watched)
    with detector.watching():
        yield detector
    detector.check()
