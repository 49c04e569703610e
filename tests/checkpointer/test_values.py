"""Values of a job come back as they were, or are refused when they are saved."""

from __future__ import annotations

import copy
import threading
from collections import Counter, OrderedDict, defaultdict
from decimal import Decimal
from enum import Enum
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import swapckpt
from swapckpt.checkpointer.parts import part_for
from swapckpt.errors import CheckpointError, CorruptCheckpointError, SchemaError, UnsafePickleError
from swapckpt.storage.encoding import encoded
from swapckpt.storage.values import ALLOWED, load_item
from tests.checkpointer.jobs import ASYNC, MODES, SYNC, Job
from tests.storage.stores import unwrapped

if TYPE_CHECKING:
    from pathlib import Path


class Owner:
    """A Stateful that keeps whatever it is given."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def state_dict(self) -> Any:
        return self.content

    def load_state_dict(self, content: Any) -> None:
        self.content = content


class Color(Enum):
    RED = 1


VALUES: dict[str, Any] = {
    "integer keys": {1: 10, 2: 20},
    "integer keys below": {"seen": {1: {2: 3}}},
    "keys of other kinds": {(1, 2): None, 2.5: True, None: b"x"},
    "counter": {"milestones": Counter({2: 1, 4: 2})},
    "ordered": OrderedDict(b=1, a=OrderedDict()),
    "defaultdict": {"d": defaultdict(list, {1: [2]})},
    "list of dicts": {"workers": [{"pos": 1}, {"pos": 2}]},
    "empty ones": {"a": {}, "b": [], "c": (), "d": [{}]},
    "tuples": {"t": ({"y": (1, [2])},)},
    "numpy scalars": {"f": np.float64(1.5), "i": np.int64(-3), "b": np.bool_(1), "c": np.complex64(1j)},
    "others": {"d": Decimal("1.10"), "u": UUID(int=7), "b": bytearray(b"ab"), "s": {1}, "f": frozenset([2])},
}


def kinds(value: Any) -> Any:
    """Types all the way down."""
    if isinstance(value, dict):
        return type(value), {key: (type(key), kinds(each)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [kinds(each) for each in value]
    return type(value)


def through(folder: Path, saved: dict[str, Any], fresh: dict[str, Any], **options: Any) -> dict[str, Any]:
    with swapckpt.Checkpointer(folder, saved, options.pop("config", SYNC)) as checkpointer:
        checkpointer.save(1)
    with swapckpt.Checkpointer(folder, fresh, SYNC) as checkpointer:
        checkpointer.load(**options)
    return fresh


@pytest.mark.parametrize("config", MODES.values(), ids=MODES)
@pytest.mark.parametrize("fresh", ["empty", "same", "none"])
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_values_keep_their_keys_and_kinds(
    tmp_path: Path, value: Any, fresh: str, config: swapckpt.CheckpointConfig
) -> None:
    def start() -> Any:
        return {"empty": {}, "same": copy.deepcopy(value), "none": None}[fresh]

    saved = {"s": Owner(value), "p": swapckpt.PerRank(copy.deepcopy(value)), "v": copy.deepcopy(value)}
    found = through(
        tmp_path,
        saved,
        {"s": Owner(start() or {}), "p": swapckpt.PerRank(start()), "v": start()},
        config=config,
    )
    for each in (found["s"].content, found["p"].value, found["v"]):
        assert each == value
    assert kinds(found["s"].content) == kinds(found["p"].value) == kinds(value)
    if fresh != "empty":  # a mapping of the user's stays the one it is
        assert kinds(found["v"]) == kinds(value)


def test_a_mapping_has_what_was_saved_and_on_request_keeps_the_rest(tmp_path: Path) -> None:
    saved: dict[str, Any] = {"v": {"a": 1}, "c": Counter(a=3)}
    fresh = {"v": {"e": {}, "a": 0}, "c": Counter(a=5)}
    assert through(tmp_path / "1", saved, copy.deepcopy(fresh)) == saved
    partly = through(tmp_path / "2", saved, fresh, allow_partial=True)
    assert partly == {"v": {"e": {}, "a": 1}, "c": Counter(a=3)}


def test_a_name_that_another_one_begins_with(tmp_path: Path) -> None:
    found = through(tmp_path, {"a": {"n": 1}, "ab": {"n": 2}}, {"a": {}, "ab": {}})
    assert found == {"a": {"n": 1}, "ab": {"n": 2}}


def test_a_rank_reads_its_own_and_not_those_whose_number_begins_like_it() -> None:
    part = part_for("p", {"p": swapckpt.PerRank(1)})
    assert [key for key in ("p.rank-0", "p.rank-0.x", "p.rank-01", "p.rank-1") if part.is_read(key)] == [
        "p.rank-0",
        "p.rank-0.x",
    ]


def test_arrays_come_back_writable_and_stock_torch_reads_them(tmp_path: Path) -> None:
    arrays = {
        "t": np.arange(6.0).reshape(2, 3).T,
        "big": np.array([1, 2], ">i4"),
        "none": np.zeros((0, 2), np.float16),
        "scalar": np.array(3),
    }
    found = through(tmp_path, {"s": Owner(arrays)}, {"s": Owner({})})["s"].content
    stock = {"s": dict.fromkeys(arrays)}
    with unwrapped():
        dcp.load(stock, checkpoint_id=tmp_path / "step-1")
    for key, array in arrays.items():
        for each in (found[key], stock["s"][key]):
            np.testing.assert_array_equal(each, array)
            assert each.dtype == array.dtype.newbyteorder("=")
        found[key][...] = 5


def test_a_multi_step_schedule_resumes(tmp_path: Path) -> None:
    def build() -> tuple[Any, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=1.0)
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])

    optimizer, schedule = build()
    for _ in range(3):
        optimizer.step()
        schedule.step()
    resumed = through(tmp_path, {"s": schedule}, {"s": build()[1]})["s"]
    assert resumed.milestones == Counter([2, 4])
    assert resumed._get_closed_form_lr() == schedule._get_closed_form_lr()  # asks for a Counter


def test_lists_with_tensors_have_the_saved_length(tmp_path: Path) -> None:
    saved = [{"t": torch.ones(2), "n": 1}, {"t": torch.zeros(3), "n": 2}]
    for at, fresh in enumerate(
        ([], [{"t": torch.zeros(2), "n": 0}], [*copy.deepcopy(saved), {"t": torch.ones(4)}])
    ):
        found = through(tmp_path / str(at), {"s": Owner({"w": saved})}, {"s": Owner({"w": fresh})})[
            "s"
        ].content["w"]
        assert [each["n"] for each in found] == [1, 2]
        assert all(torch.equal(each["t"], was["t"]) for each, was in zip(found, saved, strict=True))


def test_tensors_below_integer_keys(tmp_path: Path) -> None:
    """The form of a stock optimizer's own state dict."""
    saved = {
        "state": {0: {"step": torch.tensor(3.0)}, 1: {}},
        "param_groups": [{"params": [0, 1], "lr": 0.1}],
    }
    found = through(tmp_path, {"s": Owner(saved)}, {"s": Owner({"state": {}, "param_groups": []})})[
        "s"
    ].content
    assert found.keys() == saved.keys()
    assert found["state"].keys() == {0, 1}
    assert found["state"][0]["step"] == 3
    assert found["param_groups"] == saved["param_groups"]


