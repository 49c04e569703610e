"""Failures of inherited suites show their values."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("swapckpt.testing.suites")
