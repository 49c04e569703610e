"""A device that goes on silently after an error, and an old driver: each in a process of its own.

[Note: dropped copies] After one failed asynchronous copy torch_npu reports the error once, at whichever call
comes next. From then on it drops what is submitted: synchronize() returns as if all were done, and mirrors
keep the bytes they had. Only events tell, by never completing.
"""

from __future__ import annotations

import pytest

from integration import npu

NUM_BATCHES = 3  # as many loads come first


def test_torch_npu_drops_copies_silently_after_one_has_failed() -> None:
    """Why a mirror counts as written only when its event says so. If this fails, torch_npu has changed."""
    assert npu.run_script("failed_copy", "dropped") == {
        "reports": 1,
        "copied": False,
        "event complete": False,
        "event.synchronize returned": False,
        "blocking copy works": True,
    }


@pytest.mark.parametrize(
    ("kind", "nth"),
    [("existing", 1), ("existing", NUM_BATCHES + 1), ("existing", -1), ("created", 1)],
    ids=["load", "offload", "last-offload", "first-offload-of-new-state"],
)
def test_a_step_with_a_failed_copy_raises_and_publishes_nothing(kind: str, nth: int) -> None:
    found = npu.run_script("failed_copy", kind, str(nth))
    # Whichever call reports it: one of ours, or a kernel of the update.
    assert found["failure"][0] == "StepError"
    assert found["failure"][1] in ("TransferError", "TransferTimeoutError", "RuntimeError")
    # Before the first update the state of the step before is still there, whole; after it there is nothing.
    assert found["exported what was there before"] in (True, None)
    if nth == -1:
        assert found["exported what was there before"] is None
    assert found["failure of the next step"] != []
    assert not found["exported after it"]
    assert found["phase"] == "failed"


def test_with_an_old_driver_mirrors_lie_in_pinned_allocations_used_whole() -> None:
    found = npu.run_script("old_driver", SIMULATED_DRIVER="24.1.0")
    assert found["all pinned"]
    assert found["host_nbytes"] == found["pinned_nbytes"]
    assert found["host_nbytes"].bit_count() == 1
    assert found["differences"] == []
