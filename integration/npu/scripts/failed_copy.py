"""One copy fails: what torch_npu does then, and what a swapped optimizer does. The process is spent after it.

Prints facts as JSON; the tests judge them.
"""

from __future__ import annotations

import json
import os
import sys
import threading

import torch

import swapckpt
from integration import npu
from integration.npu.training import Training
from swapckpt.errors import StateFailedError, SwapCkptError
from swapckpt.optimizer import swap_of


def dropped() -> dict[str, object]:
    """torch_npu by itself, after one refused asynchronous copy."""
    module = npu.load()
    source = torch.ones(1024).to("npu")
    mirror = torch.zeros(1024, pin_memory=True)
    stream = module.Stream()

    def copy() -> None:
        with module.stream(stream):
            mirror.copy_(source, non_blocking=True)

    module.synchronize()
    npu.fail_copy(1)
    reports = 0
    for call in (copy, module.synchronize, module.synchronize, copy, module.synchronize, stream.synchronize):
        try:
            call()
        except RuntimeError:  # noqa: PERF203 - which calls report it is the question
            reports += 1
    event = module.Event()
    event.record(stream)
    waiting = threading.Thread(target=event.synchronize, daemon=True)
    waiting.start()
    waiting.join(1.0)
    blocking = torch.zeros(1024)
    blocking.copy_(source)
    return {
        "reports": reports,
        "copied": bool(mirror.any()),
        "event complete": event.query(),
        "event.synchronize returned": not waiting.is_alive(),
        "blocking copy works": bool(blocking.all()),
    }


def step(nth: int, *, existing: bool) -> dict[str, object]:
    """A swapped step whose ``nth`` copy is refused (-1: its last), and what can be done after it.

    Without ``existing`` state that step creates it.
    """
    module = npu.load()
    config = swapckpt.SwapConfig(swap_times=3, min_numel=0, timeout_secs=2.0)
    training = Training({"fused": True}, config, all_active=True)
    ledger = swap_of(training.optimizer).device.ledger
    if existing:
        training.step()
        copies_before = ledger.num_loads + ledger.num_offloads
        training.step()
        nth %= ledger.num_loads + ledger.num_offloads - copies_before + 1
    before = _tensors(training.manager.state_dict())
    training.set_gradients()
    module.synchronize()
    npu.fail_copy(nth)
    failure = _failure(training)
    exported = _exported(training)
    again = _failure(training)
    module.synchronize()
    return {
        "failure": failure,
        "exported what was there before": None if exported is None else _equal(exported, before),
        "failure of the next step": again,
        "exported after it": _exported(training) is not None,
        "phase": swap_of(training.optimizer).phase.value,
    }


def _failure(training: Training) -> list[str]:
    """Names of the exceptions of a step, the cause last."""
    try:
        training.optimizer.step()
    except SwapCkptError as error:
        return [type(error).__name__, type(error.__cause__).__name__]
    return []


def _exported(training: Training) -> list[torch.Tensor] | None:
    try:
        return _tensors(training.manager.state_dict())
    except StateFailedError:
        return None


def _tensors(tree: object) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree.clone()]
    if isinstance(tree, dict):
        return [tensor for value in tree.values() for tensor in _tensors(value)]
    return []


def _equal(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other) for tensor, other in zip(tensors, others, strict=True))


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    result = dropped() if kind == "dropped" else step(int(rest[0]), existing=kind == "existing")
    print(json.dumps(result), flush=True)
    os._exit(0)  # an ordinary exit would wait for the thread that hangs
