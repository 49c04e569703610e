"""SwapStorageWriter: stock torch reads what it writes; nothing is copied, any failure fails the save."""

from __future__ import annotations

import errno
import json
import os
import pickle
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from swapckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    PlanError,
    ReleasedStorageError,
    StorageError,
)
from swapckpt.storage import datafile, runs
from swapckpt.storage.posix import PosixFiles
from swapckpt.storage.remote import FsspecFiles
from swapckpt.storage.writer import SwapStorageWriter
from tests.storage.stores import HookedFiles, equal, load, save, stock_load, unwrapped, zeroed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from swapckpt.storage.files import Files


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    arena = torch.randn(50_000)
    return {
        "optim": {
            "exp_avg": arena[:40_000].view(400, 100),
            "transposed": torch.randn(300, 70).t(),
            "half": torch.randn(5).half(),
            "flags": torch.rand(7) > 0.5,
            "empty": torch.empty(0, 3),
            "step": torch.tensor(3.0),
            "fp8": torch.randn(33).to(torch.float8_e4m3fn),
        },
        "settings": {"lr": 0.1, "betas": (0.9, 0.99), "name": "adamw", "none": None},
        "list": [torch.randn(2), torch.arange(3)],
    }


# -------------------------------------------------------------------------------------- stock format


