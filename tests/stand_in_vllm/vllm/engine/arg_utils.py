"""See the package."""

from types import SimpleNamespace

EngineArgs = SimpleNamespace
