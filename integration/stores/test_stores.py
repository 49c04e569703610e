"""Checkpoints on Ceph's S3 gateway (conditional puts) and on a WebDAV server (none)."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from swapckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
)
from swapckpt.storage import (
    CheckpointState,
    Files,
    committed_steps,
    list_checkpoints,
    open_files,
    prune,
    verify,
)
from swapckpt.storage.commit import begin, commit
from swapckpt.storage.files import read_bytes
from swapckpt.storage.manifest import FileSums
from swapckpt.storage.remote import FsspecFiles
from tests.multirank import RankRunner
from tests.storage.stores import HookedFiles, load, save, stock_load, uniform, value_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
MEGABYTE = 1 << 20


@pytest.fixture
def files(store_url: str) -> Files:
    return open_files(store_url)


@pytest.fixture(autouse=True)
def _no_global_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sync", lambda: pytest.fail("os.sync() stops every process of the machine"))


def test_a_checkpoint_is_saved_loaded_replaced_and_pruned(store_url: str, files: Files) -> None:
    for step in (1, 2, 3):
        save(uniform(float(step)), f"{store_url}/step-{step}")
    assert [value_of(f"{store_url}/step-{step}") for step in (1, 2, 3)] == [1.0, 2.0, 3.0]
    assert value_of(f"{store_url}/step-3", loader=stock_load) == 3.0
    with pytest.raises(CheckpointExistsError):
        save(uniform(9.0), f"{store_url}/step-3")
    save(uniform(4.0), f"{store_url}/step-3", overwrite=True)
    assert value_of(f"{store_url}/step-3") == 4.0
    assert [(info.name, info.state) for info in list_checkpoints(files)] == [
        (f"step-{step}", CheckpointState.COMPLETE) for step in (1, 2, 3)
    ]
    assert len(files.entries("step-3")) == 3  # what was replaced is gone
    assert [removal.path for removal in prune(files, keep_latest=1, dry_run=False)] == ["step-1", "step-2"]
    assert committed_steps(files) == [3]
    assert verify(files, "step-3") == []


def test_large_tensors_go_up_in_parts_and_come_down_verified(store_url: str) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(5 * MEGABYTE)  # 20 MB
    save({"w": tensor}, f"{store_url}/step-1")
    assert torch.equal(load({"w": torch.zeros(5 * MEGABYTE)}, f"{store_url}/step-1")["w"], tensor)
    files = open_files(f"{store_url}/step-1")
    (name,) = [entry.name for entry in files.entries("") if entry.name.endswith(".distcp")]
    data = bytearray(read_bytes(files, name))
    data[10 * MEGABYTE] ^= 1
    files.remove(name)
    files.put(name, bytes(data))
    with pytest.raises(CorruptCheckpointError, match=r"item 'w'.*: block"):
        load({"w": torch.zeros(5 * MEGABYTE)}, f"{store_url}/step-1")


def test_a_failure_at_any_call_leaves_nothing_visible_and_nothing_after_prune(
    store_url: str, files: Files
) -> None:
    save(uniform(1.0), f"{store_url}/step-1")
    number = 0
    while True:

        def before(current: int, _operation: str, _path: str, number: int = number) -> None:
            if current == number:
                raise StorageError("the network is down")

        try:
            save(uniform(2.0), f"{store_url}/step-2", files=HookedFiles(files, before))
        except StorageError:
            number += 1
        else:
            break
        try:
            assert value_of(f"{store_url}/step-2") == 2.0  # the answer to the commit was lost, not the commit
        except CheckpointNotFoundError:
            continue
        break
    assert number > 8
    assert value_of(f"{store_url}/step-1") == 1.0
    assert value_of(f"{store_url}/step-2") == 2.0
    prune(files, min_age_secs=-1, dry_run=False)
    assert {entry.name for entry in files.entries("")} == {"step-1", "step-2"}
    assert len(files.entries("step-2")) == 3
    assert files.uploads("") == []


Settings = dict[str, dict[str, Any]]


def settings_of_fsspec() -> Settings:
    return {name: fsspec.config.conf[name] for name in ("webdav",) if name in fsspec.config.conf}


def take_over(environment: dict[str, str], settings: Settings) -> None:
    """In a child: the fork server was started before the stores."""
    os.environ.update(environment)
    fsspec.config.conf.update(settings)


def die_while_saving(url: str, environment: dict[str, str], settings: Settings) -> None:
    take_over(environment, settings)

    def before(_number: int, operation: str, _path: str) -> None:
        if operation == "close":
            os.kill(os.getpid(), signal.SIGKILL)

    parent = url.rpartition("/")[0]
    save({"w": torch.ones(5 * MEGABYTE)}, url, files=HookedFiles(open_files(parent), before))


def test_what_a_killed_save_left_is_found_and_removed(store_url: str, files: Files) -> None:
    save(uniform(1.0), f"{store_url}/step-1")
    arguments = (f"{store_url}/step-2", dict(os.environ), settings_of_fsspec())
    process = _CONTEXT.Process(target=die_while_saving, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert committed_steps(files) == [1]
    with pytest.raises(CheckpointNotFoundError):
        load({"w": torch.zeros(5 * MEGABYTE)}, f"{store_url}/step-2")
    uploads = [upload.name for upload in files.uploads("")]
    assert len(uploads) == store_url.startswith("s3:")
    assert all(name.startswith("step-2/__0_0.") for name in uploads)
    prune(files, min_age_secs=-1, dry_run=False)
    assert files.uploads("") == []
    # A store that has folders may keep an empty one.
    assert [entry.name for entry in files.entries("") if files.entries(entry.name)] == ["step-1"]
    assert value_of(f"{store_url}/step-1") == 1.0


# -------------------------------------------------------------------------------------- two jobs


def committed(files: Files, attempt: Any) -> bool:
    name = attempt.data_file(0, 0)
    files.put(f"{attempt.folder}/{name}", b"data")
    try:
        commit(files, attempt, attempt.id.encode(), data=[FileSums(name, 4, "")], world_size=1)
    except StorageError:
        return False
    return True


@pytest.mark.parametrize("overwrite", [False, True], ids=["new step", "same step"])
def test_of_two_jobs_the_first_commit_wins_where_puts_are_conditional(ceph: str, overwrite: bool) -> None:
    files = open_files(f"{ceph}/two-jobs-{overwrite}")
    assert isinstance(files, FsspecFiles)
    assert files.is_conditional()
    if overwrite:
        assert committed(files, begin(files, "step-1", overwrite=False))
    first, second = (begin(files, "step-1", overwrite=overwrite) for _ in range(2))
    assert committed(files, first)
    assert not committed(files, second)
    assert read_bytes(files, "step-1/.metadata") == first.id.encode()
    assert len(files.entries("step-1")) == 3


def test_swap_is_refused_by_the_server_itself(ceph: str) -> None:
    files = open_files(f"{ceph}/versions")
    files.put("x", b"1")
    version = files.version("x")
    files.swap("x", b"2", version=version)
    with pytest.raises(FileExistsError):
        files.swap("x", b"3", version=version)
    with pytest.raises(FileExistsError):
        files.put("x", b"4")
    assert read_bytes(files, "x") == b"2"


def test_a_server_without_conditions_is_said_to_need_one_writer(
    webdav: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = open_files(f"{webdav}/single")
    for step in (1, 2):
        save(uniform(1.0), f"{webdav}/single/step-{step}", files=files)
    (record,) = [each for each in caplog.records if each.name == "swapckpt.storage.remote"]
    assert "let only one job at a time save there" in record.getMessage()


# -------------------------------------------------------------------------------------- ranks


def save_and_load_on_ranks(url: str, environment: dict[str, str], settings: Settings) -> list[float]:
    take_over(environment, settings)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(10.0).reshape(5, 2)
    save({"w": distribute_tensor(full, mesh, [Shard(0)])}, url)
    target = distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)])
    load({"w": target}, url)
    values: list[float] = target.full_tensor().flatten().tolist()
    return values


def test_ranks_save_and_load(store_url: str, tmp_path: Path) -> None:
    run: Callable[..., list[Any]] = RankRunner(tmp_path)
    arguments = (f"{store_url}/step-1", dict(os.environ), settings_of_fsspec())
    assert run(2, save_and_load_on_ranks, *arguments) == [list(range(10))] * 2
