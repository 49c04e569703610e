"""Optimizers of a user: own state dtypes, own group counters, own ``step``."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class Averaging(Optimizer):
    """Gradient descent on a moving average, kept in a dtype of its own; counts its steps in every group.

    ``count`` is an int and ``clock`` a tensor that is advanced in place; both decide the step's size.
    """

    def __init__(self, params: Any, lr: float = 0.1, state_dtype: torch.dtype = torch.float32) -> None:
        defaults = {"lr": lr, "state_dtype": state_dtype, "count": 0, "clock": torch.zeros(())}
        super().__init__(params, defaults)
        for group in self.param_groups:  # defaults are shared, a tensor must not be
            group["clock"] = group["clock"].clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["count"] += 1
            group["clock"] += 0.5
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["average"] = torch.zeros_like(param, dtype=group["state_dtype"])
                    state["seen"] = 0
                state["seen"] += 1
                state["average"].mul_(0.9).add_(param.grad.to(group["state_dtype"]), alpha=0.1)
                size = group["lr"] / (group["count"] + float(group["clock"]))
                param.add_(state["average"].to(param.dtype), alpha=-size)
        return loss


class Accumulating(Optimizer):
    """Adds up a norm over all parameters it steps: batches of them would see different sums."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "total": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param].setdefault("last", torch.zeros_like(param)).copy_(param.grad)
                    group["total"] += float(param.grad.norm())
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] / (1 + group["total"]))


class Replacing(Optimizer):
    """Puts new tensors in the place of its state: of the same form, of another form, None, or nothing."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                step = state["step"] = state.get("step", 0) + 1
                average = state.get("average")
                state["average"] = param.grad.clone() if average is None else 0.5 * average + param.grad
                state["window"] = torch.cat([param.grad.reshape(-1)] * (1 + step % 3))
                state["sometimes"] = param.grad.clone() if step % 2 else None
                if step % 3 == 0:
                    state.pop("rare", None)
                else:
                    state.setdefault("rare", torch.zeros_like(param)).add_(param.grad)
                rare = state.get("rare")
                param.add_(state["average"], alpha=-group["lr"])
                if rare is not None:
                    param.add_(rare, alpha=-group["lr"])
                if state["sometimes"] is not None:
                    param.add_(state["sometimes"], alpha=-group["lr"])
                param.add_(state["window"].mean(), alpha=-group["lr"])


class Exploding(torch.optim.AdamW):
    """AdamW that raises ``error`` when it is asked to step ``fuse``, after it has stepped the others."""

    fuse: Any = None
    error: BaseException = ArithmeticError("boom")
    leaves_something = False  # state that it has not had before

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        stepped = [param for group in self.param_groups for param in group["params"]]
        if any(param is self.fuse for param in stepped):
            for param in stepped if self.leaves_something else ():
                self.state[param]["extra"] = torch.zeros_like(param)
            raise self.error
        return loss


class Aliasing(Optimizer):
    """Keeps two names for one tensor, its parameter under a name of its own, and the last gradient itself."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["average"] = torch.zeros_like(param, memory_format=torch.contiguous_format)
                    state["flat"] = state["average"].view(-1)
                    state["weight"] = param.detach()
                    state["largest"] = torch.zeros_like(param)
                state["average"].add_(param.grad)
                state["last"] = param.grad
                torch.maximum(state["largest"], state["last"], out=state["largest"])
                param.add_(state["flat"].view_as(param), alpha=-group["lr"])
                param.add_(state["weight"].mean() + state["largest"], alpha=-group["lr"])
