"""fp32 masters in checkpoints: saved under a key of their own, started from the parameters where absent."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import swapckpt
from swapckpt.errors import SchemaError
from swapckpt.optimizer import swap_of
from swapckpt.precision import MASTER
from tests.manager.training import CONFIG, OPTIMIZERS, Net, assert_same_bits, contents, train

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch.optim import Optimizer

    from tests.multirank import RankRunner

MASTERS = replace(CONFIG, master_weights=True)
SOME_SWAPPED = replace(MASTERS, min_numel=40)
BF16 = torch.bfloat16

Built = tuple[Net, "Optimizer", swapckpt.StateManager]


def build(config: swapckpt.SwapConfig = MASTERS, *, kind: str = "AdamW", flat: bool = False) -> Built:
    model = Net(dtype=BF16)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    return model, optimizer, swapckpt.StateManager(model, optimizer, config, flat=flat)


def save(built: Built, path: Path) -> None:
    dcp.save({"model": get_model_state_dict(built[0]), "optimizer": built[2]}, checkpoint_id=path)


def load(built: Built, path: Path, *, partial: bool = False) -> None:
    parameters = get_model_state_dict(built[0])
    planner = swapckpt.StrictLoadPlanner(built[2], allow_partial=partial)
    dcp.load({"model": parameters, "optimizer": built[2]}, checkpoint_id=path, planner=planner)
    set_model_state_dict(built[0], parameters)


def uninterrupted(steps: int, config: swapckpt.SwapConfig = MASTERS) -> dict[str, object]:
    model, optimizer, _ = build(config)
    train(model, optimizer, steps=range(steps))
    return contents(model, optimizer)


@pytest.mark.parametrize("config", [MASTERS, SOME_SWAPPED], ids=["all", "some-swapped"])
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_resumed_as_if_never_interrupted(tmp_path: Path, config: swapckpt.SwapConfig, flat: bool) -> None:
    first = build(config, flat=flat)
    train(first[0], first[1], steps=range(2))
    save(first, tmp_path)
    second = build(config, flat=flat)
    with torch.no_grad():
        for param in second[0].parameters():
            param.fill_(1.0)
    load(second, tmp_path)
    assert second[1].state[second[0].head.weight][MASTER].dtype is torch.float32
    assert "spare.weight.master" not in contents(second[0], second[1])  # never stepped
    train(second[0], second[1], steps=range(2, 5))
    assert_same_bits(contents(second[0], second[1]), uninterrupted(5, config))


def test_exported_like_other_state() -> None:
    model, optimizer, manager = build()
    train(model, optimizer, steps=range(1))
    nested, (_, _, flat_manager) = manager.state_dict()["state"], build(flat=True)
    assert isinstance(nested, dict)
    assert nested["head.weight"][MASTER] is optimizer.state[model.head.weight][MASTER]
    assert "state.head.weight.master" in flat_manager.state_dict()
    snapshot = manager.snapshot()
    with snapshot:
        before = nested["head.weight"][MASTER].clone()
        train(model, optimizer, steps=range(1, 2))
        frozen = snapshot.state_dict["state"]
        assert isinstance(frozen, dict)
        assert_same_bits({"master": frozen["head.weight"][MASTER]}, {"master": before})
    assert not torch.equal(optimizer.state[model.head.weight][MASTER], before)


# ------------------------------------------------------------------ checkpoints of other kinds


def without_masters(tree: dict[str, object]) -> dict[str, object]:
    state = tree["state"]
    assert isinstance(state, dict)
    state = {name: {key: v for key, v in values.items() if key != MASTER} for name, values in state.items()}
    return {**tree, "state": state}


def _masters(model: Net, optimizer: Optimizer) -> dict[str, int]:
    found = {name: optimizer.state.get(param, {}).get(MASTER) for name, param in model.named_parameters()}
    return {name: master.data_ptr() for name, master in found.items() if master is not None}


@pytest.mark.parametrize("config", [MASTERS, SOME_SWAPPED], ids=["all", "some-swapped"])
@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("stepped", [True, False])
def test_a_checkpoint_without_masters_starts_them_from_the_parameters(
    config: swapckpt.SwapConfig, model_first: bool, stepped: bool
) -> None:
    source = build(config)
    train(source[0], source[1], steps=range(2))
    file = io.BytesIO()
    torch.save([source[0].state_dict(), without_masters(source[2].state_dict())], file)
    file.seek(0)
    parameters, state = torch.load(file)
    model, optimizer, manager = build(config)
    if stepped:
        train(model, optimizer, steps=range(7, 9))
    mirrors = _masters(model, optimizer)
    if model_first:
        model.load_state_dict(parameters)
    with pytest.warns(UserWarning, match=r"no fp32 masters for 8 parameters \(blocks.0.down.weight"):
        manager.load_state_dict(state)
    if not model_first:
        model.load_state_dict(parameters)
    else:
        started = [(name, p) for name, p in model.named_parameters() if p in optimizer.state]
        assert len(started) == 8
        for name, param in started:
            assert_same_bits({name: optimizer.state[param][MASTER]}, {name: param.detach().float()})
    if stepped and config is MASTERS:  # all of them have mirrors, which are used again
        assert _masters(model, optimizer) == mirrors
    train(model, optimizer, steps=range(2, 4))
    # The same by hand: masters forgotten, so that the next step starts them from the parameters.
    with torch.no_grad():
        for param in source[0].parameters():
            source[1].state.get(param, {}).pop(MASTER, None)
    train(source[0], source[1], steps=range(2, 4))
    assert_same_bits(contents(model, optimizer), contents(source[0], source[1]))


def test_a_partial_load_of_a_stock_checkpoint(tmp_path: Path) -> None:
    """Stock fp32 training goes on in bf16 with masters: nothing in the file, by name, is a master."""
    model = Net()
    optimizer = OPTIMIZERS["AdamW"](list(model.parameters()))
    train(model, optimizer, steps=range(2), use_spare=lambda _: True)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path)
    bf16, bf16_optimizer, manager = build()
    bf16.load_state_dict(model.state_dict())
    planner = swapckpt.StrictLoadPlanner(manager, allow_partial=True)
    with pytest.warns(UserWarning, match="no fp32 masters for 10 parameters"):
        dcp.load({"optimizer": manager}, checkpoint_id=tmp_path, planner=planner)
    for name, param in bf16.named_parameters():
        found = bf16_optimizer.state[param]
        assert_same_bits(
            {"m": found["exp_avg"]}, {"m": optimizer.state[model.get_parameter(name)]["exp_avg"]}
        )
        assert_same_bits({"m": found[MASTER]}, {"m": param.detach().float()})


def test_loading_the_model_alone_trains_from_its_weights() -> None:
    weights = Net(dtype=BF16)
    with torch.no_grad():
        for param in weights.parameters():
            param.mul_(-1.5)
    model, optimizer, _ = build(kind="SGD")  # without momentum: the weights are all there is
    train(model, optimizer, steps=range(3))
    model.load_state_dict(weights.state_dict())
    train(model, optimizer, steps=range(3, 6))
    fresh, fresh_optimizer, _ = build(kind="SGD")
    fresh.load_state_dict(weights.state_dict())
    train(fresh, fresh_optimizer, steps=range(3, 6))
    assert_same_bits(contents(model, optimizer), contents(fresh, fresh_optimizer))


def test_without_masters_wanted_saved_ones_are_unexpected(tmp_path: Path) -> None:
    source = build()
    train(source[0], source[1], steps=range(1))
    exported = source[2].state_dict()
    _, _, manager = build(CONFIG)
    with pytest.raises(SchemaError, match=r"head.weight.master: unexpected"):
        manager.load_state_dict(exported)


def test_torchs_own_state_dict_has_masters_too() -> None:
    first = build()
    train(first[0], first[1], steps=range(2))
    file = io.BytesIO()
    torch.save([first[0].state_dict(), first[1].state_dict()], file)
    file.seek(0)
    parameters, state = torch.load(file)
    model, optimizer, _ = build()
    optimizer.load_state_dict(state)
    model.load_state_dict(parameters)
    train(model, optimizer, steps=range(2, 5))
    assert_same_bits(contents(model, optimizer), uninterrupted(5))


def test_a_stock_reader_ignores_masters_or_reads_them(tmp_path: Path) -> None:
    source = build()
    train(source[0], source[1], steps=range(2), use_spare=lambda _: True)
    save(source, tmp_path)
    model = Net()  # fp32 now: what was trained with masters goes on without them
    optimizer = OPTIMIZERS["AdamW"](list(model.parameters()))
    destination = get_optimizer_state_dict(model, optimizer)
    masters = {name: torch.empty(param.shape) for name, param in model.named_parameters()}
    for name, values in destination["state"].items():
        assert isinstance(values, dict)
        assert MASTER not in values
        values[MASTER] = masters[name]
    dcp.load({"optimizer": destination}, checkpoint_id=tmp_path)
    for name, param in source[0].named_parameters():
        assert_same_bits({name: masters[name]}, {name: source[1].state[param][MASTER]})
    for values in destination["state"].values():
        assert isinstance(values, dict)
        del values[MASTER]
    dcp.load({"optimizer": destination}, checkpoint_id=tmp_path)


# ------------------------------------------------------------------ figures


def test_the_report_counts_masters_before_and_after_the_first_step() -> None:
    config = swapckpt.SwapConfig(swap_times=2, min_numel=1, master_weights=True)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=BF16) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    manager = swapckpt.StateManager(model, optimizer, config)
    reports = [manager.report(gbps=10)]
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    reports.append(manager.report(gbps=10))
    numel, step_nbytes = 64 * 64, 512
    for report in reports:
        assert report.device_freed_nbytes == 4 * (12 * numel + step_nbytes)
        assert report.master_grads_peak_nbytes == 2 * 4 * numel
        assert "fp32 gradients in a step   32 KiB" in str(report)
    optimizer.step()
    staging = 2 * 2 * (12 * numel + step_nbytes)
    assert reports[0].staging_peak_nbytes == staging
    assert manager.memory().device_peak_nbytes == staging + reports[0].master_grads_peak_nbytes


# ------------------------------------------------------------------ sharded


class ByHand:
    """fp32 copies of sharded bf16 parameters are the optimizer's; cast, step, copy back."""

    def __init__(self, model: Net, kind: str) -> None:
        self.pairs = [(param, nn.Parameter(param.detach().float())) for param in model.parameters()]
        self.optimizer = OPTIMIZERS[kind]([master for _, master in self.pairs])

    def zero_grad(self) -> None:
        for param, _ in self.pairs:
            param.grad = None

    def step(self) -> None:
        for param, master in self.pairs:
            master.grad = None if param.grad is None else param.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for param, master in self.pairs:
                param.copy_(master)


