"""Runs of small items: the same files as one item at a time, in fewer steps."""

from __future__ import annotations

import ctypes
import json
import pickle
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from swapckpt.errors import PlanError, ReleasedStorageError
from swapckpt.storage import runs as module
from swapckpt.storage.items import skeleton
from swapckpt.storage.runs import ITEM_ALIGNMENT, Run, runs
from swapckpt.storage.writer import SwapStorageWriter
from tests.storage.content import same
from tests.storage.stores import equal, save, stock_load, unwrapped, zeroed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor
    from torch.distributed.checkpoint.planner import WriteItem

FORMS = [
    (torch.float32, (1024,)),
    (torch.float32, ()),
    (torch.bfloat16, (3, 5)),
    (torch.int8, (1,)),
    (torch.complex64, (7,)),
]


def tensor(form: tuple[torch.dtype, tuple[int, ...]], seed: int) -> Tensor:
    dtype, shape = form
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (values * 50).to(dtype)


def written(state: dict[str, Tensor], folder: Path) -> tuple[bytes, object]:
    """The bytes of the data file, and its items in the manifest."""
    save(state, folder)
    (path,) = folder.glob("*.distcp")
    manifest = json.loads((folder / ".swapckpt.json").read_text())
    return path.read_bytes(), manifest["body"]["files"]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(st.tuples(st.sampled_from(FORMS), st.integers(1, 12)), min_size=1, max_size=6),
    run_nbytes=st.sampled_from([4 << 10, 40 << 10, 2 << 20]),
    odd=st.sampled_from(["none", "transposed", "conjugate", "large", "empty"]),
)
def test_runs_write_what_single_items_write(
    kinds: list[tuple[tuple[torch.dtype, tuple[int, ...]], int]],
    run_nbytes: int,
    odd: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    forms = [form for form, count in kinds for _ in range(count)]
    state = {f"t{number:03}": tensor(form, number) for number, form in enumerate(forms)}
    odd_ones = {
        "transposed": torch.randn(4, 6).t(),
        "conjugate": tensor(FORMS[-1], 1).conj(),
        "large": torch.randn(20_000),
        "empty": torch.empty(0, 2),
    }
    if odd in odd_ones:
        state[f"t{len(forms) // 2:03}"] = odd_ones[odd]
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "RUN_NBYTES", run_nbytes)
        patch.setattr(module, "MIN_ALIKE", 1)
        as_runs = written(state, root / "runs")
        patch.setattr(module, "MIN_ALIKE", 1_000)
        are_same = as_runs == written(state, root / "singles")
    assert are_same  # pytest would compute the difference for minutes
    plain = {name: each.resolve_conj() for name, each in state.items()}
    assert equal(stock_load(zeroed(plain), root / "runs"), plain)


@given(payloads=st.lists(st.binary(min_size=4, max_size=4), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_checksums_are_those_of_the_bytes(payloads: list[bytes]) -> None:
    frame = skeleton(torch.float32, (1,))
    assert frame is not None
    run = Run([frame] * len(payloads), {})
    memory = bytearray(b"\xff" * run.room_nbytes)
    sources = [ctypes.create_string_buffer(payload, 4) for payload in payloads]
    found = run.fill(memoryview(memory), [ctypes.addressof(source) for source in sources])
    for start, payload, of_payload, of_frame in zip(
        run.starts.tolist(), payloads, found.payloads.tolist(), found.frames.tolist(), strict=True
    ):
        item = bytes(memory[start : start + frame.nbytes])
        head = len(frame.header)
        assert same(item, frame.header + payload + frame.footer_with(crc32(payload)))
        assert of_payload == crc32(payload)
        assert of_frame == crc32(item[:head] + item[head + 4 :])
        assert not any(memory[start + frame.nbytes : start + frame.nbytes + -frame.nbytes % ITEM_ALIGNMENT])


def test_runs_take_what_is_alike_and_leave_the_rest() -> None:
    one, other = skeleton(torch.float32, (16,)), skeleton(torch.float64, (3, 3))
    assert one is not None
    assert other is not None
    alike = [*[one] * 20, None, *[one, other] * 5, None, *[one, other] * 8]
    found = [len(part) if isinstance(part, Run) else part for part in runs(alike)]
    assert found == [20, *range(20, 32), 16]
    many = [one] * 5_000
    parts = [part for part in runs(many) if isinstance(part, Run)]
    assert sum(map(len, parts)) == len(many)
    assert all(part.room_nbytes <= module.RUN_NBYTES for part in parts)
    assert len(parts) == -(-len(many) // len(parts[0])) > 1
    assert list(runs([])) == []


def test_what_runs_have_in_common_they_share() -> None:
    """It is as long as an item: one for each run would add percents of the state to the host's memory."""
    frame = skeleton(torch.float32, (15_000,))
    parts = list(runs([frame] * 1_000))
    assert len(parts) > 20
    assert len(pickle.dumps(parts)) < 400_000  # as a writer process gets them


def test_an_item_that_is_longer_than_a_run_stands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RUN_NBYTES", 1 << 10)
    assert list(runs([skeleton(torch.float32, (1024,))] * 3)) == [0, 1, 2]


def test_memory_may_change_when_a_run_was_copied(tmp_path: Path) -> None:
    state = {f"t{number}": torch.full((256,), float(number)) for number in range(40)}
    expected = {name: each.clone() for name, each in state.items()}
    seen: list[int] = []

    def overwrite(each: Tensor) -> None:
        seen.append(each.data_ptr())
        each.fill_(-1)

    save(state, tmp_path / "step-1", on_written=overwrite)
    assert seen == [each.data_ptr() for each in state.values()]
    assert equal(stock_load(zeroed(expected), tmp_path / "step-1"), expected)


@pytest.mark.parametrize("change", [lambda t: t.double(), lambda t: t[:-1]], ids=["dtype", "shape"])
def test_one_of_many_that_is_not_what_was_planned_is_named(
    tmp_path: Path, change: Callable[[Tensor], Tensor]
) -> None:
    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            data = super().resolve_data(write_item)
            return change(data) if write_item.index.fqn == "t7" else data

    state = {f"t{number}": torch.ones(16) for number in range(20)}
    with pytest.raises(PlanError, match="t7: planned as"), unwrapped():
        dcp_save(state, storage_writer=SwapStorageWriter(tmp_path / "x"), planner=Planner())


@pytest.mark.parametrize("left_nbytes", [0, 32])
def test_one_of_many_whose_storage_was_released_is_named(tmp_path: Path, left_nbytes: int) -> None:
    state = {f"t{number}": torch.ones(16) for number in range(20)}
    state["t7"].untyped_storage().resize_(left_nbytes)
    with pytest.raises(ReleasedStorageError, match=f"t7: .* of 64 bytes has a storage of {left_nbytes}"):
        save(state, tmp_path / "x")
