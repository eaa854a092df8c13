"""JSON Schemas of the records on disk, for readers in other languages. `bin/schemas` writes them to docs/schemas/."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autorl_hpc.records import cluster, driver, entries, exchange, experiment, recorded, run, task
from autorl_hpc.records.base import SCHEMA_VERSION, Record, Strict

DIALECT = "https://json-schema.org/draft/2020-12/schema"
MODULES = (cluster, driver, entries, exchange, experiment, run, task)


def files() -> Iterator[type[Strict]]:
    """Yield every record that is a file of its own, the body of each ledger entry, and each line type of the recorder."""
    for module in MODULES:
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Record) and value.__module__ == module.__name__:
                yield value
    yield from entries.BODIES.values()
    yield from recorded.RECORDED.values()


def schemas(*more: type[Strict]) -> dict[str, dict[str, Any]]:
    """The schema of each record by its name; `more`: records of packages above, such as `agents.AgentFile`."""
    found: dict[str, dict[str, Any]] = {}
    for model in (*files(), *more):
        schema = model.model_json_schema(mode="validation")
        found[model.__name__] = {"$schema": DIALECT, "x-schema-version": SCHEMA_VERSION, **schema}
    return found
