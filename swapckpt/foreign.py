"""Optimizers that share state among ranks by themselves, and how a window on the full state drives them."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist

from swapckpt._torch import local_of, spec_for, wrap_local
from swapckpt.errors import PhaseError, listing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from swapckpt.ownership import Coordinate


_Binding = tuple["Tensor", "dict[str, object]", "dict[str, object] | None"]
"""Key and value of an optimizer's state, and what the value held if it is a mapping."""


class StateBroadcast(Protocol):
    """How an optimizer that keeps state on owners brings it to all ranks.

    Call sequence (every rank that holds the optimizer; the training thread, between steps):

    0. ``owns_state(param)`` at any time, without communication: exports and loads leave out the parameters of
       other owners.
    1. ``prepare()`` once per window, first. Ranks may communicate.
    2. A host tensor is bound in ``optimizer.state[param][key]`` for everything that ``prepare`` has named.
    3. ``publish()`` once per window, however often the state is exported in it: fills those tensors.
    4. The state is exported, any number of times.
    5. ``finish()`` once per window in which step 1 has begun, also after a failure in 1 to 4. Then what
       ``optimizer.state`` held before step 2 is bound again, whether or not ``finish`` failed.
    """

    def owns_state(self, param: Tensor) -> bool:
        """True on the ranks that keep the state of ``param``."""
        ...

    def prepare(self) -> Mapping[Tensor, Mapping[str, torch.dtype]]:
        """What this rank is going to receive: per parameter the keys and their dtypes at the owner.

        Tensors have the local shape of the parameter.
        """
        ...

    def publish(self) -> None:
        """Bring the state from its owners into the tensors that are bound."""
        ...

    def finish(self) -> None:
        """The window closes: drop what was received."""
        ...


Info = tuple[tuple[int, ...], tuple["dist.ProcessGroup | None", ...]]


class _FusedOptimizer(Protocol):
    _param_to_broadcast_info: Mapping[Tensor, Info]
    _state_keys_for_checkpoint_broadcast: Sequence[str] | Callable[[], Sequence[str]]
    state: Mapping[Tensor, Mapping[str, object]]

    def _broadcast_state_fused_for_ckpt(self) -> None: ...

    def cleanup_synced_state(self) -> None: ...


_NAMES = (
    "_param_to_broadcast_info",
    "_state_keys_for_checkpoint_broadcast",
    "_broadcast_state_fused_for_ckpt",
    "cleanup_synced_state",
)


class FusedBroadcast:
    """A ``StateBroadcast`` for optimizers with ``_broadcast_state_fused_for_ckpt`` and its companions.

    ``_param_to_broadcast_info`` has, per parameter, the coordinate of the owner and the process groups of the
    replicate dimensions; ``_state_keys_for_checkpoint_broadcast`` are the keys that travel, or a function
    that gives them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = cast("_FusedOptimizer", optimizer)

    @staticmethod
    def fits(optimizer: Optimizer) -> bool:
        """True for an optimizer of this kind."""
        return all(hasattr(optimizer, name) for name in _NAMES)

    def owns_state(self, param: Tensor) -> bool:
        """True at the coordinate that the optimizer has for ``param``, and for parameters it has none for."""
        info = self._optimizer._param_to_broadcast_info.get(param)  # noqa: SLF001 - what the adapter is for
        return info is None or _here(info) == info[0]

    def prepare(self) -> dict[Tensor, dict[str, torch.dtype]]:
        """The owners' dtypes, which the tensors of all ranks must have for one broadcast to fill them.

        Raises:
            PhaseError: State that should travel does not exist yet. Every rank finds it out.
        """
        infos = self._optimizer._param_to_broadcast_info  # noqa: SLF001
        dtypes: dict[int, dict[str, torch.dtype]] = {}
        for groups in dict.fromkeys(groups for _, groups in infos.values()):
            mine = {
                position: self._dtypes(param)
                for position, (param, info) in enumerate(infos.items())
                if info[1] == groups and _here(info) == info[0]
            }
            for group in groups:
                if group is not None:
                    parts: list[dict[int, dict[str, torch.dtype]]] = [{}] * dist.get_world_size(group)
                    dist.all_gather_object(parts, mine, group=group)
                    mine = {position: each for part in parts for position, each in part.items()}
            dtypes |= mine
        missing = [
            f"parameter {position}: {key}"
            for position in range(len(infos))
            for key in self._keys()
            if key not in dtypes.get(position, {})
        ]
        if missing:
            msg = f"There is no full state before the first step; its owner does not have:{listing(missing)}"
            raise PhaseError(msg)
        return {param: dtypes[position] for position, param in enumerate(infos) if not self.owns_state(param)}

    def publish(self) -> None:
        """Call the optimizer's own broadcast."""
        self._optimizer._broadcast_state_fused_for_ckpt()  # noqa: SLF001

    def finish(self) -> None:
        """Let the optimizer drop what it does not own."""
        self._optimizer.cleanup_synced_state()

    def _keys(self) -> Sequence[str]:
        keys = self._optimizer._state_keys_for_checkpoint_broadcast  # noqa: SLF001
        return keys() if callable(keys) else keys

    def _dtypes(self, param: Tensor) -> dict[str, torch.dtype]:
        values = self._optimizer.state.get(param, {})
        return {
            key: value.dtype for key in self._keys() if isinstance(value := values.get(key), torch.Tensor)
        }


def _here(info: Info) -> Coordinate:
    return tuple(-1 if group is None else dist.get_rank(group) for group in info[1])


@contextmanager
def published(optimizer: Optimizer, broadcast: StateBroadcast) -> Iterator[dict[Tensor, dict[str, object]]]:
    """A window in which ``optimizer.state`` holds the state of all ranks. Yields what was received.

    Failing anywhere leaves ``optimizer.state`` as it was before.
    """
    with ExitStack() as stack:
        before = [
            (key, values, dict(values) if isinstance(values, dict) else None)
            for key, values in optimizer.state.items()
        ]
        stack.callback(_restore, optimizer, before)
        stack.callback(broadcast.finish)
        received: dict[Tensor, dict[str, object]] = {}
        for param, dtypes in broadcast.prepare().items():
            shape = local_of(param).shape
            received[param] = {
                key: wrap_local(torch.empty(shape, dtype=dtype, device="cpu"), spec_for(param, dtype))
                for key, dtype in dtypes.items()
            }
            optimizer.state[param] = {**optimizer.state.get(param, {}), **received[param]}
        broadcast.publish()
        yield {param: dict(optimizer.state[param]) for param in received}


def _restore(optimizer: Optimizer, before: Sequence[_Binding]) -> None:
    optimizer.state.clear()
    for key, values, content in before:
        if content is not None:  # in the same mapping: who holds it goes on seeing the state
            values.clear()
            values.update(content)
        optimizer.state[key] = values
