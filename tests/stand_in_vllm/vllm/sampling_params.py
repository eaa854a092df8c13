"""See the package."""

from types import SimpleNamespace

RequestOutputKind = SimpleNamespace(FINAL_ONLY=2)
