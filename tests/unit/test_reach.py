"""What a launch says about what graders must reach, and where no real score is possible."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from autorl_hpc.errors import AutorlError
from autorl_hpc.launch.expand import Cell, check_search, lines
from autorl_hpc.records.experiment import Budget, ExperimentSpec, JudgeSpec
from autorl_hpc.records.run import Science
from autorl_hpc.records.task import Recipe, Sampling
from autorl_hpc.states import Protocol

URL = "https://search.example/find?q={query}&k={key}"


def said(judge: str = "none", url: str | None = None, **options: Any) -> list[str]:
    """The lines for an experiment of two runs of one task."""
    recipe = Recipe(
        name="r", version=1, prompt="", scorer="s", scorer_version="1", sampling=Sampling(max_new_tokens=8),
        judge=judge, options=options,
    )  # type: ignore[arg-type]  # fmt: skip
    fields: dict[str, Any] = {"task": "dsqa", "agent": "a", "base_model": "m", "driver": "none", "mode": "free"}
    budget = Budget(wall_clock_s=60)
    cells = [
        Cell(
            Science(
                **fields, seed=seed, budget=budget, protocol=Protocol.TWO_SPLIT, recipe=recipe, splits={},
                base_model_content_hash="0" * 64,
            ),
            "0" * 64,
            "0" * 64,
        )
        for seed in (0, 1)
    ]  # fmt: skip
    spec = ExperimentSpec.model_validate(
        {
            "name": "e",
            "matrix": {"task": "dsqa", "agent": "a", "base_model": "m"},
            "budget": {"wall_clock": "1m"},
            **({"judge": {"url": url, "model": "j"}} if url else {}),
        }
    )
    return lines(spec, cells)


def test_a_task_of_staged_files_needs_nothing() -> None:
    assert said() == said(search="bm25", corpus_sha256="0" * 64) == []


def test_a_search_engine_is_named_with_its_date_once_a_task_and_without_query() -> None:
    (line,) = said(search="online", search_url=URL, search_date="2026-11")
    assert line.startswith("dsqa: graders ask the search engine at search.example (2026-11)")
    assert "no real score is possible offline" in line and "find" not in line


def test_a_replay_says_what_it_cant_score() -> None:
    (line,) = said(search="replay", search_url=URL, search_date="2026-11")
    assert "a model that asks what was not recorded gets no score" in line


def test_a_judge_is_named_with_its_host() -> None:
    (line,) = said("json", "http://node7:8000/v1", judge_model="j")
    assert line.startswith("dsqa: graders ask the judge j at node7:8000;")


@pytest.mark.parametrize("mode", ["discrete", "logprob", "json"])
def test_the_toy_judges_scores_are_called_no_scores(mode: str) -> None:
    (line,) = said(mode, judge_model=JudgeSpec.BUILTIN)
    assert line.endswith("is a toy, no judge: these are no real scores")


def recipe(**options: Any) -> Recipe:
    return Recipe(
        name="r",
        version=1,
        prompt="",
        scorer="s",
        scorer_version="1",
        sampling=Sampling(max_new_tokens=8),
        options=options,
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"search": "online"}, "search_url"),
        ({"search": "online", "search_url": URL}, "search_date"),
        ({"search": "replay", "search_url": URL}, "search_date"),
        (
            {"search": "online", "search_url": URL, "search_date": "d", "search_key_file": "/nowhere/key"},
            "No such file",
        ),
    ],
)
def test_an_engine_that_cant_be_asked_is_an_error_of_the_launch(options: dict[str, Any], words: str) -> None:
    with pytest.raises(AutorlError, match=f"field `matrix.task`: dsqa, recipe r: .*{words}"):
        check_search(recipe(**options), "dsqa", Path("job.yaml"))


def test_a_key_that_others_may_read_is_an_error_of_the_launch(tmp_path: Path) -> None:
    options = {"search": "online", "search_url": URL, "search_date": "d", "search_key_file": str(tmp_path / "key")}
    (tmp_path / "key").write_text("s3cr3t")
    os.chmod(tmp_path / "key", 0o604)
    with pytest.raises(AutorlError, match="chmod 600") as caught:
        check_search(recipe(**options), "dsqa", Path("job.yaml"))
    assert "s3cr3t" not in str(caught.value)
    os.chmod(tmp_path / "key", 0o600)
    check_search(recipe(**options), "dsqa", Path("job.yaml"))
    check_search(recipe(search="bm25"), "dsqa", Path("job.yaml"))
    check_search(recipe(), "dsqa", Path("job.yaml"))
