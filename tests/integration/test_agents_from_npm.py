"""claude-code, codex and openhands, the real programs, through the whole loop: launch, sandbox, gateway, a scripted driver, a grader, the end.

Each trains nothing, but submits by its own tools (and goes on: Codex looks away from a command after 10 s), ends early, is asked to go on, remembers, submits again, and ends.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from driver_server import ASIDE, DriverServer
from driver_wire import Call, Conversation, Turn
from helpers import VARIANTS, Cluster, wait_for
from npm_agents import folder_of, installed, readable

from autorl_hpc.files import reading

KEY = "the-providers-real-key-0123456789"
MODEL = "scripted-1"
GO_ON = "as you left it"
"""Words of the reprompt."""


def done(step: int) -> str:
    """A line that a command's output has and its text doesn't."""
    return f"printf 'STEP-%s-DONE\\n' {step}"  # no substitution: Gemini CLI refuses those


def driver(conversation: Conversation) -> Turn:
    """Holds no state: what was done stands in the conversation."""
    text = conversation.text
    if not conversation.tools:
        return ASIDE
    if "STEP-1-DONE" not in text:
        return Turn(run=f"env > code/env.txt; tr '\\0' ' ' < /proc/$PPID/cmdline > code/argv.txt; {done(1)}")
    if "STEP-2-DONE" not in text:
        return Turn(run=f"{VARIANTS}\nvariants 0 1\npython3 ./submit output/v0; {done(2)}")
    if GO_ON not in text:
        return Turn("I think that this is good enough.")
    if "STEP-3-DONE" not in text:
        return Turn(run=f"{VARIANTS}\nvariants 1 1\npython3 ./submit output/v1; {done(3)}")
    return Turn("Nothing better comes to my mind.")


@pytest.mark.parametrize("agent", ["claude-code", "codex", "openhands"])
@pytest.mark.soak
def test_a_real_program_runs_to_the_end_of_a_run(
    cluster: Cluster, agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(agent)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    cluster.mini_task()
    with DriverServer(driver, key=KEY, model=MODEL) as server:
        job = cluster.spec(
            [agent],
            matrix={"task": "mini", "driver": "scripted"},
            drivers={"scripted": {"kind": "api", "url": server.url, "model": MODEL, "key_file": str(key)}},
            sandbox={"level": "auto", "readable": readable(agent)},
            reprompts=1,
        )
        dry = cluster.run("launch", str(job), "--root", str(cluster.root.path), "--dry-run").stdout
        assert f"agent {agent}: ok: {folder}/" in dry, dry
        cluster.run("launch", str(job), "--root", str(cluster.root.path))
        cluster.run("status", str(cluster.experiment.path), "--watch")
        asked = server.conversations
    (run_id,) = [name for name in os.listdir(cluster.experiment.path) if name.startswith(f"mini-{agent}-")]
    run, view = cluster.run_dir(run_id), cluster.view(run_id)
    said = reading.read_bytes(run.agent_log).decode(errors="replace")[-3000:]
    assert view.sealed is not None, said
    assert str(view.sealed.ended_by) == "agent_exit", said
    assert view.sealed.reprompts == 1
    assert view.closed is not None and len(view.contents()) == 2, said
    scores = [view.score_of(submission) for submission in view.accepted()]
    assert all(score is not None and score.evaluation.score is not None for score in scores), scores
    # Its session went on: the first words are still in the last request.
    assert (
        GO_ON in asked[-1].text
        and "STEP-1-DONE" in asked[-1].text
        and "Your task: improve the base model" in asked[-1].text
    )
    # The driver's key is nowhere inside, and the prompt on no command line.
    workspace = cluster.workspace(run_id)
    env = (workspace / "code" / "env.txt").read_text()
    assert f"AUTORL_DRIVER_MODEL={MODEL}" in env and KEY not in env
    assert "improve the base model" not in (workspace / "code" / "argv.txt").read_text()
    # What it used is known by the gateway, and what it tells of itself is understood.
    lines = [json.loads(line) for line in (run.path / "driver.jsonl").read_text().splitlines()]
    calls = [line for line in lines if not line["under_way"]]
    answered = [call for call in calls if call["tokens_out"]]  # claude-code also asks whether anybody is there
    assert len(answered) == len(asked), calls
    assert all(call["status"] == 200 and call["tokens_in"] > 0 for call in answered), calls
    trace = [json.loads(line) for line in (run.logs / "trace.jsonl").read_text().splitlines()]
    assert {event.get("format") for event in trace} >= {agent}, trace[:3]


TRAINING_S = 660


def trains_in_the_background(conversation: Conversation) -> Turn:
    """Starts a training in the background and ends its turn at once."""
    if not conversation.tools:
        return ASIDE
    if any(message.role == "tool" for message in conversation.messages):
        return Turn("The training runs in the background.")
    train = f"sleep {TRAINING_S}; {VARIANTS}\nvariants 0 1\npython3 ./submit output/v0"
    return Turn(calls=(Call("Bash", {"command": train, "description": "trains", "run_in_background": True}),))


@pytest.mark.timeout(1800)
@pytest.mark.soak
def test_a_background_training_of_eleven_minutes_lives(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches the newest version that is known to work ending background commands after 600 s and its session with exit code 0."""
    monkeypatch.setenv("PATH", f"{installed(('claude-code',), -1) / 'bin'}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o600)
    cluster.mini_task()
    with DriverServer(trains_in_the_background, key=KEY, model=MODEL) as server:
        api = {"kind": "api", "url": server.url, "model": MODEL, "key_file": str(tmp_path / "key")}
        job = cluster.spec(
            ["claude-code"],
            matrix={"task": "mini", "driver": "scripted"},
            drivers={"scripted": api},
            budget={"wall_clock": "25m"},
            grader={"idle_exit_s": 1500},
        )
        cluster.run("launch", str(job), "--root", str(cluster.root.path))
        (run_id,) = [name for name in os.listdir(cluster.experiment.path) if name.startswith("mini-claude-code-")]
        wait_for(lambda: cluster.view(run_id).sealed is not None, "the end of the run", patience_s=1700)
    view = cluster.view(run_id)
    assert view.sealed is not None and str(view.sealed.ended_by) == "agent_exit"
    assert len(view.accepted()) == 1 and view.sealed.elapsed_s > TRAINING_S
