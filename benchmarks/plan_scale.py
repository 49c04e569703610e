"""What a save costs the coordinating rank, on 8 to 4,096 imagined ranks.

The optimizer state of a Llama 70B (two moments and a step for each parameter), sharded by FSDP2 over all
ranks. No rank runs: their plans and results are made as stock torch makes them and pickled, which is what
reaches the coordinator. Timed is what it does with them: unpickle, plan, begin the attempt, pickle what each
rank gets, unpickle the results, write metadata (and our manifest). No data is written; our data files are
empty space of the right length. "cached" is stock with enable_plan_caching=True.
"""

from __future__ import annotations

import gc
import pickle
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks._harness import Ratio, figure, finish, parser, print_load, print_table
from swapckpt._torch import StorageInfo
from swapckpt.storage import SwapSavePlanner, SwapStorageWriter
from swapckpt.storage.manifest import FileSums, block_nbytes
from swapckpt.storage.writer import RankReport, WriteTask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DIM, HIDDEN, KEYS, VOCABULARY, LAYERS = 8192, 28_672, 1024, 128_256, 80
ENVELOPE_NBYTES = 1577  # around the elements of an item

Shapes = dict[str, tuple[int, ...]]


def llama_70b(layers: int) -> Shapes:
    block: Shapes = {
        "attention_norm": (DIM,),
        "wq": (DIM, DIM),
        "wk": (KEYS, DIM),
        "wv": (KEYS, DIM),
        "wo": (DIM, DIM),
        "ffn_norm": (DIM,),
        "w1": (HIDDEN, DIM),
        "w2": (DIM, HIDDEN),
        "w3": (HIDDEN, DIM),
    }
    layered = {f"layers.{n}.{name}": shape for n in range(layers) for name, shape in block.items()}
    return {"tok_embeddings": (VOCABULARY, DIM), **layered, "norm": (DIM,), "output": (VOCABULARY, DIM)}


# ------------------------------------------------------------------------------------------------ plans

_PROPERTIES = TensorProperties.create_from_tensor(torch.zeros(1))


def local_plan(shapes: Shapes, rank: int, world_size: int) -> SavePlan:
    """What stock's planner makes of one rank's state; :func:`check_plans` compares them."""
    items, paths = [], {}
    for name, shape in shapes.items():
        size = torch.Size(shape)
        rows = -(-shape[0] // world_size)
        first = min(rank * rows, shape[0])
        offsets = torch.Size((first, *(0 for _ in shape[1:])))
        sizes = torch.Size((min(rows, shape[0] - first), *shape[1:]))
        for key in ("step", "exp_avg", "exp_avg_sq"):
            fqn = f"optimizer.state.{name}.{key}"
            paths[fqn] = ("optimizer", "state", name, key)
            if key == "step":
                chunk = ChunkStorageMetadata(torch.Size(()), torch.Size(()))
                data = TensorWriteData(chunk, _PROPERTIES, torch.Size(()))
                kind = WriteItemType.TENSOR
            else:
                data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), _PROPERTIES, size)
                kind = WriteItemType.SHARD
            items.append(WriteItem(MetadataIndex(fqn, data.chunk.offsets), kind, tensor_data=data))
    return SavePlan(items, planner_data=paths)


def check_plans(world_size: int, ranks: Sequence[int]) -> None:
    """Compare with the real planner, on real DTensors, some of them empty on the last ranks."""
    shapes: Shapes = {"large": (4 * world_size, 2), "uneven": (world_size + 3, 2), "few": (3, 2)}
    for rank in ranks:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        mesh = init_device_mesh("cpu", (world_size,))
        plan = local_plan(shapes, rank, world_size)
        sizes = {item.index.fqn: item.tensor_data.chunk.sizes for item in plan.items}
        state = {
            name: {
                key: torch.zeros(())
                if key == "step"
                else DTensor.from_local(
                    torch.zeros(sizes[f"optimizer.state.{name}.{key}"]),
                    mesh,
                    [Shard(0)],
                    run_check=False,
                    shape=torch.Size(shape),
                    stride=(shape[1], 1),
                )
                for key in ("step", "exp_avg", "exp_avg_sq")
            }
            for name, shape in shapes.items()
        }
        planner = DefaultSavePlanner()
        planner.set_up_planner({"optimizer": {"state": state}}, None, rank == 0)
        made = planner.create_local_plan()
        dist.destroy_process_group()
        assert made.items == plan.items, (rank, made.items, plan.items)
        assert made.planner_data == plan.planner_data


# ------------------------------------------------------------------------------------------------ costs


@dataclass
class Cost:
    """Of the coordinator in one save. Bytes are those of pickles that reach it or leave it."""

    secs: float = 0.0
    plan_nbytes: int = 0  # gathered
    sent_nbytes: int = 0
    result_nbytes: int = 0
    metadata_nbytes: int = 0
    parts: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.parts[part] = secs = time.perf_counter() - begin
        self.secs += secs


Planner = DefaultSavePlanner
Writer = FileSystemWriter | SwapStorageWriter


