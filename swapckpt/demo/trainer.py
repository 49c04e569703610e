"""The training script of the demo: what every rank runs, and the place to see how swapckpt is used.

Runs under any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (torchrun does)::

    torchrun --nproc-per-node 2 -m swapckpt.demo.trainer config.json

Rank 0 reports one JSON record per line on standard output (see :mod:`swapckpt.demo.records`).
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import signal
import sys
import time
from collections import deque
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import swapckpt
from swapckpt.demo.corpus import load_corpus
from swapckpt.demo.model import Llama
from swapckpt.demo.records import (
    DIE_WITH,
    KEEP_LATEST,
    Finished,
    Saved,
    Saving,
    Started,
    Stepped,
    TrainConfig,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from swapckpt.demo.records import Event

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def train(config: TrainConfig, report: Callable[[Event], None]) -> None:
    """Train from the newest committed checkpoint, or from scratch, to ``config.steps``."""
    rank, world = dist.get_rank(), dist.get_world_size()
    corpus = load_corpus(config.data, min_nbytes=config.time + 1)
    model = _sharded_model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95))

    # All of swapckpt is here and in two lines below. `optimizer` stays the same object, and from now on its
    # step() swaps; the checkpointer saves and loads all that this job needs to go on.
    manager = checkpointer = None
    if config.swap_times is not None:
        manager = swapckpt.StateManager(model, optimizer, swapckpt.SwapConfig(swap_times=config.swap_times))
    if config.checkpoints is not None:
        states = {"model": model, "optimizer": manager}
        retention = swapckpt.CheckpointConfig(keep_latest=KEEP_LATEST)
        checkpointer = swapckpt.Checkpointer(config.checkpoints, states, retention)

    with checkpointer or nullcontext():
        start = (checkpointer.load() or 0) if checkpointer is not None else 0
        report(Started(start=start, device=config.device))
        saves: deque[swapckpt.SaveHandle] = deque()

        for step in range(start + 1, config.steps + 1):
            begin = time.perf_counter()
            batch = corpus.batch(step=step, seed=config.seed, size=config.batch, time=config.time)
            inputs, targets = (tokens.chunk(world)[rank].to(config.device) for tokens in batch)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            with _recorded(manager, config.timeline if step == config.steps else None):
                optimizer.step()
            optimizer.zero_grad()
            mean_loss = _mean(loss.detach())
            secs = time.perf_counter() - begin
            report(Stepped(step, mean_loss.hex(), secs, *_accounted_nbytes(optimizer, manager)))

            if checkpointer is not None and step % config.save_every == 0:
                saves.append(checkpointer.save(step))  # a thread writes; waits only for the save before
                report(Saving(step))
            _report_committed(saves, report)

    _report_committed(saves, report)  # leaving the block has waited for the last one
    report(Finished(_digest(model.parameters()), _digest(_state_tensors(optimizer))))


def _report_committed(saves: deque[swapckpt.SaveHandle], report: Callable[[Event], None]) -> None:
    """Take the saves out that are over. Raises the error of one that failed."""
    while saves and saves[0].done():
        save = saves.popleft()
        stats = save.result()
        secs = save.stalled_secs + stats.staged_secs + stats.write_secs
        report(Saved(save.step, save.stalled_secs, secs))


def _sharded_model(config: TrainConfig) -> Llama:
    torch.manual_seed(config.seed)  # every rank draws the whole model, then keeps its shard
    model = Llama(config.shape, max_time=config.time).to(config.device)
    mesh = init_device_mesh(torch.device(config.device).type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@contextmanager
def _recorded(manager: swapckpt.StateManager | None, path: Path | None) -> Iterator[None]:
    """Write what the streams of rank 0 do inside as a Chrome trace; without a path just go on."""
    if manager is None or path is None:
        yield
        return
    with manager.record_timeline() as timeline:
        yield
    if dist.get_rank() == 0:
        timeline.write_chrome_trace(path)


def _mean(value: Tensor) -> float:
    total = value.clone()
    dist.all_reduce(total)
    return float(total.item()) / dist.get_world_size()


def _accounted_nbytes(
    optimizer: torch.optim.Optimizer, manager: swapckpt.StateManager | None
) -> tuple[int, int, int]:
    """Bytes of optimizer state: on the device now, at its peak, and in host mirrors."""
    if manager is None:
        nbytes = sum(tensor.nbytes for tensor in map(_local, _state_tensors(optimizer)))
        return nbytes, nbytes, 0
    memory = manager.memory()
    return memory.device_nbytes, memory.device_peak_nbytes, memory.host_nbytes


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Every state tensor as big as its parameter (what is worth swapping), in parameter and key order."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state[param]
            yield from (state[key] for key in sorted(state) if state[key].shape == param.shape)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _digest(tensors: Iterable[Tensor]) -> str:
    """BLAKE2 of the bytes of all ranks' shards."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        local = _local(tensor.detach()).cpu().contiguous()
        digest.update(local.flatten().view(torch.uint8).numpy().tobytes())
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()


def _die_with_parent(parent_pid: int) -> None:
    """Let the kernel SIGKILL this process when its parent ends, whatever either of them is doing then.

    A pipe to the parent would do the same for a process that runs, but the demo stops its ranks for a moment
    before it kills them: a stopped process notices nothing.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the call
        os._exit(1)


def _init_process_group(device: torch.device) -> None:
    backend = "gloo"
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend)


def main() -> None:
    """Run one rank as the command line and the launcher's environment say."""
    parser = argparse.ArgumentParser(description="One rank of the swapckpt demo.")
    parser.add_argument("config", type=Path, help="TrainConfig as JSON")
    parser.add_argument(
        DIE_WITH, type=int, metavar="PID", help="parent process that this rank must not outlive"
    )
    arguments = parser.parse_args()
    if arguments.die_with is not None:
        _die_with_parent(arguments.die_with)
    config = TrainConfig.from_json(arguments.config.read_text())
    # Whatever a library prints must not end up between the records.
    records = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def report(event: Event) -> None:
        if dist.get_rank() == 0:
            records.write(encode(event) + "\n")

    torch.use_deterministic_algorithms(True)
    _init_process_group(torch.device(config.device))
    train(config, report)
    dist.barrier()  # a rank that leaves while others still talk to it makes them fail
    dist.destroy_process_group()
    records.close()
    # Gloo's threads at times outlive their group, and then the interpreter's exit aborts ("terminate called
    # without an active exception", about one exit in ten). Everything is written: skip that exit.
    os._exit(0)


if __name__ == "__main__":
    main()