def test_files_of_stock_torch_get_their_keys_from_the_live_value(tmp_path: Path) -> None:
    saved = {"seen": Counter({1: 10, 3: 30}), "workers": [{"pos": 1}, {"pos": 2}], "flat": {"a": 1}}
    dcp.save({"s": saved}, checkpoint_id=tmp_path / "step-1")
    states = {"s": Owner({"seen": Counter({1: 0, 2: 0}), "workers": [], "flat": {}})}
    with swapckpt.Checkpointer(tmp_path, states, SYNC) as checkpointer:
        checkpointer.load()
    assert states["s"].content == saved
    assert type(states["s"].content["seen"]) is Counter


def test_what_is_there_and_was_not_saved_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"1 entries:\n  - s.other: missing"):
        through(tmp_path, {"s": Owner({"a": 1})}, {"s": Owner({"a": 0, "other": 1})})
    found = through(
        tmp_path / "p", {"s": Owner({"a": 1})}, {"s": Owner({"a": 0, "b": 5})}, allow_partial=True
    )
    assert found["s"].content == {"a": 1, "b": 5}


# -------------------------------------------------------------------------------------- refused by a save


@pytest.mark.parametrize("config", MODES.values(), ids=MODES)
def test_what_a_load_would_refuse_is_refused_by_the_save(
    tmp_path: Path, config: swapckpt.CheckpointConfig
) -> None:
    states = {"s": Owner({"k": [Color.RED, threading.Event], "o": np.array([None])}), "v": Color.RED}
    checkpointer = swapckpt.Checkpointer(tmp_path, states, config)
    with pytest.raises(UnsafePickleError) as caught:
        checkpointer.save(1).wait()
    lines = str(caught.value).splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["s.k", "s.o", "v"]
    assert "tests.checkpointer.test_values.Color, threading.Event" in lines[0]
    assert "allowed_globals" in lines[0]
    assert checkpointer.steps() == []
    checkpointer.close()


