"""Damaged checkpoints: our error or the right values, never a crash, a hang, or memory beyond the file's.

``SWAPCKPT_FUZZ=10000`` tries that many inputs per kind of damage instead of the few that fit into every run.
A failure names its seed; ``SWAPCKPT_FUZZ_SEED=<seed>`` tries that one alone.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import pickle
import random
import resource
import traceback
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from zlib_ng.zlib_ng import crc32

from swapckpt.errors import SwapCkptError
from swapckpt.planner import StrictLoadPlanner
from swapckpt.storage.reader import SwapStorageReader
from tests.storage.powerloss import File, Folder, VolatileFiles
from tests.storage.stores import equal, save, stock_save, unwrapped, zeroed

if TYPE_CHECKING:
    from collections.abc import Callable

INPUTS = int(os.environ.get("SWAPCKPT_FUZZ", "150"))
ONLY_SEED = os.environ.get("SWAPCKPT_FUZZ_SEED")
SECS_PER_INPUT = 0.2
MEMORY_NBYTES = 96 << 20
"""Address space a load may take: for blocks, windows and slabs of at most 16 MB. The files have 300 KB."""

_CONTEXT = multiprocessing.get_context("forkserver")

METADATA, MANIFEST, DATA = ".metadata", ".swapckpt.json", "__0_0.distcp"
Contents = dict[str, bytes]


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "optim": {
            "exp_avg": torch.randn(200, 300),
            "small": torch.randn(6, 2),
            "half": torch.randn(40).bfloat16(),
            "step": torch.tensor(7.0),
            "empty": torch.empty(0, 3),
        },
        "settings": {"lr": 0.1, "betas": (0.9, 0.999), "names": ["a", "b"]},
    }


def contents_of(folder: Path) -> Contents:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def files_of(contents: Contents) -> VolatileFiles:
    files: dict[str, File | Folder] = {name: File(bytearray(data), data) for name, data in contents.items()}
    folder = Folder(files, dict(files))
    return VolatileFiles(Folder({"x": folder}, {"x": folder}))


def loads_right_or_raises_ours(contents: Contents, *, checks_values: bool) -> bool:
    """True when it loaded. Raises what is neither of the two."""
    target = zeroed(state())
    reader = SwapStorageReader("/root/x", files=files_of(contents), threads=1)
    try:
        reader.read_metadata()
        with unwrapped():
            dcp_load(target, storage_reader=reader, planner=StrictLoadPlanner())
    except SwapCkptError:
        return False
    if checks_values:
        assert equal(target, state()), "loaded wrong values"
    return True


# -------------------------------------------------------------------------------------- random damage


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The bytes with something wrong somewhere. Never the same."""
    changed = bytearray(data)
    at = chance.randrange(len(changed) + 1)
    length = min(chance.choice([1, 2, 8, 100, 5000]), len(changed))
    start = chance.randrange(len(changed) - length + 1) if changed else 0
    kind = chance.randrange(8)
    if kind == 0 and changed:
        changed[at % len(changed)] ^= 1 << chance.randrange(8)
    elif kind == 1:
        changed[start : start + length] = chance.randbytes(length)
    elif kind == 2:
        del changed[at:]
    elif kind == 3:
        changed += chance.randbytes(length or 1)
    elif kind == 4:
        changed[at:at] = chance.randbytes(length or 1)
    elif kind == 5:
        del changed[start : start + length]
    elif kind == 6:
        changed[start : start + length] = bytes(length)
    else:
        other = chance.randrange(len(changed) - length + 1) if changed else 0
        changed[start : start + length] = changed[other : other + length]
    return bytes(changed) if changed != data else damaged(data, chance)


def random_damage(contents: Contents, chance: random.Random) -> Contents:
    name = chance.choice(sorted(contents))
    return {**contents, name: damaged(contents[name], chance)}


def lost_or_mixed_files(contents: Contents, chance: random.Random) -> Contents:
    changed = dict(contents)
    name, other = chance.choice(sorted(contents)), chance.choice(sorted(contents))
    if chance.random() < 0.5:
        del changed[name]
    elif name != other:
        changed[name] = contents[other]
    else:
        changed[name] = b""
    return changed