@pytest.mark.parametrize("threads", [1, 3])
def test_stock_torch_reads_it(tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datafile, "FILE_NBYTES", 1 << 10)
    save(state(), tmp_path / "step-1", threads=threads)
    loaded = stock_load(zeroed(state()), tmp_path / "step-1")
    assert equal(loaded, state())
    names = sorted(path.name for path in (tmp_path / "step-1").iterdir())
    assert names == [".metadata", ".swapckpt.json", *(f"__0_{n}.distcp" for n in range(threads))]
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_tensors_that_torch_has_to_save_are_read_by_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an unknown torch version, or an unusual tensor, gets."""
    monkeypatch.setattr(datafile, "skeleton", lambda *_: None)
    save(state(), tmp_path / "step-1")
    monkeypatch.undo()
    assert equal(stock_load(zeroed(state()), tmp_path / "step-1"), state())
    assert equal(load(zeroed(state()), tmp_path / "step-1"), state())


def test_the_manifest_has_every_length_and_checksum(tmp_path: Path) -> None:
    save(state(), tmp_path / "step-7")
    manifest = json.loads((tmp_path / "step-7" / ".swapckpt.json").read_text())["body"]
    assert (manifest["step"], manifest["world_size"], manifest["format"]) == (7, 1, 1)
    assert manifest["versions"]["torch"] == torch.__version__
    metadata = pickle.loads((tmp_path / "step-7" / ".metadata").read_bytes())
    assert metadata.storage_meta.save_id == f"swapckpt-{manifest['attempt']}"
    (name, entry), *_ = manifest["files"].items()
    assert entry["nbytes"] == (tmp_path / "step-7" / name).stat().st_size
    places = {(place.offset, place.length) for place in metadata.storage_data.values()}
    assert {(row[0], row[1]) for row in entry["items"]} == places


def test_payloads_from_64_kilobytes_on_start_at_pages(tmp_path: Path) -> None:
    sizes = {"a": 100_000, "b": 10, "c": 30_000, "d": 1_000_000}
    save({name: torch.zeros(size) for name, size in sizes.items()}, tmp_path / "x")
    rows = json.loads((tmp_path / "x" / ".swapckpt.json").read_text())["body"]["files"]["__0_0.distcp"][
        "items"
    ]
    for start, _, payload_at, payload_nbytes, *_ in rows:
        assert (start + payload_at) % (4096 if payload_nbytes >= 65536 else 64) == 0


def test_the_name_does_not_have_to_be_a_step(tmp_path: Path) -> None:
    save(state(), tmp_path / "last")
    assert json.loads((tmp_path / "last" / ".swapckpt.json").read_text())["body"]["step"] is None


# -------------------------------------------------------------------------------------- memory


def test_nothing_is_cloned(tmp_path: Path) -> None:
    """Regions of an arena, which stock torch clones and keeps until the file is closed."""
    arena = torch.ones(32 << 20)  # 128 MB
    regions = {f"r{n}": arena[n << 20 : (n + 1) << 20] for n in range(32)}

    def memory_nbytes(field: str) -> int:
        (line,) = [
            line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)
        ]
        return int(line.split()[1]) << 10

    def peak_of(job: Callable[[], object]) -> int:
        Path("/proc/self/clear_refs").write_text("5")
        before = memory_nbytes("VmRSS")
        job()
        return memory_nbytes("VmHWM") - before

    assert peak_of(lambda: save(regions, tmp_path / "step-1", threads=2)) < 48 << 20
    assert peak_of(arena.clone) > 100 << 20  # the measurement sees a copy


def test_memory_may_change_once_it_is_reported_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datafile, "FILE_NBYTES", 1 << 16)
    tensors = {f"w{n}": torch.full((20_000 + n,), float(n)) for n in range(20)}
    reported: list[Tensor] = []

    def overwrite(tensor: Tensor) -> None:
        reported.append(tensor)
        tensor.fill_(-1)

    save(tensors, tmp_path / "step-1", threads=3, on_written=overwrite)
    assert len(reported) == 20
    assert all((tensor == -1).all() for tensor in tensors.values())
    loaded = stock_load({f"w{n}": torch.zeros(20_000 + n) for n in range(20)}, tmp_path / "step-1")
    assert all((loaded[f"w{n}"] == n).all() for n in range(20))


def test_items_are_written_in_the_order_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datafile, "FILE_NBYTES", 1 << 16)
    order: list[int] = []
    tensors = {f"w{n}": torch.full((20_000,), float(n)) for n in range(12)}
    save(tensors, tmp_path / "step-1", threads=2, on_written=lambda tensor: order.append(int(tensor[0])))
    assert len(order) == 12
    evens, odds = [n for n in order if n % 2 == 0], [n for n in order if n % 2]  # one file each
    assert evens == sorted(evens)
    assert odds == sorted(odds)


def test_a_released_tensor_fails_the_save(tmp_path: Path) -> None:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ReleasedStorageError, match="released"):
        save({"fine": torch.ones(3), "released": tensor}, tmp_path / "step-1")
    assert not (tmp_path / "step-1").exists()


# -------------------------------------------------------------------------------------- failures: C7


def failing(files: Files, *, operation: str, number: int, error: BaseException) -> HookedFiles:
    """Fails at the n-th call of one operation."""
    count = 0

    def before(_number: int, called: str, _path: str) -> None:
        nonlocal count
        if called == operation:
            count += 1
            if count == number + 1:
                raise error

    return HookedFiles(files, before)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("operation", ["create", "append", "close"])
def test_a_full_device_in_any_thread_fails_the_save(
    tmp_path: Path, threads: int, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datafile, "FILE_NBYTES", 1 << 10)
    tensors = {f"w{n}": torch.full((20_000,), 1.0) for n in range(8)}
    save(tensors, tmp_path / "step-1", threads=threads)
    for tensor in tensors.values():
        tensor.fill_(2)
    full = StorageError("writing failed: No space left on device")
    for number in range(threads):
        files = failing(PosixFiles(tmp_path), operation=operation, number=number, error=full)
        with pytest.raises(StorageError, match="No space left"):
            save(tensors, tmp_path / "step-2", threads=threads, files=files)
        assert not (tmp_path / "step-2").exists()
        leftovers = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name != "step-1"]
        assert leftovers == []
    assert all((tensor == 1).all() for tensor in stock_load(tensors, tmp_path / "step-1").values())


def test_a_planner_that_fails_in_a_thread_fails_the_save(tmp_path: Path) -> None:
    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if write_item.index.fqn == "w3":
                raise OSError(errno.EIO, "device fell off the bus")
            return super().resolve_data(write_item)

    tensors = {f"w{n}": torch.ones(1000) for n in range(8)}
    with pytest.raises(OSError, match="fell off the bus"), unwrapped():
        dcp_save(tensors, storage_writer=SwapStorageWriter(tmp_path / "step-1"), planner=Planner())
    assert not (tmp_path / "step-1").exists()


def test_small_tensors_are_given_up_when_another_thread_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datafile, "FILE_NBYTES", 1 << 10)
    monkeypatch.setattr(runs, "RUN_NBYTES", 16 << 10)
    resolved = []

    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if write_item.index.fqn == "big0":
                time.sleep(0.05)  # the other thread has begun with small ones
                raise OSError(errno.EIO, "device fell off the bus")
            resolved.append(write_item.index.fqn)
            time.sleep(0.002)
            return super().resolve_data(write_item)

    big = {f"big{n}": torch.ones(20_000) for n in range(2)}
    small = {f"small{n}": torch.ones(10) for n in range(1000)}
    with pytest.raises(OSError, match="fell off the bus"), unwrapped():
        dcp_save(
            {**big, **small},
            storage_writer=SwapStorageWriter(tmp_path / "step-1", threads=2),
            planner=Planner(),
        )
    assert len(resolved) < 100


def test_a_tensor_that_changes_between_planning_and_writing_is_noticed(tmp_path: Path) -> None:
    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return super().resolve_data(write_item).double()

    with pytest.raises(PlanError, match=r"w: planned as torch.float32 .* torch.float64"), unwrapped():
        dcp_save({"w": torch.ones(3)}, storage_writer=SwapStorageWriter(tmp_path / "x"), planner=Planner())


def test_the_next_save_removes_what_a_failed_one_left(tmp_path: Path) -> None:
    files = failing(PosixFiles(tmp_path), operation="append", number=0, error=StorageError("disk full"))
    saver = SwapStorageWriter(tmp_path / "step-1", files=files)
    with pytest.raises(StorageError, match="disk full"), unwrapped():
        dcp_save(state(), storage_writer=saver)
    assert len(list(tmp_path.iterdir())) == 1  # the folder of the attempt, empty
    with unwrapped():
        dcp_save(state(), storage_writer=saver)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_data_file_that_vanishes_before_the_commit_fails_it(tmp_path: Path) -> None:
    def before(_number: int, operation: str, path: str) -> None:
        if operation == "entries" and path.endswith(".new"):
            os.truncate(tmp_path / path / "__0_0.distcp", 100)

    files = HookedFiles(PosixFiles(tmp_path), before)
    with pytest.raises(StorageError, match=r"__0_0\.distcp: \d+ bytes written, 100 found"):
        save(state(), tmp_path / "step-1", files=files)
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------- use


def test_one_writer_saves_many_checkpoints(tmp_path: Path) -> None:
    saver = SwapStorageWriter()
    for step in range(3):
        with unwrapped():
            dcp_save(
                {"w": torch.full((3,), float(step))},
                storage_writer=saver,
                checkpoint_id=tmp_path / f"step-{step}",
            )
    for step in range(3):
        assert stock_load({"w": torch.zeros(3)}, tmp_path / f"step-{step}")["w"].tolist() == [step] * 3


def test_a_committed_checkpoint_is_replaced_only_on_request(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path / "step-1")
    with pytest.raises(CheckpointExistsError, match=r"step-1 is a committed checkpoint.*overwrite=True"):
        save({"w": torch.zeros(3)}, tmp_path / "step-1")
    assert stock_load({"w": torch.zeros(3)}, tmp_path / "step-1")["w"].tolist() == [1] * 3
    save({"w": torch.full((3,), 2.0), "v": torch.ones(1)}, tmp_path / "step-1", overwrite=True)
    loaded = stock_load({"w": torch.zeros(3), "v": torch.zeros(1)}, tmp_path / "step-1")
    assert loaded["w"].tolist() == [2] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_state_without_items_is_saved_without_data_files(tmp_path: Path) -> None:
    save({}, tmp_path / "step-1")
    assert sorted(path.name for path in (tmp_path / "step-1").iterdir()) == [".metadata", ".swapckpt.json"]
    assert load({}, tmp_path / "step-1") == {}


def test_a_store_is_asked_once_what_it_can_do(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    probe = FsspecFiles._refuses_second_put

    def counted(files: FsspecFiles) -> bool:
        asked.append(files.url)
        return probe(files)

    monkeypatch.setattr(FsspecFiles, "_refuses_second_put", counted)
    saver = SwapStorageWriter()
    for step in range(3):
        with unwrapped():
            dcp_save(
                {"w": torch.ones(1)}, storage_writer=saver, checkpoint_id=f"{s3_bucket}/probed/step-{step}"
            )
    assert asked == [f"{s3_bucket}/probed"]


def test_a_save_needs_a_path() -> None:
    with pytest.raises(CheckpointNotFoundError, match="Pass a path"), unwrapped():
        dcp_save({"w": torch.ones(3)}, storage_writer=SwapStorageWriter())


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_stock_plan_caching_is_refused_before_it_writes_elsewhere(tmp_path: Path) -> None:
    saver = SwapStorageWriter()
    planner = DefaultSavePlanner(enable_plan_caching=True)
    planner._cached_plans_key = "test_stock_plan_caching"
    for step in (1, 2):
        if step == 2:
            with pytest.raises(PlanError, match="enable_plan_caching"), unwrapped():
                dcp_save(state(), storage_writer=saver, checkpoint_id=tmp_path / "step-2", planner=planner)
        else:
            dcp_save(state(), storage_writer=saver, checkpoint_id=tmp_path / "step-1", planner=planner)
    assert not (tmp_path / "step-2").exists()


def test_saving_without_collectives_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="use_collectives=False"), unwrapped():
        dcp_save(state(), storage_writer=SwapStorageWriter(tmp_path / "x"), use_collectives=False)


def test_async_save_in_a_thread_and_pickling_for_a_process(tmp_path: Path) -> None:
    with unwrapped():
        async_save(state(), storage_writer=SwapStorageWriter(tmp_path / "step-1")).result()  # type: ignore[union-attr]
    assert equal(load(zeroed(state()), tmp_path / "step-1"), state())
    saver = pickle.loads(pickle.dumps(SwapStorageWriter(tmp_path / "step-2")))
    with unwrapped():
        dcp_save(state(), storage_writer=saver)
    assert equal(load(zeroed(state()), tmp_path / "step-2"), state())


# -------------------------------------------------------------------------------------- ranks


def sharded(rows: int, *, value: float = 0.0) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(rows * 3.0).reshape(rows, 3) + value
    return {"w": distribute_tensor(full, mesh, [Shard(0)]), "plain": torch.full((4,), value), "step": 7}


def save_on_ranks(path: str, fails_on: int | None) -> str | None:
    files = None
    if fails_on == dist.get_rank():
        error = StorageError("No space left on device")
        files = failing(PosixFiles(Path(path).parent), operation="append", number=0, error=error)
    try:
        save(sharded(5), path, files=files)
    except StorageError as error:
        return str(error)
    return None


def load_on_ranks(path: str) -> list[list[float]]:
    target = {**sharded(5, value=-1.0), "step": 0}
    target["w"].to_local().fill_(-1)
    load(target, path)
    assert target["step"] == 7
    assert target["plain"].tolist() == [0] * 4
    assert isinstance(target["w"], DTensor)
    return target["w"].full_tensor().tolist()


def test_shards_of_ranks_are_saved_and_loaded_on_any_number_of_ranks(
    run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    path = str(tmp_path / "step-1")
    assert run_ranks(2, save_on_ranks, path, None) == [None, None]
    assert sorted(file.name for file in Path(path).glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    expected = torch.arange(15.0).reshape(5, 3).tolist()
    assert load(zeroed({"w": torch.zeros(5, 3)}), path)["w"].tolist() == expected
    assert run_ranks(3, load_on_ranks, path) == [expected] * 3
    manifest = json.loads((tmp_path / "step-1" / ".swapckpt.json").read_text())["body"]
    assert manifest["world_size"] == 2


def test_a_failure_on_one_rank_is_an_error_on_all(
    run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    path = str(tmp_path / "step-1")
    errors = run_ranks(2, save_on_ranks, path, 1)
    assert all("No space left on device" in error for error in errors)
    assert not (tmp_path / "step-1").exists()
