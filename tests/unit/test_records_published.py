"""The published schemas are current, and they and the records hold for what is shipped."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from recordlist import RECORDS, named

from autorl_hpc.agents import load_agent
from autorl_hpc.files.layout import share
from autorl_hpc.files.reading import read_yaml
from autorl_hpc.records import experiment
from autorl_hpc.records.base import Strict, parse_record

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


def test_editors_take_what_is_shipped_as_users_write_it() -> None:
    """Catches schemas that only know `wall_clock_s: 1200.0` and lists of one: an editor underlined every example."""
    named_by = re.compile(r"# yaml-language-server: \$schema=(\S+)")
    shipped = [*(REPO / "jobs").rglob("*.yaml"), *(REPO / "docs" / "examples").rglob("*.yaml")]
    schema_of = {path: (path.parent / named_by.findall(path.read_text())[0]).resolve() for path in shipped}
    schema_of |= dict.fromkeys((REPO / "tasks").glob("*/task.yaml"), SCHEMAS / "TaskFile.json")
    schema_of |= dict.fromkeys((REPO / "templates" / "agents").glob("*/agent.yaml"), SCHEMAS / "AgentFile.json")
    assert len(schema_of) > 40
    for path, schema in schema_of.items():
        jsonschema.validate(yaml.safe_load(path.read_text()), json.loads(schema.read_text()))
    for wrong in ({"budget": {"wallclock": "5m"}}, {"budget": {}}, {"parallel": "many"}):
        given = {"name": "x", "matrix": {"task": "t", "agent": "a", "base_model": "m"}, "budget": {"wall_clock": "5m"}}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**given, **wrong}, json.loads((SCHEMAS / "ExperimentSpec.json").read_text()))


@pytest.mark.parametrize("path", sorted((REPO / "jobs").glob("*.yaml")), ids=lambda p: p.name)
def test_the_shipped_experiments_are_read(path: Path) -> None:
    spec = parse_record(experiment.ExperimentSpec, read_yaml(path), path)
    assert spec.budget.wall_clock_s > 0


@pytest.mark.parametrize(
    "path", sorted((share("templates") / "agents").glob("*/agent.yaml")), ids=lambda p: p.parent.name
)
def test_the_shipped_agents_are_read(path: Path) -> None:
    assert load_agent(path.parent.name).name == path.parent.name
