"""The headline's page: what each stage gave, paired over the same items, with its interval."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script's module."""
    monkeypatch.syspath_prepend(REPO / "benchmarks" / "lib")
    return importlib.import_module("headline_parts")


def stage(path: str, outcomes: list[float], clusters: int) -> dict[str, Any]:
    return {"path": path, "outcomes": [(f"g{n}", value, f"c{n % clusters}") for n, value in enumerate(outcomes)]}


@pytest.mark.parametrize(("clusters", "graded"), [(134, False), (40, False), (134, True)])
def test_a_share_is_the_paired_difference_with_its_interval(parts: Any, clusters: int, graded: bool) -> None:
    won = 0.9 if graded else 1.0
    before = stage("output/sft", [won * (n % 3 == 0) for n in range(134)], clusters)
    after = stage("output/online", [won * (n % 3 != 1) for n in range(134)], clusters)
    told = parts.share(before, after)
    assert told["difference"] == pytest.approx(100 * won * 44 / 134, abs=0.01) and told["p_value"] < 0.001
    assert 15 < told["low"] < told["difference"] < told["high"] < 50
    none = parts.share(before, before)
    assert none["difference"] == 0 and none["low"] <= 0 <= none["high"]


def test_the_page_tells_each_stage_and_its_share(parts: Any) -> None:
    scores = {"base": {"score": 0.0}, "selected": {"score": 40.0, "path": "output/online", "n": 134}}
    stages = [
        {"path": "output/sft", "stage": "SFT", "score": 20.0},
        {"path": "output/online", "stage": "RL", "score": 40.0},
    ]
    shares = [
        {"from": "output/sft", "to": "output/online", "difference": 20.0, "low": 11.0, "high": 30.0, "p_value": 0.00012}
    ]
    facts = {
        "task": "alfworld", "agent": "a", "base_model": "m", "seed": 1, "smoke": False, "agent_s": 600.0, "calls_s": [660.0],
        "feedback_split": [], "run_id": "r", "date": "2026-11-30", "engine": None,
        "report_split": {**scores, "stages": stages, "shares": shares},
    }  # fmt: skip
    rows = [row for row in parts.page(facts).splitlines() if row.startswith("| after")]
    assert rows == [
        "| after SFT: output/sft | 20.0 |  |",
        "| after RL: output/online | 40.0 | +20.0 [+11.0, +30.0], p 0.0001 |",
    ]
