"""The two layouts of optimizer state in stock torch: written from state views, checked and read into them.

Nested: ``state`` by FQN and key, ``param_groups`` as a list. Flat: ``state.{fqn}.{key}`` and
``param_groups.{fqn}.{field}``; what belongs to a group is repeated for each of its parameters, so a group
without parameters is not in it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from swapckpt.errors import SchemaError, ShardError, listing
from swapckpt.planner import PartOfState
from swapckpt.statedict import overwrite

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from swapckpt.statedict import StateView, Values

_NOT_SETTINGS = ("params", "param_names")


def nested_layout(views: Iterable[StateView]) -> dict[str, object]:
    """The layout of stock ``get_optimizer_state_dict``: ``state`` by FQN, ``param_groups`` as a list."""
    views = list(views)
    state: dict[str, Values] = {}
    groups: list[dict[str, object]] = []
    for view in views:
        for _, param in view.params():
            values = view.values(param)
            if values:
                state[view.name(param)] = dict(values)
        state |= {view.name(param): dict(values) for param, values in view.received.items()}
        for group in view.optimizer.param_groups:
            fields = {key: value for key, value in group.items() if key != "params"}
            groups.append({**fields, "params": [view.name(param) for param in group["params"]]})
    return _as_part({"state": state, "param_groups": groups}, views)


def flat_layout(views: Iterable[StateView]) -> dict[str, object]:
    """Stock's flattened layout: ``state.{fqn}.{key}`` and ``param_groups.{fqn}.{field}``."""
    views = list(views)
    flat: dict[str, object] = {}
    for view in views:
        for group, param in view.params():
            name = view.name(param)
            flat |= {f"state.{name}.{key}": value for key, value in view.values(param).items()}
            flat |= _flat_fields(view, group, param)
        for group, param in view.elsewhere():  # settings are known to all ranks
            received = view.received.get(param, {})
            flat |= {f"state.{view.name(param)}.{key}": value for key, value in received.items()}
            flat |= _flat_fields(view, group, param)
    return _as_part(flat, views)


def _flat_fields(view: StateView, group: int, param: Tensor) -> dict[str, object]:
    fields = view.optimizer.param_groups[group].items()
    return {f"param_groups.{view.name(param)}.{key}": value for key, value in fields if key != "params"}


def _as_part(layout: dict[str, object], views: Iterable[StateView]) -> dict[str, object]:
    """``layout``, marked as a part where other ranks hold the rest."""
    names = {
        alias
        for view in views
        for _, param in view.elsewhere()
        if param not in view.received
        for alias in view.names[param]
    }
    return PartOfState(layout, elsewhere=names) if names else layout


def _require_form(state_dict: object) -> None:
    """Raise SchemaError about a state dict whose parts are not even of the right types.

    Raises:
        SchemaError: Lists every part that is not.
    """
    if not isinstance(state_dict, Mapping) or not all(isinstance(key, str) for key in state_dict):
        msg = f"Expected a state dict with strings as keys, found {type(state_dict).__name__}."
        raise SchemaError(msg)
    problems = []
    state, groups = state_dict.get("state"), state_dict.get("param_groups")
    if isinstance(state, Mapping) != isinstance(groups, list):
        wrong = "'param_groups' is not a list" if isinstance(state, Mapping) else "'state' is not a mapping"
        problems.append(f"'state' and 'param_groups' come together; {wrong}")
    for name, values in state.items() if isinstance(state, Mapping) else ():
        if not isinstance(values, Mapping):
            problems.append(f"state of {name!r}: expected a mapping, found {type(values).__name__}")
    for index, group in enumerate(groups) if isinstance(groups, list) else ():
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list):
            problems.append(f"param_groups[{index}]: expected a mapping with a list of 'params'")
    if problems:
        msg = f"This is not a state dict of an optimizer:{listing(problems)}"
        raise SchemaError(msg)


