"""``swapckpt plan``: what swapping gives and costs for a model of a given size, before anything is built."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from swapckpt.config import SwapConfig, require_int, require_positive
from swapckpt.demo.config import default_device
from swapckpt.demo.model import Llama, LlamaShape, parse_count, solve_shape
from swapckpt.device import device_for
from swapckpt.errors import ConfigError
from swapckpt.gathering import Gathering
from swapckpt.ownership import assign_owners
from swapckpt.report import (
    SwapReport,
    WholeMatrix,
    build_report,
    footprint,
    format_nbytes,
    measure_gbps,
)
from swapckpt.template import describe
from swapckpt.update import unhooked_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.optim import Optimizer

    Params = Iterable[tuple[str, torch.nn.Parameter]]

LLAMA_VOCAB = 128_256
_BYTE_VOCAB_BELOW = 10**8
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_OPTIMIZERS: dict[str, Callable[[Params], Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "adamw": torch.optim.AdamW,
    "asgd": torch.optim.ASGD,
    "muon": torch.optim.Muon,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "sgd": lambda params: torch.optim.SGD(params, momentum=0.9),  # without momentum there is no state
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The run to plan for. ``ranks`` is the number of FSDP shards; figures are those of rank 0."""

    shape: LlamaShape
    optimizer: str
    dtype: str
    ranks: int
    config: SwapConfig

    def __post_init__(self) -> None:
        require_int("ranks", self.ranks, minimum=1)
        for name, value, allowed in (
            ("optimizer", self.optimizer, _OPTIMIZERS),
            ("dtype", self.dtype, _DTYPES),
        ):
            if value not in allowed:
                msg = f"{name} must be one of {', '.join(allowed)}, got {value!r}."
                raise ConfigError(msg)


def plan(  # noqa: PLR0913 - to typer every parameter is an option
    *,
    params: Annotated[str, typer.Option(help="Size of the Llama: 10M, 8B, ...")] = "8B",
    vocab: Annotated[
        int | None, typer.Option(help=f"Size of the vocabulary (default: {LLAMA_VOCAB}; 256 below 100M).")
    ] = None,
    optimizer: Annotated[str, typer.Option(help=", ".join(_OPTIMIZERS))] = "adamw",
    dtype: Annotated[str, typer.Option(help="Of the parameters: " + ", ".join(_DTYPES))] = "bf16",
    ranks: Annotated[int, typer.Option(help="FSDP shards.")] = 1,
    swap_times: Annotated[int, typer.Option(help="Batches of a step.")] = SwapConfig().swap_times,
    staging_buffers: Annotated[int, typer.Option(help="Device buffers.")] = SwapConfig().staging_buffers,
    min_numel: Annotated[int, typer.Option(help="Smallest tensor to swap.")] = SwapConfig().min_numel,
    master_weights: Annotated[
        bool, typer.Option("--master-weights", help="Keep fp32 masters of bf16 and fp16 parameters.")
    ] = False,
    gather_matrices: Annotated[
        bool, typer.Option("--gather-matrices", help="Muon: step whole matrices, each on one rank.")
    ] = False,
    bandwidth: Annotated[
        float | None, typer.Option(help="Host link in GB/s, each direction (default: measured here).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell what swapping gives and costs for a model of a given size, without building it."""
    count = parse_count(params)
    request = PlanRequest(
        shape=solve_shape(count, vocab=vocab or (256 if count < _BYTE_VOCAB_BELOW else LLAMA_VOCAB)),
        optimizer=optimizer,
        dtype=dtype,
        ranks=ranks,
        config=SwapConfig(
            swap_times=swap_times,
            staging_buffers=staging_buffers,
            min_numel=min_numel,
            master_weights=master_weights,
            gather_matrices=gather_matrices,
        ),
    )
    gbps = measure_bandwidth() if bandwidth is None else bandwidth
    require_positive("bandwidth", gbps)
    report = plan_report(request, gbps=gbps)
    typer.echo(_as_json(request, report) if as_json else _as_text(request, report))


def measure_bandwidth() -> float:
    """GB/s of the slower direction between this machine's device and its host memory."""
    return measure_gbps(device_for(torch.device(default_device()), timeout_secs=60.0))


def plan_report(request: PlanRequest, *, gbps: float) -> SwapReport:
    """The report that ``StateManager.report()`` would give on rank 0, from shapes alone.

    Raises:
        ConfigError: The optimizer has nothing to step in this model.
        UnsupportedOptimizerError: Its state cannot be told before a step.
    """
    shards = [(name, _shard(param, request)) for name, param in _stepped(request)]
    optimizer = _OPTIMIZERS[request.optimizer](shards)
    templates = describe(
        optimizer,
        unhooked_step(optimizer),
        [(0, shard) for _, shard in shards],
        master_weights=request.config.master_weights,
    )
    footprints = [
        footprint(
            shard,
            [(key, state.spec) for key, state in templates[shard].items() if state.spec is not None],
            name=name,
            optimizer=type(optimizer),
            config=request.config,
            matrix=matrix,
        )
        for (name, shard), matrix in zip(shards, _matrices(request, type(optimizer)), strict=True)
    ]
    return build_report(footprints, request.config, gbps=gbps)


def _stepped(request: PlanRequest) -> list[tuple[str, torch.nn.Parameter]]:
    named = _meta_llama(request.shape).named_parameters()
    return [(name, param) for name, param in named if request.optimizer != "muon" or param.dim() == 2]


def _matrices(request: PlanRequest, optimizer: type[Optimizer]) -> list[WholeMatrix | None]:
    """Of the parameters that are stepped: which whole ones are gathered, and which of them on rank 0."""
    numels = [param.numel() for _, param in _stepped(request)]
    if not request.config.gather_matrices or request.ranks == 1 or not Gathering.concerns(optimizer):
        return [None] * len(numels)
    owners = assign_owners(numels, (request.ranks,))
    return [WholeMatrix(numel, is_here=owner == (0,)) for numel, owner in zip(numels, owners, strict=True)]


def _meta_llama(shape: LlamaShape) -> Llama:
    with torch.device("meta"):
        return Llama(shape, max_time=1)


def _shard(param: torch.nn.Parameter, request: PlanRequest) -> torch.nn.Parameter:
    """Rank 0's part of ``param`` under FSDP2: the first of ``ranks`` chunks of its rows, and the largest."""
    rows, *columns = param.shape
    local = torch.empty(-(-rows // request.ranks), *columns, dtype=_DTYPES[request.dtype], device="meta")
    return torch.nn.Parameter(local)


def _params_nbytes(request: PlanRequest) -> int:
    return sum(_shard(param, request).nbytes for param in _meta_llama(request.shape).parameters())


def _as_json(request: PlanRequest, report: SwapReport) -> str:
    fields = {**asdict(request), "params": request.shape.params, "params_nbytes": _params_nbytes(request)}
    return json.dumps({"request": fields, "report": asdict(report)}, indent=1)


def _as_text(request: PlanRequest, report: SwapReport) -> str:
    shape = request.shape
    lines = [
        f"Llama of {shape.params:,} parameters ({shape})",
        f"{request.optimizer}, {request.dtype}, {request.ranks} FSDP shards; figures of rank 0",
        "",
        f"parameters                 {format_nbytes(_params_nbytes(request))}, and as much for gradients",
        str(report),
    ]
    if request.optimizer == "muon":
        lines.append("Muon steps matrices only: what the norms' optimizer holds is not in these figures.")
    return "\n".join(lines)
