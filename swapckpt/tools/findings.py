"""What ``doctor`` found out: one line each, and what to do where it is not well."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What was looked at.
        level: How bad it is.
        message: What was found.
        advice: What to do; empty where nothing is to be done.
    """

    name: str
    level: Level
    message: str
    advice: str = ""


def ok(name: str, message: str, advice: str = "") -> Finding:
    """All is well."""
    return Finding(name, Level.OK, message, advice)


def warning(name: str, message: str, advice: str) -> Finding:
    """It works, with a limit."""
    return Finding(name, Level.WARNING, message, advice)


def problem(name: str, message: str, advice: str) -> Finding:
    """It does not work."""
    return Finding(name, Level.PROBLEM, message, advice)
