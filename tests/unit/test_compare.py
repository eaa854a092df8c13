"""Two measurements of one checkpoint: what is noise, and what is a claim that doesn't hold."""

from __future__ import annotations

import gzip
import json

import pytest

from autorl_hpc.evidence.rescore import Compared, compare
from autorl_hpc.evidence.verify import ItemRow, read_rows
from autorl_hpc.records.entries import Evaluation
from autorl_hpc.states import Fault, Split

HASH, OTHER = "a" * 64, "b" * 64


def evaluation(values: list[float] | None, engine: str = HASH, prompts: str | None = HASH) -> Evaluation:
    score = None if values is None else 100.0 * sum(values) / len(values)
    facts = {} if values is not None else {"fault": Fault.ARTIFACT, "reason": "it breaks the engine"}
    return Evaluation(
        split=Split.REPORT,
        content_hash=HASH,
        score=score,
        n=len(values or []),
        recipe_hash=HASH,
        engine_hash=engine,
        prompts_sha256=prompts,
        **facts,
    )


def rows(values: list[float], texts: str = "t") -> dict[str, ItemRow]:
    return {f"q{i}": ItemRow(f"q{i}", value, f"{texts}{i}") for i, value in enumerate(values)}


def solved(count: int, n: int = 200) -> list[float]:
    return [1.0] * count + [0.0] * (n - count)


def compared(
    claimed: list[float], here: list[float], *, texts: str = "u", engine: str = HASH, **more: object
) -> Compared:
    given: dict[str, object] = {"scorer": "gsm8k", "noise": 0.0, **more}
    return compare(  # type: ignore[arg-type]
        "selected", evaluation(claimed), rows(claimed), evaluation(here, engine), rows(here, texts), **given
    )


def test_the_same() -> None:
    found = compared(solved(80), solved(80), texts="t")
    assert (found.word, found.holds, found.difference, found.same_texts) == ("identical", True, 0.0, 200)


def test_a_claim_that_is_too_high() -> None:
    found = compared(solved(100), solved(80))
    assert found.word == "differs" and (found.up, found.down, found.difference) == (0, 20, -10.0)
    assert found.p_value is not None and found.p_value < 1e-5
    assert not compared(solved(60), solved(80)).holds  # nor one that is too low


def test_noise_is_what_chance_and_the_repeats_here_both_allow() -> None:
    moved = [0.0, 0.0, 0.0, *solved(82, 197)]  # three down, five up: one point
    assert compared(solved(80), moved, noise=1.0).word == "within noise"
    found = compared(solved(80), moved, noise=0.9)
    assert found.word == "differs" and "repeats here differ by 0.90 points only" in found.why
    assert compared(solved(80), solved(74), noise=3.0).word == "differs"  # six of six down: no chance
    assert compared(solved(80), solved(76), noise=2.0).word == "within noise"
    assert compared(solved(20, 20), solved(0, 20), noise=100.0).word == "differs"  # a repeat of 100 excuses nothing


def test_one_text_with_two_outcomes_is_no_noise() -> None:
    found = compared(solved(81), solved(80), texts="t")
    assert found.word == "differs" and found.same_text_other_outcome == 1 and "same text" in found.why
    assert compared(
        solved(81), solved(80), texts="t", scorer="humaneval", noise=0.5
    ).holds  # a program may run out of time


def test_an_engine_without_noise_explains_nothing() -> None:
    assert compared(solved(81), solved(80), reproducible=True, noise=9.0).word == "differs"
    claimed = compared(solved(81), solved(80), reproducible=True, noise=9.0, engine=OTHER)
    assert claimed.word == "differs", "the name of an engine is the bundle's own to choose"


def test_a_score_of_an_older_version_is_called_that_where_other_prompts_may_explain_it() -> None:
    """Else an honest run is accused, whose template wrote the day's date. Not where the answers show that prompts were equal."""

    def older(texts: str = "u", **more: object) -> Compared:
        given: dict[str, object] = {"scorer": "gsm8k", "noise": 0.0, **more}
        claimed, here = evaluation(solved(100), prompts=None), evaluation(solved(80))
        return compare("selected", claimed, rows(solved(100)), here, rows(solved(80), texts), **given)  # type: ignore[arg-type]

    assert (older().word, older().holds) == ("older version", False) and "no hash of its prompts" in older().why
    assert older(reproducible=True).word == "differs" and older(texts="t").word == "differs"
    claimed = evaluation(solved(80), prompts=OTHER)
    found = compare(
        "base", claimed, rows(solved(80)), evaluation(solved(80)), rows(solved(80)), scorer="gsm8k", noise=9.0
    )
    assert found.word == "differs" and "prompts asked here" in found.why


def test_other_items_and_no_scores() -> None:
    found = compare(
        "selected", evaluation([1.0, 1.0]), {}, evaluation([1.0, 1.0]), rows([1.0, 1.0]), scorer="gsm8k", noise=99.0
    )
    assert found.word == "differs" and "items" in found.why
    null = compare("selected", evaluation([1.0]), rows([1.0]), evaluation(None), {}, scorer="gsm8k", noise=99.0)
    assert (null.word, null.why, null.holds) == ("not scored", "it breaks the engine", False)
    assert null.as_dict()["difference"] is None and "not scored" in null.as_text()


def test_a_score_that_its_items_do_not_explain() -> None:
    claimed = evaluation(solved(80)).model_copy(update={"score": 55.0})
    found = compare(
        "base", claimed, rows(solved(80)), evaluation(solved(80)), rows(solved(80)), scorer="alpacaeval", noise=0.0
    )
    assert found.word == "differs"


@pytest.mark.parametrize("text", ["[]", '{"id": 1}', "{", "1", '{"id": "a", "outcome": "x", "output_sha256": ""}'])
def test_items_files_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not an items file"):
        read_rows("i.gz", gzip.compress(text.encode()))


def test_items_files() -> None:
    line = json.dumps({"id": "a", "outcome": 0.5, "output_sha256": "x", "tokens": 1})
    assert read_rows("i.gz", gzip.compress(line.encode())) == [ItemRow("a", 0.5, "x")]
