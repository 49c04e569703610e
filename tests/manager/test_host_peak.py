"""C17: resuming needs the memory of the state and little more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.manager.host_peak import NUM_PARAMS, NUMEL, STATE_NBYTES

ROOT = Path(__file__).parents[2]


def measure(action: str, path: Path) -> dict[str, Any]:
    """In a process of its own, so that nothing but this has ever raised its peak."""
    command = [sys.executable, "-m", "tests.manager.host_peak", action, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_c17_host_peak_of_a_save_and_a_load(tmp_path: Path) -> None:
    """384 MB of state. Stock: 627 MB on the device; a save from views of a slab would clone all of it."""
    saved, loaded = measure("save", tmp_path), measure("load", tmp_path)
    for figures in (saved, loaded):
        # What was resident was the peak: what the peak rises by is due to the save or load alone.
        assert figures["peak_before_nbytes"] - figures["resident_nbytes"] <= 0.02 * STATE_NBYTES
    assert saved["peak_after_nbytes"] - saved["resident_nbytes"] <= 0.3 * STATE_NBYTES  # cloning would be 1.0
    assert STATE_NBYTES <= loaded["peak_after_nbytes"] - loaded["resident_nbytes"] <= 1.15 * STATE_NBYTES
    assert loaded["device_nbytes"] == loaded["device_peak_nbytes"] == 0
    assert loaded["sums"] == saved["sums"] == [NUMEL * (1.0 + number) for number in range(NUM_PARAMS)]