class Incoming:
    """A state dict sorted by parameter. What belongs to no parameter is collected as a problem.

    ``fields`` are the settings of each parameter's group; None when somebody else restores them.
    """

    def __init__(self, views: Sequence[StateView], *, with_fields: bool = True) -> None:
        self._views = views
        self.state: dict[Tensor, Values] = {}
        self.fields: dict[Tensor, dict[str, object]] | None = {} if with_fields else None
        self.fields_of_empty: list[dict[str, object]] = []  # groups without parameters, in order
        self.problems: list[str] = []

    @classmethod
    def from_layout(cls, state_dict: Mapping[str, object], views: Sequence[StateView]) -> Incoming:
        """Read the nested or the flat layout; any alias of a tied parameter is accepted."""
        incoming = cls(views)
        _require_form(state_dict)
        params = {
            alias: param
            for view in views
            for _, param in (*view.params(), *view.elsewhere())
            for alias in view.names[param]
        }
        state, groups = state_dict.get("state"), state_dict.get("param_groups")
        if isinstance(state, dict) and isinstance(groups, list):
            incoming._read_nested(state, groups, params)
        else:
            incoming._read_flat(state_dict, params)
        return incoming

    @classmethod
    def from_positions(cls, state_dict: Mapping[str, object], view: StateView) -> Incoming:
        """Read torch's own layout, in which parameters are matched by their position in the groups."""
        incoming = cls([view], with_fields=False)
        _require_form(state_dict)
        state, groups = state_dict.get("state"), state_dict.get("param_groups")
        if not isinstance(state, dict) or not isinstance(groups, list):
            msg = f"Expected a state dict with 'state' and 'param_groups', found {sorted(state_dict)}."
            raise SchemaError(msg)
        theirs = [len(group["params"]) for group in groups]
        ours = [len(group["params"]) for group in view.optimizer.param_groups]
        if theirs != ours:
            msg = f"Expected groups of {ours} parameters, found groups of {theirs} in the state dict."
            raise SchemaError(msg)
        ids = [name for group in groups for name in group["params"]]
        live = [param for group in view.optimizer.param_groups for param in group["params"]]
        params = dict(zip(ids, live, strict=True))
        for name, values in state.items():
            if name in params:
                incoming.state[params[name]] = values
            else:
                incoming.problems.append(f"state of parameter {name!r}: in none of the groups")
        return incoming

    def _read_nested(
        self,
        state: Mapping[str, Values],
        groups: Sequence[Mapping[str, object]],
        params: Mapping[str, Tensor],
    ) -> None:
        for name, values in state.items():
            if name in params:
                self.state.setdefault(params[name], {}).update(values)
            else:
                self.problems.append(f"{name}: unexpected, no optimizer holds this parameter")
        fields_by_param: dict[Tensor, dict[str, object]] = {}
        for group in groups:
            fields = {key: value for key, value in group.items() if key not in _NOT_SETTINGS}
            names = group["params"]
            if not isinstance(names, list) or not names:
                self.fields_of_empty.append(fields)
                continue
            fields_by_param |= {params[name]: fields for name in names if name in params}
        self.fields = fields_by_param

    def _read_flat(self, flat: Mapping[str, object], params: Mapping[str, Tensor]) -> None:
        fields: dict[Tensor, dict[str, object]] = {}
        for key, value in flat.items():
            kind, _, rest = key.partition(".")
            name, field = _split(rest, params)
            if kind not in ("state", "param_groups") or name is None:
                self.problems.append(f"{key}: unexpected, not state.<fqn>.<key> of a known parameter")
            elif kind == "state":
                self.state.setdefault(params[name], {})[field] = value
            elif field not in _NOT_SETTINGS:
                fields.setdefault(params[name], {})[field] = value
        self.fields = fields

    def _group_problems(self, view: StateView, *, allow_missing: bool) -> Iterator[str]:
        """Groups whose parameters are spread over groups with other settings in the state dict."""
        if self.fields is None:
            return
        for group in view.optimizer.param_groups:
            found = {view.name(param): self.fields.get(param) for param in group["params"]}
            missing = sorted(name for name, fields in found.items() if fields is None)
            known = [fields for fields in found.values() if fields is not None]
            if missing and not allow_missing:
                yield f"param_groups: no settings for {missing}"
            elif any(not _equal_fields(fields, known[0]) for fields in known):
                yield f"param_groups: {sorted(found)} are one group here, but have different settings"

    def check(self, *, allow_missing: bool) -> None:
        """Raise unless everything fits.

        Raises:
            ShardError: A plain tensor stands for a sharded parameter.
            SchemaError: Anything else; lists all problems.
        """
        problems = list(self.problems)
        for view in self._views:
            problems += view.problems(self.state, allow_missing=allow_missing)
            problems += self._group_problems(view, allow_missing=allow_missing)
        if not problems:
            return
        kind = ShardError if all("expected a DTensor" in line for line in problems) else SchemaError
        msg = f"The state dict does not fit the optimizer ({len(problems)} problems):{listing(problems)}"
        raise kind(msg)

    def restore(self) -> None:
        """Write state and group fields. ``check`` has passed."""
        for view in self._views:
            own = {param: self.state[param] for _, param in view.params() if param in self.state}
            view.restore(own)
        for group, fields in self._settings():
            for key, value in fields.items():
                group[key] = overwrite(group.get(key), copy.deepcopy(value))

    def _settings(self) -> Iterator[tuple[dict[str, object], dict[str, object]]]:
        """Live groups with the settings they get. Groups without parameters pair up in order, all or none."""
        if self.fields is None:
            return
        groups = [group for view in self._views for group in view.optimizer.param_groups]
        for group in groups:
            known = (self.fields[param] for param in group["params"] if param in self.fields)
            yield group, next(known, {})
        empty = [group for group in groups if not group["params"]]
        if len(empty) == len(self.fields_of_empty):
            yield from zip(empty, self.fields_of_empty, strict=True)


def _split(rest: str, names: Mapping[str, Tensor]) -> tuple[str | None, str]:
    """The longest known parameter name that ``rest`` begins with, and what follows it."""
    name = rest
    while "." in name:
        name = name.rpartition(".")[0]
        if name in names:
            return name, rest[len(name) + 1 :]
    return None, rest


def _equal_fields(first: dict[str, object], second: dict[str, object]) -> bool:
    if first is second:
        return True
    if first.keys() != second.keys():
        return False
    return all(
        torch.equal(value, other)
        if isinstance(value, torch.Tensor) and isinstance(other := second[key], torch.Tensor)
        else value == second[key]
        for key, value in first.items()
    )
