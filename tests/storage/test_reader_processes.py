"""Several processes that read: forked ones, and ranks with metadata of their own."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from swapckpt.errors import StorageError
from swapckpt.storage.reader import SwapStorageReader
from tests.storage.stores import equal, load, stock_save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_forked_child_reads_into_memory_of_its_own(tmp_path: Path) -> None:
    numbers = {name: torch.full((100,), value) for name, value in (("ours", 1.0), ("theirs", 2.0))}
    for name, tensor in numbers.items():
        stock_save({"w": tensor}, tmp_path / name)
    load({"w": torch.zeros(100)}, tmp_path / "ours")  # what it is read through is made, and kept
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        while True:
            load({"w": torch.zeros(100)}, tmp_path / "theirs")
    try:
        for _ in range(200):
            # Not verified: the checksum would find it out.
            found = load({"w": torch.zeros(100)}, tmp_path / "ours", verify=False)
            assert equal(found["w"], numbers["ours"])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# -------------------------------------------------------------------------------------- metadata of ranks


def save_without_collectives(path: str) -> None:
    state = {"w": torch.full((3,), float(dist.get_rank())), "n": dist.get_rank()}
    dcp_save(state, checkpoint_id=path, use_collectives=False)


def load_without_collectives(path: str) -> list[float]:
    loaded = load({"w": torch.zeros(3), "n": -1}, path)
    return [*loaded["w"].tolist(), loaded["n"]]


def test_metadata_of_ranks_is_read_by_as_many_ranks_only(
    run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    path = str(tmp_path / "x")
    run_ranks(2, save_without_collectives, path)
    assert run_ranks(2, load_without_collectives, path) == [[0, 0, 0, 0], [1, 1, 1, 1]]
    with pytest.raises(StorageError, match=r"saved by 2 ranks .*; there are 1"):
        SwapStorageReader(path).read_metadata()
