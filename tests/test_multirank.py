"""The runner of multi-rank tests must report what happens on ranks, whatever it is."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.multirank import RanksFailedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.multirank import RankRunner

FOREVER_SECS = 1000.0


def rank_and_sum(scale: int, *, offset: int) -> tuple[int, int]:
    total = torch.tensor(dist.get_rank() * scale + offset)
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        error = "ink is out"
        raise LookupError(error)
    dist.barrier()


def hang_on_rank_0() -> None:
    if dist.get_rank() == 0:
        time.sleep(FOREVER_SECS)


def fail_on_rank_0_while_rank_1_sleeps(pids: Path) -> None:
    (pids / str(os.getpid())).touch()
    dist.barrier()
    if dist.get_rank() == 0:
        error = "first"
        raise LookupError(error)
    time.sleep(FOREVER_SECS)


def kill_rank_1(begun: Path) -> str:
    if dist.get_rank() == 0:
        begun.touch()
    else:
        while not begun.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def exit_with_3_when_all_is_done() -> None:
    multiprocessing.util.Finalize(None, os._exit, args=(3,), exitpriority=0)


def leave_without_a_word() -> None:
    os._exit(0)


def explode() -> None:
    error = "cannot be read back"
    raise LookupError(error)


class Unreadable:
    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return explode, ()


def return_unreadable_on_rank_0(pids: Path) -> Unreadable:
    (pids / str(os.getpid())).touch()
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(FOREVER_SECS)
    return Unreadable()


def return_a_lambda() -> Callable[[], None]:
    return lambda: None


def state() -> dict[str, torch.Tensor]:
    return {"moments": torch.full((3,), dist.get_rank(), dtype=torch.bfloat16), "empty": torch.empty(0, 4)}


def surroundings() -> tuple[str, int, int]:
    print("spoken")
    return os.environ["SWAPCKPT_PROBE"], torch.get_num_threads(), torch.initial_seed()


def all_are_gone(pids: Path, *, world_size: int) -> bool:
    names = [path.name for path in pids.iterdir()]
    return len(names) == world_size and not any(psutil.pid_exists(int(name)) for name in names)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_values_come_back_in_rank_order(run_ranks: RankRunner, world_size: int) -> None:
    total = sum(range(world_size)) * 10 + world_size
    assert run_ranks(world_size, rank_and_sum, 10, offset=1) == [(rank, total) for rank in range(world_size)]


def test_tensors_come_back_whole(run_ranks: RankRunner) -> None:
    for rank, value in enumerate(run_ranks(2, state)):
        assert torch.equal(value["moments"], torch.full((3,), rank, dtype=torch.bfloat16))
        assert value["empty"].shape == (0, 4)


def test_a_rank_has_the_callers_environment_one_thread_and_a_seed(
    run_ranks: RankRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWAPCKPT_PROBE", "set later than the fork server")
    assert run_ranks(1, surroundings) == [("set later than the fork server", 1, 0)]
    assert run_ranks.outcomes(1, surroundings)[0].log == "spoken"


def test_an_exception_names_its_rank_first_and_shows_the_traceback(run_ranks: RankRunner) -> None:
    with pytest.raises(RanksFailedError, match="rank 1 was the first") as caught:
        run_ranks(2, raise_on_rank_1)
    assert "LookupError: ink is out" in str(caught.value)
    assert "in raise_on_rank_1" in str(caught.value)
    assert "rank 0: Traceback" in str(caught.value), "its barrier lost a peer"


def test_a_hanging_rank_is_killed_and_shows_where_it_hangs(run_ranks: RankRunner) -> None:
    with pytest.raises(RanksFailedError, match="rank 0: ran for 1 s; killed") as caught:
        replace(run_ranks, timeout_secs=1)(2, hang_on_rank_0)
    assert "in hang_on_rank_0" in str(caught.value)
    assert "rank 1: ran for 1 s; killed" in str(caught.value), "it waits in the last barrier"
    assert "distributed_c10d.py" in str(caught.value), "and shows that"


def test_after_a_failure_the_others_are_ended(run_ranks: RankRunner, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    with pytest.raises(RanksFailedError, match="rank 0 was the first") as caught:
        replace(run_ranks, timeout_secs=FOREVER_SECS, grace_secs=0.5)(
            2, fail_on_rank_0_while_rank_1_sleeps, pids
        )
    assert "rank 1: still running 0.5 s after the first failure; killed" in str(caught.value)
    assert all_are_gone(pids, world_size=2)


def test_a_killed_rank_is_reported_and_its_peer_keeps_its_value(
    run_ranks: RankRunner, tmp_path: Path
) -> None:
    survivor, killed = run_ranks.outcomes(2, kill_rank_1, tmp_path / "begun")
    assert killed.error == "killed by SIGKILL before it had closed down"
    assert survivor.value == "alive"
    assert survivor.error is not None, "the last barrier lost a peer"
    with pytest.raises(RanksFailedError, match="killed by SIGKILL"):
        run_ranks(2, kill_rank_1, tmp_path / "begun")


def test_a_bad_exit_after_the_work_is_a_failure(run_ranks: RankRunner) -> None:
    with pytest.raises(RanksFailedError, match="exited with 3 after it had closed down"):
        run_ranks(1, exit_with_3_when_all_is_done)


def test_an_early_exit_is_a_failure_though_its_code_is_0(run_ranks: RankRunner) -> None:
    with pytest.raises(RanksFailedError, match="exited with 0 before it had closed down"):
        run_ranks(1, leave_without_a_word)


def test_no_rank_outlives_a_runner_that_raises(run_ranks: RankRunner, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    with pytest.raises(LookupError, match="cannot be read back"):
        replace(run_ranks, timeout_secs=FOREVER_SECS)(2, return_unreadable_on_rank_0, pids)
    assert all_are_gone(pids, world_size=2)


def test_a_value_that_cannot_travel_is_the_ranks_error(run_ranks: RankRunner) -> None:
    with pytest.raises(RanksFailedError, match=r"(?s)rank 0: Traceback.*return_a_lambda"):
        run_ranks(1, return_a_lambda)


def test_ranks_share_one_group_so_that_workers_do_not_run_them_side_by_side(
    request: pytest.FixtureRequest,
) -> None:
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    on_ranks = {item.nodeid for item in items if "run_ranks" in item.fixturenames}
    assert on_ranks
    grouped = {
        item.nodeid
        for item in items
        if (mark := item.get_closest_marker("xdist_group")) and "multirank" in mark.args
    }
    assert on_ranks <= grouped
    if "PYTEST_XDIST_WORKER" in os.environ and request.config.getvalue("loadgroup"):
        # What the scheduler goes by.
        assert on_ranks <= {item.nodeid for item in items if item.nodeid.endswith("@multirank")}
