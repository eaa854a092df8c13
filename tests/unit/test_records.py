"""Records: what is written is read back, and a mistake is named by file and field."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from recordlist import EVALUATION, RECORDS, named

from autorl_hpc.errors import AutorlError
from autorl_hpc.records import canonical_json, driver, entries, experiment, readable_json
from autorl_hpc.records.base import NewerVersion, Strict, parse_record


@pytest.mark.parametrize("record", RECORDS, ids=named)
def test_what_is_written_is_read_back(record: Strict, tmp_path: Path) -> None:
    for data in (record.canonical(), readable_json(record.model_dump(mode="json"))):
        again = parse_record(type(record), json.loads(data), "file")
        assert again == record
        assert again.canonical() == record.canonical() and again.digest() == record.digest()


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


def test_durations() -> None:
    told = {
        90: 90.0,
        1.5: 1.5,
        "90": 90.0,
        "90s": 90.0,
        "20m": 1200.0,
        "1h30m": 5400.0,
        " 2 D ": 172800.0,
        "0.5h": 1800.0,
    }
    found = {text: experiment.Budget.model_validate({"wall_clock": text}).wall_clock_s for text in told}
    assert found == told


def test_what_tokens_cost() -> None:
    priced = driver.DriverSpec(kind="vllm", model="m", price_in=2.0, price_out=10.0, price_cached=0.5)
    assert priced.cost_usd(1_000_000, 100_000, 500_000) == 1.0 + 0.25 + 1.0
    assert priced.dearest_usd(1_000_000) == 10.0
    assert driver.DriverSpec(kind="vllm", model="m").cost_usd(1, 1) is None
    for half in ({"price_in": 2.0}, {"price_out": 2.0}):
        assert driver.DriverSpec(kind="vllm", model="m", **half).dearest_usd(1_000_000) is None
    assert driver.DriverSpec(kind="vllm", model="m", price_in=0, price_out=0).dearest_usd(1) == 0.0
