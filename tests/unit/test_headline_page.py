"""The headline's page: the shares of SFT and of RL are told where one engine gave both scores."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from autorl_hpc.records.entries import Evaluation
from autorl_hpc.states import Split

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script's module."""
    monkeypatch.syspath_prepend(REPO / "benchmarks" / "lib")
    return importlib.import_module("headline_parts")


def facts() -> dict[str, Any]:
    """Of a kept result, which knew nothing of engines yet."""
    made: dict[str, Any] = json.loads((REPO / "docs" / "results" / "alfworld-2026-11-28" / "headline.json").read_text())
    return made


@pytest.mark.parametrize("same", [None, True, False])
def test_shares_are_told_of_one_engine_alone(parts: Any, same: bool | None) -> None:
    given = facts()
    if same is not None:
        given["report_split"]["after_sft"]["same_engine"] = same
    text = parts.page(given)
    rows = [row for row in text.splitlines() if row.startswith(("| after SFT", "| selected"))]
    told = [row.rsplit("|", 2)[1].strip() for row in rows]
    assert (told == ["", ""]) is (same is False) and ("another engine" in rows[0]) is (same is False)
    if same is not False:
        assert text == (REPO / "docs" / "results" / "alfworld-2026-11-28" / "headline.md").read_text()


def test_engines_are_told_apart_by_their_hash(parts: Any) -> None:
    def scored(engine: str) -> Evaluation:
        hashes = {"content_hash": "a" * 64, "recipe_hash": "b" * 64, "engine_hash": engine * 64}
        return Evaluation.model_validate({"split": Split.REPORT, "score": 50.0, **hashes})

    assert parts._same_engine(scored("c"), scored("c"))
    assert not parts._same_engine(scored("c"), scored("d")) and not parts._same_engine(None, scored("d"))
