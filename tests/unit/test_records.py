"""Records: what is written is read back, and a mistake is named by file and field."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from recordlist import EVALUATION, RECORDS, named

from autorl_hpc.agents import AgentFile
from autorl_hpc.errors import AutorlError
from autorl_hpc.records import canonical_json, driver, entries, exchange, experiment, readable_json
from autorl_hpc.records.base import NewerVersion, Strict, parse_record
from autorl_hpc.records.schemas import FILES


@pytest.mark.parametrize("record", RECORDS, ids=named)
def test_what_is_written_is_read_back(record: Strict, tmp_path: Path) -> None:
    for data in (record.canonical(), readable_json(record.model_dump(mode="json"))):
        again = parse_record(type(record), json.loads(data), "file")
        assert again == record
        assert again.canonical() == record.canonical() and again.digest() == record.digest()


def test_every_record_has_an_example_here() -> None:
    assert {type(record) for record in RECORDS} == {*FILES, AgentFile}


@pytest.mark.parametrize("record", RECORDS, ids=named)
def test_an_unknown_field_is_named_with_its_file_and_a_suggestion(record: Strict) -> None:
    value = record.model_dump(mode="json")
    known = sorted(value)[-1]
    misspelt = known[:-1] + "x" + known[-1]
    value[misspelt] = value.pop(known)
    with pytest.raises(AutorlError) as caught:
        parse_record(type(record), value, "the/file.json")
    assert caught.value.where == "the/file.json"
    assert f"field `{misspelt}`: unknown field; did you mean `{known}`?" in caught.value.what
    assert caught.value.next_step


@pytest.mark.parametrize("record", RECORDS, ids=named)
def test_each_missing_field_is_named(record: Strict) -> None:
    required = [name for name, field in type(record).model_fields.items() if field.is_required()]
    assert required or isinstance(record, entries.Contamination)
    for name in required:
        value = record.model_dump(mode="json")
        del value[name]
        with pytest.raises(AutorlError, match=f"field `{name}`: this field is missing"):
            parse_record(type(record), value, "file")


@pytest.mark.parametrize("value", [None, [], "text", 3, [1, 2]])
def test_a_file_that_holds_no_object_is_named_whole(value: Any) -> None:
    with pytest.raises(AutorlError, match=r"\(the whole file\)"):
        parse_record(exchange.Manifest, value, "file")


@pytest.mark.parametrize("record", [r for r in RECORDS if "schema_version" in type(r).model_fields], ids=named)
def test_a_newer_version_is_refused_politely(record: Strict) -> None:
    value = {**record.model_dump(mode="json"), "schema_version": 2, "field_of_the_future": 1}
    with pytest.raises(NewerVersion, match="newer autorl-hpc") as caught:
        parse_record(type(record), value, "the/file.json")
    assert caught.value.where == "the/file.json" and "newer autorl-hpc" in (caught.value.next_step or "")
    for wrong in ("2", 2.0, 0, -1):
        with pytest.raises(AutorlError, match="schema_version"):
            parse_record(type(record), {**record.model_dump(mode="json"), "schema_version": wrong}, "file")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_no_numbers(number: float) -> None:
    value = {**EVALUATION.model_dump(mode="json"), "score": number}
    with pytest.raises(AutorlError, match="field `score`"):
        parse_record(entries.Evaluation, value, "file")
    with pytest.raises(ValueError):
        canonical_json({"score": number})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90.0),
        (1.5, 1.5),
        ("90", 90.0),
        ("90s", 90.0),
        ("20m", 1200.0),
        ("1h30m", 5400.0),
        (" 2 D ", 172800.0),
        ("0.5h", 1800.0),
    ],
)
def test_durations(text: Any, seconds: float) -> None:
    assert experiment.Budget.model_validate({"wall_clock": text}).wall_clock_s == seconds


def test_the_last_grace_is_a_twentieth_of_the_wall_clock_at_most() -> None:
    assert experiment.Budget(wall_clock_s=60.0).last_grace_s == 3.0
    assert experiment.Budget(wall_clock="2h").last_grace_s == 60.0
    assert experiment.Budget(wall_clock="2h", grace=0).last_grace_s == 0.0


@pytest.mark.parametrize("value", [{"kind": "api", "url": "http://h/v1"}, {"kind": "vllm", "args": ["--dtype=half"]}])
def test_a_driver_is_read_back_with_its_defaults(value: dict[str, Any]) -> None:
    spec = driver.DriverSpec.model_validate({"model": "m", **value})
    assert driver.DriverSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_what_tokens_cost() -> None:
    priced = driver.DriverSpec(kind="vllm", model="m", price_in=2.0, price_out=10.0, price_cached=0.5)
    assert priced.cost_usd(1_000_000, 100_000, 500_000) == 1.0 + 0.25 + 1.0
    assert priced.dearest_usd(1_000_000) == 10.0
    assert driver.DriverSpec(kind="vllm", model="m").cost_usd(1, 1) is None
    for half in ({"price_in": 2.0}, {"price_out": 2.0}):
        assert driver.DriverSpec(kind="vllm", model="m", **half).dearest_usd(1_000_000) is None
    assert driver.DriverSpec(kind="vllm", model="m", price_in=0, price_out=0).dearest_usd(1) == 0.0