def test_what_is_allowed_is_saved_and_loaded(tmp_path: Path) -> None:
    states: dict[str, Any] = {"v": Color.RED}
    with swapckpt.Checkpointer(tmp_path, states, ASYNC, allowed_globals=[Color]) as checkpointer:
        checkpointer.save(1).wait()
        states["v"] = None
        checkpointer.load()
    assert states["v"] is Color.RED


@pytest.mark.parametrize("config", MODES.values(), ids=MODES)
def test_what_cannot_be_pickled_is_named(tmp_path: Path, config: swapckpt.CheckpointConfig) -> None:
    checkpointer = swapckpt.Checkpointer(tmp_path, {"s": Owner({"lock": {"l": threading.Lock()}})}, config)
    with pytest.raises(CheckpointError, match=r"s\b.*cannot pickle '_thread.lock' object"):
        checkpointer.save(1).wait()
    checkpointer.close()


def test_a_state_that_raises_is_named(tmp_path: Path) -> None:
    owner = Owner({"a": 1})

    def boom(*_: object) -> Any:
        raise ValueError("boom")

    checkpointer = swapckpt.Checkpointer(tmp_path, {"mine": owner}, SYNC)
    checkpointer.save(1)
    owner.load_state_dict = boom  # type: ignore[assignment]
    with pytest.raises(
        CheckpointError, match=r"load_state_dict\(\) of states\['mine'\] failed: ValueError: boom"
    ):
        checkpointer.load()
    owner.state_dict = boom  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"state_dict\(\) of states\['mine'\] failed: ValueError: boom"):
        checkpointer.save(2)

    def refuse() -> Any:
        raise SchemaError("by itself")

    owner.state_dict = refuse  # type: ignore[method-assign]
    with pytest.raises(SchemaError, match=r"^by itself$"):  # which says what it means
        checkpointer.save(2)


# ------------------------------------------------------------------------- what the list now lets through


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


class Sets:
    """Pickles as a class that is told to change."""

    def __reduce__(self) -> Any:
        return Decimal, ("1",), {"x": 1}


