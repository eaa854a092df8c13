"""The recorder's reading of the observer's files: hostile lines, secrets, limits, and that nothing is written twice."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from autorl_hpc.recorder.observed import MAX_KEYS, OBSERVED, PIECE_BYTES, Observed
from autorl_hpc.recorder.trainings import Points
from autorl_hpc.recorder.watch import Moment
from autorl_hpc.records.recorded import ObservedFact, TrainingPoint

AT = "2030-01-01T00:00:00.000+00:00"
AT_S = 1893456000.0
NOW = Moment(100.0, AT, 1)


def line(**changes: Any) -> str:
    return json.dumps({"pid": 7, "program": "t.py", "at_s": AT_S, "what": "seed", "facts": {"value": 3}, **changes})


class Workspace:
    def __init__(self, folder: Path, **limits: Any) -> None:
        self.folder, self.written, self.events = folder, folder / "observed.jsonl", folder / "events.jsonl"
        (folder / OBSERVED).mkdir()
        self.limits = limits

    def write(self, text: str | bytes, name: str = "7-1893456000.5.jsonl") -> None:
        with open(self.folder / OBSERVED / name, "ab") as file:
            file.write(text if isinstance(text, bytes) else text.encode())

    def watch(self) -> Observed:
        return Observed(self.folder, self.written, self.events, Points(self.folder / "training.jsonl"), **self.limits)

    def read(self) -> list[ObservedFact]:
        watch = self.watch()
        watch.look(NOW)
        watch.close(NOW)
        text = self.written.read_text() if self.written.exists() else ""
        return [ObservedFact.model_validate_json(each) for each in text.splitlines()]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def test_facts_have_the_time_at_which_their_process_told_them(workspace: Workspace) -> None:
    """A clock that is ahead, or one of 1970, gives no time after this look or before the run."""
    workspace.write("\n".join(line(at_s=AT_S + ahead) for ahead in (-30, 5000, -5000)) + "\n")
    assert [each.elapsed_s for each in workspace.read()] == [70.0, 100.0, 0.0]


@pytest.mark.parametrize(
    "bad",
    [
        "{", "[]", "null", '"x"', "[" * 50_000, "{}", line(what="score"), line(pid=-1), line(facts=[]),
        line(facts=None), "\x00\x1b[2J", "x" * (PIECE_BYTES + 9), '{"pid": ' + "9" * 5000 + "}",
    ],
)  # fmt: skip
def test_a_line_that_is_no_fact_is_left_out_and_the_next_is_read(workspace: Workspace, bad: str) -> None:
    workspace.write(bad + "\n" + line() + "\n" + line(what="memory")[:20])
    assert [each.facts for each in workspace.read()] == [{"value": 3}]


def test_facts_are_bounded_escaped_and_masked(workspace: Workspace) -> None:
    facts = {
        "argv": ["t.py", "--hub-token", "geheim1234", "--lr", "1"],
        "arguments": {"hub_token": "geheim1234", "pad_token": "<pad>", "note": "hf_" + "a" * 30, "lr": 0.5},
        "many": list(range(5000)), "deep": [[[[[[1]]]]]], "long": "y" * 9000, "escape": "\x1b[31mred\n", "big": 10**400,
        "nan": float("nan"), "bytes": "\udc80",
    }  # fmt: skip
    workspace.write(line(what="start", facts=facts, program="p\x1b" + "q" * 900) + "\n")
    (fact,) = workspace.read()
    text = workspace.written.read_text()
    assert "geheim" not in text and "hf_a" not in text and "\x1b" not in text and len(text) < 4000
    assert fact.facts["arguments"] == {"hub_token": "***", "pad_token": "<pad>", "note": "***", "lr": 0.5}
    assert len(fact.facts["many"]) == MAX_KEYS and fact.facts["nan"] is None  # type: ignore[arg-type]


def test_what_is_logged_by_a_trainer_or_to_tensorboard_is_a_training_step(workspace: Workspace) -> None:
    """Once, and none that another log tells too."""
    told = [
        {"train/loss": 0.5, "train/lr": 1e-5, "step": 7, "by": "tensorboard"},
        {"loss": 0.25, "step": 8, "by": None},
    ]
    workspace.write("".join(line(what="log", facts=facts, at_s=AT_S - n) + "\n" for n, facts in enumerate(told)))
    workspace.read()
    workspace.read()
    (point,) = map(TrainingPoint.model_validate_json, (workspace.folder / "training.jsonl").read_text().splitlines())
    assert (point.step, point.loss, point.learning_rate, point.source) == (
        7,
        0.5,
        1e-5,
        ".observed/7-1893456000.5.jsonl",
    )


def test_links_pipes_and_foreign_files_are_not_read(workspace: Workspace, tmp_path: Path) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_text(line() + "\n")
    os.symlink(secret, workspace.folder / OBSERVED / "1-1.jsonl")
    os.mkfifo(workspace.folder / OBSERVED / "2-1.jsonl")
    workspace.write(line() + "\n", "notes.jsonl")
    assert workspace.read() == []
    (workspace.folder / OBSERVED).rename(workspace.folder / "moved")
    os.symlink(workspace.folder / "moved", workspace.folder / OBSERVED)
    assert workspace.read() == []


def test_more_files_than_are_followed_are_told(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, max_files=3)
    for pid in range(5):
        workspace.write(line(pid=pid) + "\n", f"{pid}-1.jsonl")
    assert len(workspace.read()) == 3
    assert (
        '"observer_files_unread"' in workspace.events.read_text()
        and '"files":2' in workspace.events.read_text().replace(" ", "")
    )


def test_a_recorder_that_begins_again_writes_nothing_twice(workspace: Workspace) -> None:
    """Attempts share the workspace; a recorder that was killed left half a line."""
    workspace.write(line() + "\n")
    assert len(workspace.read()) == 1
    with open(workspace.written, "a") as file:
        file.write('{"elapsed_s": 1')
    workspace.write(line(at_s=AT_S + 0.5) + "\n")
    assert [each.at_s for each in workspace.read()] == [AT_S, AT_S + 0.5]