def save(
    planner: Planner, writer: Writer, path: Path, *, gathered: Sequence[bytes], kept: list[SavePlan]
) -> Cost:
    """One save, as DCP calls its coordinator. ``kept`` is what ranks keep of their final plans."""
    cost = Cost(plan_nbytes=sum(map(len, gathered)))
    gc.collect()  # a collection that falls into one part would be counted there
    writer.reset(path)
    writer.set_up_storage_writer(True)
    writer.prepare_local_plan(SavePlan([]))  # stock makes the folder here
    with cost.timed("gather"):
        plans = [pickle.loads(data) for data in gathered]
    with cost.timed("plan"):
        plans, metadata = planner.create_global_plan(plans)
        plans = writer.prepare_global_plan(plans)
    with cost.timed("scatter"):
        sent = [pickle.dumps(plan) for plan in plans]
    cost.sent_nbytes = sum(map(len, sent))
    kept[:] = [new if new.usable else old for new, old in zip(plans, kept or plans, strict=True)]
    results = [
        pickle.dumps(written(rank, plan.storage_data, old, path))
        for rank, (plan, old) in enumerate(zip(plans, kept, strict=True))
    ]
    cost.result_nbytes = sum(map(len, results))
    with cost.timed("results"):
        loaded = [pickle.loads(data) for data in results]
    with cost.timed("commit"):
        writer.finish(metadata, loaded)
    cost.metadata_nbytes = (path / ".metadata").stat().st_size
    return cost


def written(rank: int, task: object, plan: SavePlan, path: Path) -> list[WriteResult]:
    """What a rank reports when it has written its items."""
    name, end, rows, places = f"__{rank}_0.distcp", 0, [], []
    for item in plan.items:
        assert item.tensor_data is not None
        payload = item.tensor_data.chunk.sizes.numel() * 4
        nbytes = payload + ENVELOPE_NBYTES
        if isinstance(task, WriteTask):
            blocks = "0" * 8 * -(-payload // block_nbytes(payload))
            rows.append(f'[{end},{nbytes},704,{payload},"00000000","{blocks}"]')
        places.append((item.index, end, nbytes))
        end += nbytes
    if not isinstance(task, WriteTask):
        return [WriteResult(index, nbytes, StorageInfo(name, at, nbytes)) for index, at, nbytes in places]
    with (path.parent / task.attempt.folder / name).open("wb") as file:
        file.truncate(end)
    known = task.places_from is not None
    report = RankReport(rank, (FileSums(name, end, ",".join(rows)),), None if known else (tuple(places),))
    return [WriteResult(MetadataIndex(f"rank {rank}"), end, report)]


def costs(shapes: Shapes, world_size: int, root: Path) -> dict[str, list[Cost]]:
    """First and second save of each way."""
    gathered = [pickle.dumps(local_plan(shapes, rank, world_size)) for rank in range(world_size)]
    unchanged = [pickle.dumps(SavePlan([], usable=False))] * world_size
    cached = DefaultSavePlanner(enable_plan_caching=True)
    cached._cached_plans_key = f"plan_scale {world_size}"  # noqa: SLF001 - all planners of a class share one
    ways: dict[str, tuple[Planner, Writer, list[bytes]]] = {
        "stock": (DefaultSavePlanner(), FileSystemWriter(root), gathered),
        "cached": (cached, FileSystemWriter(root), unchanged),
        "ours": (SwapSavePlanner(), SwapStorageWriter(), unchanged),
    }
    found = {}
    for way, (planner, writer, second) in ways.items():
        kept: list[SavePlan] = []
        found[way] = [
            save(planner, writer, root / f"{way}-{n}", gathered=plans, kept=kept)
            for n, plans in enumerate((gathered, second))
        ]
    for cache in ("save_plan", "all_plans", "global_plan", "metadata", "final_save_plan"):
        getattr(DefaultSavePlanner, f"_cached_{cache}").pop(cached._cached_plans_key, None)  # noqa: SLF001
    return found


def print_costs(world_size: int, num_items: int, found: dict[str, list[Cost]]) -> None:
    print(f"\n{world_size:,} ranks, {num_items:,} items")
    rows = [
        (
            f"{way}, {('1st', '2nd')[n]}",
            figure(cost.secs),
            *(figure(cost.parts[part]) for part in ("gather", "plan", "scatter", "results", "commit")),
            *(figure(nbytes / 1e6) for nbytes in (cost.plan_nbytes + cost.result_nbytes, cost.sent_nbytes)),
        )
        for way, each in found.items()
        for n, cost in enumerate(each)
    ]
    print_table(("", "s", "gather", "plan", "send", "results", "commit", "MB in", "MB out"), rows)


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--layers", type=int, default=LAYERS, help=f"of the model (default {LAYERS})")
    arguments.add_argument("--ranks", type=int, nargs="*", help="numbers of ranks")
    options = arguments.parse_args()
    check_plans(8, (0, 3, 7))
    layers = 1 if options.quick else options.layers
    shapes = llama_70b(layers)
    worlds: Sequence[int] = options.ranks or ((8, 32) if options.quick else (8, 64, 512, 1024, 4096))
    print_load()
    print(f"Llama 70B with {layers} of {LAYERS} layers; the coordinator's seconds and megabytes")
    found: dict[str, list[Cost]] = {}
    gc.disable()
    for world_size in worlds:
        with tempfile.TemporaryDirectory() as folder:
            found = costs(shapes, world_size, Path(folder))
        print_costs(world_size, 3 * len(shapes) * world_size, found)
    stock, cached, ours = (found[way] for way in ("stock", "cached", "ours"))
    finish(
        {
            "plan_first_save_over_stock": Ratio(ours[0].secs / stock[0].secs, 1.25),
            "plan_second_save_faster_than_stock": Ratio(stock[1].secs / ours[1].secs, 10.0, "higher"),
            "plan_second_save_faster_than_cached": Ratio(cached[1].secs / ours[1].secs, 1.0, "higher"),
            "plan_second_save_bytes_per_rank": Ratio(
                (ours[1].plan_nbytes + ours[1].sent_nbytes) / worlds[-1], 2000.0
            ),
            "plan_metadata_over_stock": Ratio(ours[0].metadata_nbytes / stock[0].metadata_nbytes, 1.0),
        },
        options.json,
    )


if __name__ == "__main__":
    main()
