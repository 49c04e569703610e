"""Stock torch runs on the device unmodified: optimizers, training, serialization, distributed checkpoints."""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from tests import simaccel as sim

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCHEDULES = [sim.EAGER, sim.LAZY, *sim.seeds(1)]


def steps(optimizer_class: type[torch.optim.Optimizer], device: str, **options: Any) -> list[torch.Tensor]:
    """Parameters and state after three steps with the same gradients on every device."""
    generator = torch.Generator().manual_seed(0)
    params = [
        nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in ((33, 17), (16, 16))
    ]
    optimizer = optimizer_class(params, **{"lr": 1e-2} | options)  # type: ignore[arg-type]
    for _ in range(3):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(device)
        optimizer.step()
    state = [value for param in params for value in optimizer.state[param].values()]
    return [value.detach().cpu() for value in (*params, *state) if isinstance(value, torch.Tensor)]


LOOP, FOREACH, FUSED = {"foreach": False}, {"foreach": True}, {"fused": True}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adadelta", LOOP),
        ("Adadelta", FOREACH),
        ("Adafactor", LOOP),
        ("Adafactor", FOREACH),
        ("Adagrad", LOOP),
        ("Adagrad", FOREACH),
        ("Adagrad", FUSED),
        ("Adam", LOOP),
        ("Adam", FOREACH),
        ("Adam", FUSED),
        ("AdamW", LOOP | {"amsgrad": True}),
        ("AdamW", FOREACH | {"amsgrad": True}),
        ("AdamW", FUSED | {"amsgrad": True}),
        ("Adamax", LOOP),
        ("Adamax", FOREACH),
        ("ASGD", LOOP),
        ("ASGD", FOREACH),
        ("Muon", {}),
        ("NAdam", LOOP),
        ("NAdam", FOREACH),
        ("RAdam", LOOP),
        ("RAdam", FOREACH),
        ("RMSprop", LOOP | {"momentum": 0.9, "centered": True}),
        ("RMSprop", FOREACH | {"momentum": 0.9, "centered": True}),
        ("Rprop", LOOP),
        ("Rprop", FOREACH),
        ("SGD", LOOP | {"momentum": 0.9}),
        ("SGD", FOREACH | {"momentum": 0.9}),
        ("SGD", FUSED | {"momentum": 0.9}),
    ],
)
def test_every_optimizer_equals_the_cpu_bitwise(
    name: str, options: dict[str, Any], schedule: sim.Schedule
) -> None:
    optimizer_class = getattr(torch.optim, name)
    expected = steps(optimizer_class, "cpu", **options)
    sim.use(schedule)
    for actual, wanted in zip(steps(optimizer_class, "sim", **options), expected, strict=True):
        assert torch.equal(actual, wanted)


def test_all_per_parameter_optimizers_are_covered() -> None:
    """A new one in torch.optim belongs into the list above. LBFGS has no per-parameter state, SparseAdam no
    dense gradients."""
    known = {name for name, value in vars(torch.optim).items() if isinstance(value, type)}
    marker = next(
        mark
        for mark in test_every_optimizer_equals_the_cpu_bitwise.pytestmark  # type: ignore[attr-defined]
        if isinstance(mark.args[0], tuple)
    )
    assert {name for name, _ in marker.args[1]} == known - {"Optimizer", "LBFGS", "SparseAdam"}


def test_training_is_the_same_in_every_schedule_and_close_to_the_cpu() -> None:
    def train(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        layers = [nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4)]
        model = nn.Sequential(*layers).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            inputs = torch.randn(16, 8, generator=generator).to(device)
            labels = torch.randint(4, (16,), generator=generator).to(device)
            nn.functional.cross_entropy(model(inputs), labels).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([param.detach().flatten().cpu() for param in model.parameters()])

    runs = [train("sim") for _ in sim.each([sim.EAGER, sim.LAZY, *sim.seeds(3)])]
    assert all(torch.equal(run, runs[0]) for run in runs)
    torch.testing.assert_close(runs[0], train("cpu"))


