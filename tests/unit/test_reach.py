"""What a launch says about what graders must reach, and where no real score is possible."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from autorl_hpc.errors import AutorlError
from autorl_hpc.launch.expand import check_search
from autorl_hpc.records.task import Recipe, Sampling

URL = "https://search.example/find?q={query}&k={key}"


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
