"""mini through the real loop: a scripted driver has it write training code, train the tiny model for real, submit, read the score, end
too early, be prompted again, improve, forget to submit, and use up its tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from driver_server import Conversation, DriverServer, Turn
from helpers import PATIENCE_S, VARIANTS, Cluster, wait_for
from miniparts import parts
from miniturns import DONE, TRAIN, say, score_in

from autorl_hpc.files.run_view import RunView
from autorl_hpc.recorder.traces.totals import add_up
from autorl_hpc.records.entries import Submission
from autorl_hpc.records.recorded import TraceEvent
from autorl_hpc.states import EndedBy

parts()

KEY = "the-real-key"
TOKENS_IN, TOKENS_OUT, CALLS = 3000, 100, 8
LAST_OUT = 30_000
"""Of the last answer: no gateway can foresee it, so the tokens are used up after it, and not refused before it."""


def engineer(conversation: Conversation) -> Turn:
    """Answers from what it reads alone: one that goes on after an interruption gets the turn that it would have got."""
    turn, last = conversation.turns, conversation.last
    if turn == 0:
        made = say("cat description.md run_meta.json; ls data; ./time", "I look at what is here.")
    elif turn == 1:
        made = say(TRAIN, "Supervised fine-tuning on the demonstrations first.")
    elif turn == 2:
        made = say(
            'python3 code/train.py "$MODEL_PATH" output/v1 20 "$MODEL_PATH" > output/v1.log 2>&1 & '
            "wait; tail -n 2 output/v1.log; ./submit output/v1 --wait --note 'sft, 20 steps'",
            "A short training, submitted early.",
        )
    elif turn == 3:
        made = say(DONE, f"That scored {score_in(last)}: enough.")
    elif turn == 4:
        assert "You ended your work before your budget was used" in last, last
        made = say(
            'python3 code/train.py output/v1 output/v2 30 "$MODEL_PATH" && ./submit output/v2 --wait',
            "Then I train on from it.",
        )
    elif turn == 5:
        assert score_in(last) is not None, last
        made = say(
            VARIANTS.replace('os.environ["MODEL_PATH"]', '"output/v2"') + "variants 3 1; ls output",
            f"Now {score_in(last)}. I make another one and forget to submit it.",
        )
    else:
        made = say("sleep 1; date", "I wait for nothing, until the tokens are used up.")
    return replace(made, tokens_in=TOKENS_IN, tokens_out=LAST_OUT if turn == CALLS - 1 else TOKENS_OUT)


def experiment(driver: DriverServer, folder: Path) -> dict[str, Any]:
    """The story's fields of an experiment."""
    key = folder / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    told = {"kind": "api", "url": driver.url, "model": "scripted", "key_file": str(key), "context_tokens": 16_000}
    return {
        "matrix": {"task": "mini", "driver": "scripted"},
        "drivers": {"scripted": told},
        "budget": {"wall_clock": "20m", "tokens": 40_000},
        "reprompts": 1,
        "sandbox": {"level": "auto"},
    }


def assert_told(cluster: Cluster, run_id: str) -> None:
    """The run went as the story says, and the record tells it so."""
    log = cluster.run_dir(run_id).agent_log.read_text()
    view = cluster.view(run_id)
    assert view.sealed is not None and view.sealed.ended_by is EndedBy.TOKENS, log[-4000:]
    assert [each.model_path for each in view.submissions.values()] == ["output/v1", "output/v2", "output/v3"]
    assert view.sealed.reprompts == 1 and view.sealed.exit_codes[-1] == 0
    scores = [_score(view, each) for each in view.submissions.values()]
    base = next(answer["baseline_score"] for answer in cluster.answers(run_id) if answer["baseline_score"] is not None)
    assert min(scores) > base + 10.0, (base, scores)

    lines = cluster.run_dir(run_id).recorded("trace").read_text().splitlines()
    events = [TraceEvent.model_validate_json(line) for line in lines]
    totals = add_up(events)
    told = (totals.tokens_in, totals.tokens_out, totals.driver_calls, totals.tool_calls)
    assert told == (CALLS * TOKENS_IN, (CALLS - 1) * TOKENS_OUT + LAST_OUT, CALLS, CALLS), "as the driver counted them"
    assert view.sealed.driver is not None and view.sealed.driver.tokens_in == CALLS * TOKENS_IN
    assert totals.sessions == 1 and all(event.kind != "error" for event in events), (
        "the same conversation over all starts"
    )
    assert "You had ended your work here." in log and KEY not in log


def _score(view: RunView, submission: Submission) -> float:
    score = view.score_of(submission)
    assert score is not None and score.evaluation.score is not None
    return score.evaluation.score


@pytest.mark.timeout(1500)
def test_it_trains_submits_reads_improves_and_ends(cluster: Cluster, tmp_path: Path) -> None:
    """Ended early and reprompted, it goes on with its conversation; when its tokens are used up, it submits what it forgot."""
    cluster.mini_task(60, max_new_tokens=32)
    with DriverServer(engineer, key=KEY, model="scripted") as driver:
        (run_id,) = cluster.prepare(["mini"], grader={"idle_exit_s": 900}, **experiment(driver, tmp_path))
        cluster.grader()
        assert cluster.supervisor(run_id).wait(PATIENCE_S) == 0, cluster.logs()
        wait_for(lambda: cluster.finished([run_id]), what="the run's end")
    assert_told(cluster, run_id)
