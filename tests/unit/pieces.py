"""The scripted experts' pieces, imported by name, and the tiny model."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
TINY = REPO / "templates" / "models" / "tiny"


@pytest.fixture(scope="module")
def piece() -> Iterator[Any]:
    """Imports a module of the experts' by name."""
    scripted = REPO / "templates" / "agents" / "scripted"
    before, sys.path[:0] = sys.path[:], [str(scripted), str(scripted / "learner")]

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    try:
        yield load
    finally:
        sys.path[:] = before