# -------------------------------------------------------------------------------------- crafted damage

ODD_NUMBERS = (0, 1, -1, 7, 255, 4096, 1 << 20, 1 << 31, 1 << 40, 1 << 62, 1 << 70, True, None, "5", 0.5)
ODD_NAMES = ("", "/etc/passwd", "../x/__0_0.distcp", METADATA, "x\0y", 5, None)
DTYPES = (torch.float32, torch.float64, torch.bool, torch.int8, torch.complex128, torch.bfloat16)


def crafted_metadata(data: bytes, chance: random.Random) -> bytes:
    """A valid pickle of metadata in which one record says something else."""
    metadata = pickle.loads(data)
    index = chance.choice(list(metadata.storage_data))
    place = metadata.storage_data[index]
    entry = metadata.state_dict_metadata[chance.choice(list(metadata.state_dict_metadata))]
    odd: Any = chance.choice(ODD_NUMBERS)
    kind = chance.randrange(9)
    if kind == 0:
        place.offset = odd
    elif kind == 1:
        place.length = odd
    elif kind == 2:
        place.relative_path = chance.choice(ODD_NAMES)
    elif kind == 3:
        metadata.storage_data[index] = metadata.storage_data[chance.choice(list(metadata.storage_data))]
    elif kind == 4:
        del metadata.storage_data[index]
    elif kind == 5:
        metadata.planner_data = chance.choice([None, 5, {}, {"optim.step": ()}, {"optim.step": ("a", "b")}])
    elif kind == 6:
        setattr(metadata, chance.choice(["state_dict_metadata", "storage_data", "storage_meta"]), odd)
    elif isinstance(entry, TensorStorageMetadata):
        crafted_tensor(entry, chance)
    return pickle.dumps(metadata)


def crafted_tensor(entry: TensorStorageMetadata, chance: random.Random) -> None:
    sizes = list(entry.size)
    kind = chance.randrange(5)
    if kind == 0:
        entry.properties.dtype = chance.choice(DTYPES)
    elif kind == 1:
        entry.chunks = chance.choice([[], entry.chunks * 2, [None]])  # type: ignore[list-item]
    elif sizes:
        dim = chance.randrange(len(sizes))
        sizes[dim] = chance.choice([0, 1, -1, sizes[dim] + 1, sizes[dim] * 2, 1 << 40])
        if kind == 2:
            entry.size = torch.Size(sizes)
        elif kind == 3:
            entry.chunks[0].sizes = torch.Size(sizes)
        else:
            entry.size = entry.chunks[0].sizes = torch.Size(sizes)


def crafted_manifest(data: bytes, chance: random.Random, *, metadata: bytes) -> bytes:
    """A manifest with a valid checksum in which something else is said."""
    body = json.loads(data)["body"]
    body["metadata"] = {"nbytes": len(metadata), "crc32": f"{crc32(metadata):08x}"}
    file = body["files"][DATA]
    row = chance.choice(file["items"])
    odd = chance.choice(ODD_NUMBERS)
    kind = chance.randrange(6)
    if kind == 0:
        row[chance.randrange(len(row))] = odd
    elif kind == 1:
        row[5] = chance.choice(["", "zz", "0" * 8, "0" * 80, row[5] * 2])
    elif kind == 2:
        file[chance.choice(["nbytes", "items"])] = odd
    elif kind == 3:
        body[chance.choice(list(body))] = odd
    elif kind == 4:
        file["items"].remove(row)
    else:
        body["files"][str(chance.choice(ODD_NAMES))] = body["files"].pop(DATA)
    text = json.dumps(body).encode()
    return b'{"crc32": "%08x", "body": %b}\n' % (crc32(text), text)


def crafted_item(data: bytes, chance: random.Random) -> bytes:
    """An archive with valid checksums in which a record is damaged, replaced, added or lost."""
    records: dict[str, bytes] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            records[name] = archive.read(name)
    name = chance.choice(sorted(records))
    kind = chance.randrange(4)
    if kind == 0:
        del records[name]
    elif kind == 1:
        records[chance.choice(["archive/constants.pkl", "archive/data/1", "other/data.pkl"])] = records[name]
    else:
        records[name] = damaged(records[name], chance)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED if kind == 3 else zipfile.ZIP_STORED) as archive:
        for each, content in records.items():
            archive.writestr(each, content)
    return stream.getvalue()


