"""States in host memory, and the ways to write and read them that the storage benchmarks compare."""

from __future__ import annotations

import ctypes
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from swapckpt import StrictLoadPlanner
from swapckpt.device import CpuDevice
from swapckpt.memory import HostArena
from swapckpt.plan import TensorSpec, lay_out, partition
from swapckpt.storage import SwapSavePlanner, SwapStorageReader, SwapStorageWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from swapckpt.memory import HostSlab

ALIGNMENT = 4096
CHUNK_NBYTES = 16 << 20
RAW_THREADS = 4

State = dict[str, dict[str, "Tensor"]]


class Mirrors:
    """Float tensors as a swapped optimizer has them: mirrors in slabs, a segment for each of 16 batches.

    Args:
        shapes: Of the tensors.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        specs = [
            TensorSpec(shape, torch.empty(shape, device="meta").stride(), torch.float32) for shape in shapes
        ]
        arena, generator = HostArena(CpuDevice()), torch.Generator().manual_seed(0)
        self.slabs: list[HostSlab] = []
        self.tensors: list[Tensor] = []
        for batch in partition([spec.nbytes for spec in specs], 16):
            segment = arena.allocate(lay_out(specs[n].nbytes for n in batch), own_slab=True)
            self.slabs.append(segment.slab)
            for n, region in zip(batch, segment.layout.regions, strict=True):
                self.tensors.append(segment.mirror(region, specs[n]).normal_(generator=generator))
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)

    def state(self) -> State:
        """What is saved, and loaded into: the mirrors themselves."""
        return {"state": {f"layers.{n}.exp_avg": tensor for n, tensor in enumerate(self.tensors)}}


# ------------------------------------------------------------------------------------------------ raw


def _shares(slabs: Sequence[HostSlab]) -> list[list[memoryview]]:
    """The slabs' bytes in pieces, for each thread, each a multiple of pages."""
    pieces = [
        memoryview(slab.owner)[at : at + CHUNK_NBYTES]
        for slab in slabs
        for at in range(0, slab.nbytes, CHUNK_NBYTES)
    ]
    return [pieces[n::RAW_THREADS] for n in range(RAW_THREADS)]


def _on_threads(
    job: Callable[[Path, Sequence[memoryview]], None], folder: Path, slabs: Sequence[HostSlab]
) -> None:
    shares = _shares(slabs)
    with ThreadPoolExecutor(len(shares)) as pool:
        for future in [pool.submit(job, folder / f"raw_{n}", share) for n, share in enumerate(shares)]:
            future.result()


def raw_write(folder: Path, slabs: Sequence[HostSlab]) -> None:
    """The same memory to the same number of files, with direct I/O and fsync, and nothing else."""

    def job(path: Path, pieces: Sequence[memoryview]) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        for piece in pieces:
            assert os.write(descriptor, piece) == len(piece)
        os.fsync(descriptor)
        os.close(descriptor)

    folder.mkdir()
    _on_threads(job, folder, slabs)
    sync_folder(folder)


def raw_read(folder: Path, slabs: Sequence[HostSlab]) -> None:
    """What :func:`raw_write` wrote, back into the same memory."""

    def job(path: Path, pieces: Sequence[memoryview]) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        for piece in pieces:
            assert os.readv(descriptor, [piece]) == len(piece)
        os.close(descriptor)

    _on_threads(job, folder, slabs)


def sync_folder(folder: Path) -> None:
    """Make the entries of a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# ------------------------------------------------------------------------------------------------ savers


class Saver:
    """Saves a state again and again below ``root``, each time into a folder of its own.

    Args:
        root: Where to.
        state: What.
    """

    def __init__(self, root: Path, state: State) -> None:
        self.state = state
        self._root = root
        self._count = 0
        self._writer, self._planner = SwapStorageWriter(), SwapSavePlanner()

    @property
    def folder(self) -> Path:
        """The last checkpoint."""
        return self._root / f"step-{self._count}"

    def next_folder(self) -> Path:
        """Remove the last checkpoint. Returns where the next one goes."""
        self.clear()
        self._count += 1
        return self.folder

    def clear(self) -> None:
        """Remove the present checkpoint."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def ours(self) -> None:
        dcp.save(self.state, checkpoint_id=self.folder, storage_writer=self._writer, planner=self._planner)

    def stock(self) -> None:
        dcp.save(self.state, checkpoint_id=self.folder)

    def torch_save(self) -> None:
        self.folder.mkdir()
        with (self.folder / "state.pt").open("wb") as file:
            torch.save(self.state, file)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self.folder)

    def safetensors(self) -> None:
        self.folder.mkdir()
        path = self.folder / "state.safetensors"
        safetensors.torch.save_file(self.state["state"], path)
        sync_file(path)
        sync_folder(self.folder)


def sync_file(path: Path) -> None:
    """Make a file's content durable."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def load_ours(state: State, folder: Path) -> None:
    """By our reader, verified, with our planner."""
    dcp.load(state, storage_reader=SwapStorageReader(folder), planner=StrictLoadPlanner(), no_dist=True)


def load_stock(state: State, folder: Path) -> None:
    """By torch's reader."""
    dcp.load(state, checkpoint_id=folder, no_dist=True)


def files_of(folder: Path) -> Iterator[Path]:
    """All files of a checkpoint."""
    return (path for path in folder.iterdir() if path.is_file())


# ------------------------------------------------------------------------------------------------ memory


def peak_nbytes(job: Callable[[], object]) -> int:
    """How far the resident set grows above what it is now while ``job`` runs (Linux, glibc)."""
    # What earlier jobs freed would be used again without growth.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from the present resident set
    before = _resident_nbytes("VmRSS")
    job()
    return max(0, _resident_nbytes("VmHWM") - before)


def _resident_nbytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024
