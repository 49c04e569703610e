"""Settings from a TOML file, the trainer's or one of its own, by the names of the configuration classes."""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

from swapckpt.config import CheckpointConfig, SwapConfig
from swapckpt.errors import ConfigError, listing

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ENABLED = "swap_optimizer"
TIMES = "swap_optimizer_times"
_PREFIX = "swap_optimizer_"


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What a TOML file says.

    Attributes:
        swap: How to swap; None when ``swap_optimizer`` is false or absent.
        checkpoint: How to save and load.
    """

    swap: SwapConfig | None
    checkpoint: CheckpointConfig


def load_settings(path: str | os.PathLike[str]) -> Settings:
    """Read the tables ``[optimizer]`` and ``[checkpoint]``; others are the trainer's.

    ``[optimizer]``: ``swap_optimizer`` turns swapping on, ``swap_optimizer_times`` is
    ``SwapConfig.swap_times``, and ``swap_optimizer_<field>`` any other field; keys that do not begin with
    ``swap`` are the trainer's. ``[checkpoint]``: the fields of ``CheckpointConfig``.

    Raises:
        ConfigError: The file is no TOML, a value is outside its range, or a key is unknown or stands in a
            table of nearly the right name; all are listed, with the nearest that exists.
        FileNotFoundError: There is no such file.
    """
    where = os.fspath(path)
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} is not TOML: {error}.") from error
    swap = _table(tables, "optimizer", where)
    ours = {key: value for key, value in swap.items() if key.startswith("swap")}
    checkpoint = _table(tables, "checkpoint", where)
    known = {
        "optimizer": {ENABLED, *map(_swap_key, _fields(SwapConfig))},
        "checkpoint": set(_fields(CheckpointConfig)),
    }
    unknown = [
        *_misspelt(tables, known),
        *_unknown("optimizer", ours, known["optimizer"]),
        *_unknown("checkpoint", checkpoint, known["checkpoint"]),
    ]
    if unknown:
        raise ConfigError(f"{where} has settings that do not exist:{listing(unknown)}")
    is_on = ours.pop(ENABLED, False)
    if not isinstance(is_on, bool):
        raise ConfigError(f"{where}: [optimizer] {ENABLED} must be true or false, got {is_on!r}.")
    by_field = {_swap_key(field): field for field in _fields(SwapConfig)}
    try:
        # Wrong types are found by the classes themselves, which check what they get.
        config = SwapConfig(**{by_field[key]: value for key, value in ours.items()})  # type: ignore[arg-type]
        return Settings(config if is_on else None, CheckpointConfig(**checkpoint))  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _table(tables: Mapping[str, object], name: str, where: str) -> dict[str, object]:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: {name} must be a table, got {table!r}.")
    return cast("dict[str, object]", table)


def _swap_key(field: str) -> str:
    return TIMES if field == "swap_times" else f"{_PREFIX}{field}"


def _fields(cls: type[SwapConfig | CheckpointConfig]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _misspelt(tables: Mapping[str, object], known: Mapping[str, set[str]]) -> list[str]:
    """Tables whose name and keys are nearly and exactly what would be read: nothing of them would be."""
    lines = []
    for name, table in tables.items():
        near = difflib.get_close_matches(name, known.keys() - tables.keys(), n=1, cutoff=0.8)
        if near and isinstance(table, dict) and not table.keys().isdisjoint(known[near[0]]):
            lines.append(f"[{name}], did you mean [{near[0]}]?")
    return lines


def _unknown(table: str, found: Iterable[str], known: set[str]) -> list[str]:
    lines = []
    for key in found:
        if key not in known:
            full = _swap_key(key) if key == "swap_times" else f"{_PREFIX}{key.removeprefix('swap_')}"
            near = [full] if full in known else difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f", did you mean {near[0]}?" if near else ""
            lines.append(f"[{table}] {key}{hint}")
    return lines