def crafted_ours(contents: Contents, chance: random.Random) -> Contents:
    """As an attacker would: metadata and manifest fit each other."""
    metadata = contents[METADATA]
    if chance.random() < 0.5:
        metadata = crafted_metadata(metadata, chance)
    manifest = crafted_manifest(contents[MANIFEST], chance, metadata=metadata)
    return {**contents, METADATA: metadata, MANIFEST: manifest}


def crafted_stock(contents: Contents, chance: random.Random) -> Contents:
    metadata = pickle.loads(contents[METADATA])
    if chance.random() < 0.5:
        return {**contents, METADATA: crafted_metadata(contents[METADATA], chance)}
    # One item made anew, behind all others.
    index = chance.choice(list(metadata.storage_data))
    place = metadata.storage_data[index]
    data = contents[DATA]
    item = crafted_item(data[place.offset : place.offset + place.length], chance)
    place.offset, place.length = len(data), len(item)
    return {**contents, METADATA: pickle.dumps(metadata), DATA: data + item}


# -------------------------------------------------------------------------------------- the run


@dataclass(frozen=True)
class Kind:
    """A kind of damage, what it is done to, and whether wrong values can be told from right ones."""

    damage: Callable[[Contents, random.Random], Contents]
    saver: Callable[..., None]
    checks_values: bool


def stock_data_only(contents: Contents, chance: random.Random) -> Contents:
    """Stock's metadata has no checksum: a damaged name in it may be another valid one."""
    return {**contents, DATA: damaged(contents[DATA], chance)}


KINDS = {
    "random damage to ours": Kind(random_damage, save, checks_values=True),
    "lost or mixed files of ours": Kind(lost_or_mixed_files, save, checks_values=True),
    "crafted for ours": Kind(crafted_ours, save, checks_values=False),
    "random damage to stock's data": Kind(stock_data_only, stock_save, checks_values=True),
    "random damage to stock's": Kind(random_damage, stock_save, checks_values=False),
    "crafted for stock's": Kind(crafted_stock, stock_save, checks_values=False),
}


def run(name: str, seeds: list[int], folder: str) -> None:
    """Try all seeds. What goes wrong is written to a file, seed by seed."""
    torch.set_num_threads(1)
    kind = KINDS[name]
    contents = contents_of(Path(folder) / "x")
    report = Path(folder) / "report"
    loads_right_or_raises_ours(contents, checks_values=True)  # imports and caches are not the reader's memory
    (line,) = [
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize")
    ]
    limit = (int(line.split()[1]) << 10) + MEMORY_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    loaded = 0
    for seed in seeds:
        report.write_text(f"seed {seed}: crashed or hung")
        try:
            changed = kind.damage(contents, random.Random(seed))
            loaded += loads_right_or_raises_ours(changed, checks_values=kind.checks_values)
        except BaseException:  # noqa: BLE001 - reported, whatever it is
            report.write_text(f"seed {seed}:\n{traceback.format_exc()}")
            os._exit(1)
    report.write_text(f"{loaded} loaded")


@pytest.mark.parametrize("name", KINDS)
def test_damaged_checkpoints_are_refused_or_right(name: str, tmp_path: Path) -> None:
    KINDS[name].saver(state(), tmp_path / "x")
    seeds = [int(ONLY_SEED)] if ONLY_SEED else list(range(INPUTS))
    process = _CONTEXT.Process(target=run, args=(name, seeds, str(tmp_path)))
    process.start()
    process.join(60 + SECS_PER_INPUT * len(seeds))
    report = (tmp_path / "report").read_text()
    if process.exitcode != 0:
        process.kill()
        pytest.fail(f"{name}, exit code {process.exitcode}: {report}")
    # Some damage has no effect (padding, records nobody reads); were it all, nothing would have been tried.
    assert int(report.split()[0]) < 0.9 * len(seeds) or ONLY_SEED
