"""See the package."""

from types import SimpleNamespace

UsageContext = SimpleNamespace(LLM_CLASS=1)