def sharded() -> Net:
    model, mesh = Net(dtype=BF16), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # type: ignore[return-value]


def train_sharded(model: Net, optimizer: Optimizer | ByHand, steps: Iterable[int]) -> None:
    for step in steps:
        train(model, optimizer, steps=[step], use_spare=lambda step: step > 1)  # type: ignore[arg-type]


def assert_sharded_parity_and_resume(kinds: list[str], path: Path) -> dict[str, object]:
    """Returns what was saved last."""
    saved: dict[str, object] = {}
    for kind in kinds:
        plain, model = sharded(), sharded()
        by_hand = ByHand(plain, kind)
        optimizer = OPTIMIZERS[kind](list(model.parameters()))
        manager = swapckpt.StateManager(model, optimizer, MASTERS)
        train_sharded(plain, by_hand, range(4))
        train_sharded(model, optimizer, range(2))
        save((model, optimizer, manager), path / kind)
        saved = contents(model, optimizer)

        model = sharded()
        optimizer = OPTIMIZERS[kind](list(model.parameters()))
        manager = swapckpt.StateManager(model, optimizer, MASTERS)
        load((model, optimizer, manager), path / kind)
        train_sharded(model, optimizer, range(2, 4))
        for (param, master), other in zip(by_hand.pairs, model.parameters(), strict=True):
            found = dict(optimizer.state[other])
            assert isinstance(found[MASTER], DTensor)
            assert_same_bits({"param": other.data}, {"param": param.data})
            assert_same_bits({"master": found.pop(MASTER)}, {"master": master.data})
            assert_same_bits(found, by_hand.optimizer.state[master])
        assert manager.memory().device_nbytes == 0
        assert swap_of(optimizer).device.ledger.num_loads > 0
    return saved


def test_sharded_masters_equal_the_recipe_by_hand(run_ranks: RankRunner, tmp_path: Path) -> None:
    run_ranks(2, assert_sharded_parity_and_resume, ["AdamW", "AdamW-fused", "SGD-dampening"], tmp_path)


def test_masters_load_onto_another_number_of_ranks(run_ranks: RankRunner, tmp_path: Path) -> None:
    saved = run_ranks(2, assert_sharded_parity_and_resume, ["AdamW"], tmp_path)[0]
    built = build()
    load(built, tmp_path / "AdamW")
    assert_same_bits(contents(built[0], built[1]), saved)
    assert f"head.weight.{MASTER}" in saved
