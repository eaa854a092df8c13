"""The published schemas are current, and they and the records hold for what is shipped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from recordlist import RECORDS, named

from autorl_hpc.agents import load_agent
from autorl_hpc.files.layout import share
from autorl_hpc.files.reading import read_yaml
from autorl_hpc.records import experiment
from autorl_hpc.records.base import Strict, parse_record
from autorl_hpc.tasks.loader import load_task

REPO = Path(__file__).resolve().parents[2]
SCHEMAS = REPO / "docs" / "schemas"


def test_the_published_schemas_are_current(tmp_path: Path) -> None:
    """Run `bin/schemas` after a record was changed."""
    subprocess.run([sys.executable, REPO / "bin" / "schemas", tmp_path], check=True, capture_output=True)
    published, wanted = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (SCHEMAS, tmp_path))
    assert published == wanted and len(wanted) >= 40


@pytest.mark.parametrize("record", RECORDS, ids=named)
def test_the_schemas_describe_what_is_written(record: Strict) -> None:
    schema = json.loads((SCHEMAS / f"{named(record)}.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    value = record.model_dump(mode="json")
    validator.validate(value)
    assert not validator.is_valid({**value, "no_such_field": 1})
    if "schema_version" in value:
        assert not validator.is_valid({**value, "schema_version": 2})


@pytest.mark.parametrize("name", ["arithmetic", "gsm8k"])
def test_the_schemas_describe_the_shipped_tasks(name: str) -> None:
    schema = json.loads((SCHEMAS / "TaskFile.json").read_text())
    jsonschema.validate(read_yaml(load_task(name).folder / "task.yaml"), schema)


@pytest.mark.parametrize("path", sorted((REPO / "jobs").glob("*.yaml")), ids=lambda p: p.name)
def test_the_shipped_experiments_are_read(path: Path) -> None:
    spec = parse_record(experiment.ExperimentSpec, read_yaml(path), path)
    assert spec.budget.wall_clock_s > 0


@pytest.mark.parametrize(
    "path", sorted((share("templates") / "agents").glob("*/agent.yaml")), ids=lambda p: p.parent.name
)
def test_the_shipped_agents_are_read(path: Path) -> None:
    assert load_agent(path.parent.name).name == path.parent.name