def test_gradient_scaling_skips_a_step_with_inf() -> None:
    param = nn.Parameter(torch.ones(4, device="sim"))
    optimizer = torch.optim.AdamW([param], fused=True)
    scaler = torch.amp.GradScaler("sim", init_scale=4.0)
    scaler.scale((param * torch.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [1, 1, 1, 1]
    assert scaler.get_scale() == 2.0


def test_tensors_are_copied_saved_and_loaded() -> None:
    tensor, buffer = torch.arange(4.0, device="sim"), io.BytesIO()
    assert copy.deepcopy(tensor).tolist() == [0, 1, 2, 3]
    torch.save(tensor, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)
    assert loaded.device == tensor.device
    assert loaded.tolist() == [0, 1, 2, 3]
    buffer.seek(0)
    assert torch.load(buffer, map_location="cpu").tolist() == [0, 1, 2, 3]


# ------------------------------------------------------------------------------ distributed checkpoints


@pytest.fixture
def _one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("cpu:gloo,sim:gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def nested(value: float) -> dict[str, Any]:
    return {
        "a": torch.full((1000,), value, device="sim"),
        "b": {"c": torch.full((3, 5), value + 1, device="sim")},
    }


def assert_loads(path: Path, value: float) -> None:
    loaded = nested(0.0)
    dcp.load(loaded, checkpoint_id=path)
    assert (loaded["a"] == value).all()
    assert (loaded["b"]["c"] == value + 1).all()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.usefixtures("_one_rank")
def test_stock_save_and_load(tmp_path: Path, schedule: sim.Schedule) -> None:
    sim.use(schedule)
    dcp.save(nested(1.0), checkpoint_id=tmp_path / "step")
    assert_loads(tmp_path / "step", 1.0)


STAGING = {
    "blocking": {},
    "pinned-non-blocking": {"use_pinned_memory": True, "use_non_blocking_copy": True},
    "all": {
        "use_pinned_memory": True,
        "use_shared_memory": True,
        "use_non_blocking_copy": True,
        "use_async_staging": True,
    },
}
NO_STAGING = dict.fromkeys(STAGING["all"], False)


def assert_saves_asynchronously(path: Path, state: dict[str, Any], options: dict[str, bool]) -> None:
    """``state`` must hold ``nested(1.0)``, maybe by pending work."""
    stager = DefaultStager(StagingOptions(**NO_STAGING | options))
    saved = dcp.async_save(state, checkpoint_id=path, async_stager=stager)
    if options.get("use_async_staging"):
        saved.staging_completion.result()  # type: ignore[union-attr]
        saved = saved.upload_completion  # type: ignore[union-attr]
    state["a"].fill_(-1)
    saved.result()  # type: ignore[union-attr]
    stager.close()
    assert_loads(path, 1.0)


@pytest.mark.parametrize("options", STAGING.values(), ids=STAGING)
@pytest.mark.filterwarnings("ignore:Ignoring pin_memory flag:UserWarning")  # torch pins by CUDA's own calls
@pytest.mark.usefixtures("_one_rank")
def test_stock_asynchronous_save(tmp_path: Path, options: dict[str, bool]) -> None:
    sim.use(sim.LAZY)
    state = nested(1.0)
    torch.accelerator.synchronize()
    assert_saves_asynchronously(tmp_path / "step", state, options)


@pytest.mark.xfail(strict=True, reason="torch's stager copies on a stream that waits for nothing (2.13)")
@pytest.mark.filterwarnings("ignore:Ignoring pin_memory flag:UserWarning")
@pytest.mark.usefixtures("_one_rank")
def test_stock_asynchronous_save_of_values_that_are_still_computed(tmp_path: Path) -> None:
    sim.configure(policy=sim.Policy.MASK, slow_mask=0b1)
    assert_saves_asynchronously(tmp_path / "step", nested(1.0), STAGING["all"])