@pytest.mark.parametrize(
    "value",
    [
        Calls(bytearray, 1 << 50),
        Calls(np.ndarray, (1 << 20,), "O", bytearray(8)),
        Calls(np.ndarray, (1 << 20,), "<f8", bytearray(8)),
        Calls(np.ndarray, (1 << 50,), "<f8"),
        Calls(defaultdict, UUID),
        Calls(list, "abc"),
        Sets(),
    ],
    ids=["bytearray by length", "objects", "short", "no buffer", "factory", "list called", "set"],
)
def test_what_is_allowed_is_only_called_as_it_is_written(value: Any) -> None:
    with pytest.raises(CorruptCheckpointError):
        load_item(encoded(value, ALLOWED, name="v"), origin="v")


# ---------------------------------------------------------------------------- states that the job lacks


def test_a_state_that_only_the_checkpoint_has_does_not_fit(tmp_path: Path) -> None:
    saved = {"epoch": 1, "other": 2, "s": Owner({"a": torch.ones(2)}), "r": swapckpt.RngState()}
    with pytest.raises(SchemaError, match=r"3 entries:\n  - other: unexpected\n  - r: unexp.*\n  - s: unexp"):
        through(tmp_path, saved, {"epoch": 0})
    assert through(tmp_path / "p", saved, {"epoch": 0}, allow_partial=True) == {"epoch": 1}


# ---------------------------------------------------------------------------------- state that was not saved


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("partial", [False, True])
def test_parameters_without_saved_state_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, partial: bool, flat: bool
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model[0](torch.ones(4)).sum().backward()
    optimizer.step()
    states: dict[str, Any] = {"o": swapckpt.StateManager(model, optimizer, flat=flat)}
    saved = states["o"].state_dict()
    if flat:
        saved = {key: each for key, each in saved.items() if not key.startswith("state.1.")}
    else:
        state = {name: each for name, each in saved["state"].items() if name.startswith("0.")}
        saved = {**saved, "state": state}
    dcp.save({"o": saved}, checkpoint_id=tmp_path / "step-1")
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    before = optimizer.state[model[1].weight]["exp_avg"].clone()
    with swapckpt.Checkpointer(tmp_path, states, SYNC) as checkpointer:
        checkpointer.load(allow_partial=partial)
    after = optimizer.state[model[1].weight].get("exp_avg", torch.zeros(4, 4))
    assert before.any()
    assert torch.equal(after, before if partial else torch.zeros(4, 4))
    assert "no optimizer state of 2 parameters (o.state.1.bias, o.state.1.weight)" in caplog.text


@pytest.mark.parametrize("flat", [False, True])
def test_a_checkpoint_without_any_optimizer_does_not_fit(tmp_path: Path, flat: bool) -> None:
    job = Job.build(flat=flat)
    with swapckpt.Checkpointer(tmp_path, {"model": job.model}, SYNC) as checkpointer:
        checkpointer.save(1)
    with swapckpt.Checkpointer(tmp_path, job.states, SYNC) as checkpointer:
        with pytest.raises(SchemaError, match=r"optimizer\..*missing"):
            checkpointer.load()
        assert checkpointer.load(allow_partial=True) == 1


# ------------------------------------------------------------------------------------------ inference mode


def test_state_that_is_loaded_in_inference_mode_can_be_stepped(tmp_path: Path) -> None:
    def build() -> tuple[torch.nn.Module, Any, dict[str, Any]]:
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, {"m": model, "o": swapckpt.StateManager(model, optimizer)}

    def step(model: torch.nn.Module, optimizer: Any) -> None:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    model, optimizer, states = build()
    step(model, optimizer)
    with swapckpt.Checkpointer(tmp_path, states, SYNC) as checkpointer:
        checkpointer.save(1)
    model, optimizer, states = build()
    with torch.inference_mode(), swapckpt.Checkpointer(tmp_path, states, SYNC) as checkpointer:
        checkpointer.load()
    assert not any(value.is_inference() for value in optimizer.state[model.weight].values())
    step(model, optimizer)
