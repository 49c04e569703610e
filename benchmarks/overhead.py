"""Microseconds of Python that swapping costs per batch and per tensor.

Tiny tensors, so that neither copies nor kernels count, and copies at once on the calling thread (policy
"inline"). A least-squares fit over batch and parameter counts separates the two; what the optimizer itself
costs per parameter is measured on the same parameters and subtracted.
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks._harness import Ratio, finish, interleave, parser, print_load, print_table
from swapckpt import SwapConfig, swap_optimizer
from swapckpt.device import CpuDevice, Policy

MOMENTS = 2  # state tensors of a parameter: exp_avg, exp_avg_sq


def adamw(num_params: int) -> torch.optim.AdamW:
    params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(num_params)]
    for param in params:
        param.grad = torch.zeros(4)
    return torch.optim.AdamW(params, fused=True)


def swapped(num_params: int, swap_times: int) -> torch.optim.AdamW:
    optimizer = adamw(num_params)
    config = SwapConfig(swap_times=swap_times, min_numel=2)  # the step counters stay
    swap_optimizer(optimizer, config, device=CpuDevice(Policy.INLINE))
    return optimizer


def fit(points: dict[tuple[int, ...], float]) -> list[float]:
    """Least squares of ``secs = a + b * x + c * y``: ``[b, c]`` for keys ``(x, y)``, in microseconds."""
    matrix = np.array([(1, *key) for key in points], dtype=float)
    solution, *_ = np.linalg.lstsq(matrix, np.array(list(points.values())), rcond=None)
    return [float(slope) * 1e6 for slope in solution[1:]]


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    print_load()
    param_counts = (64, 256) if options.quick else (128, 512, 2048)
    batch_counts = (1, 16) if options.quick else (1, 16, 64)
    natives = {(params,): adamw(params) for params in param_counts}
    ours = {
        (params, batches): swapped(params, batches) for params in param_counts for batches in batch_counts
    }
    cases = {key: optimizer.step for key, optimizer in (natives | ours).items()}
    timings = interleave(cases, repetitions=9 if options.quick else 30)
    (native,) = fit({key: timings[key].wall_secs for key in natives})
    per_param, per_batch = fit({key: timings[key].wall_secs for key in ours})
    per_tensor = (per_param - native) / MOMENTS
    rows = [
        ("native step, per parameter", f"{native:.1f}"),
        ("swapped step, per parameter", f"{per_param:.1f}"),
        ("swapping, per state tensor", f"{per_tensor:.1f}"),
        ("swapping, per batch", f"{per_batch:.0f}"),
    ]
    print_table(("", "us"), rows)
    finish(
        {
            "overhead_us_per_tensor": Ratio(per_tensor, 6.0),
            "overhead_us_per_batch": Ratio(per_batch, 150.0),
            "overhead_per_param_over_native": Ratio((per_param - native) / native, 3.0),
        },
        options.json,
    )


if __name__ == "__main__":
    main()
