"""mini as a process in a workspace, against a driver that plays scripted turns and fails in every way: without a supervisor."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from driver_server import Call, Conversation, DriverServer, Failure, Pace, Turn
from helpers import PATIENCE_S, wait_for
from miniparts import Alone, contents, errors, parts
from miniturns import DONE, say

parts()


@pytest.fixture
def alone(tmp_path: Path) -> Alone:
    return Alone(tmp_path)


@pytest.fixture
def desk(alone: Alone) -> Iterator[Alone]:
    """The workspace with ./submit and somebody who accepts every manifest."""
    alone.tool()
    ended = threading.Event()

    def accept() -> None:
        while not ended.wait(0.05):
            for path in (alone.path / "submissions").glob("[!.]*.json"):
                result = alone.path / "results" / path.name
                if not result.exists():
                    half = result.with_name(f".{path.name}.half")  # whole or not at all, as the supervisor answers
                    half.write_text(json.dumps({"status": "accepted", **json.loads(path.read_text())}))
                    half.rename(result)

    thread = threading.Thread(target=accept)
    thread.start()
    yield alone
    ended.set()
    thread.join()


def refusal(status: int, code: str, message: str) -> Failure:
    """As the gateway words it."""
    return Failure(status, body=json.dumps({"error": {"message": message, "param": None, "code": code}}).encode())


def own_options(**fields: object) -> str:
    return json.dumps({"temperature": 0.5, "mini": fields})


def test_a_driver_that_fails_in_every_way_that_passes(alone: Alone) -> None:
    alone.accept("output/v1")
    script = [
        Failure(429, retry_after_s=0.2),
        Failure(500),
        Failure(0, cut_after=2),
        Failure(503, body=b"<html>no JSON</html>"),
        Pace(say("echo $((6 * 7)); sleep 300 &", "I count."), after_s=1.0, event_s=0.01),
        Turn("I have no idea."),
        Turn(
            "<think>```bash\ntouch thought\n```</think>I print.\n```bash\nseq 100000\n```\nIt printed 7.\n```bash\ntouch second\n```"
        ),
        say("echo begun; sleep 300"),
        say("false"),
        say("false"),
        say("false"),
        say(DONE),
    ]
    budgets = {"tokens": {"limit": 10**6, "left": 500_000}, "gpu_hours": {"limit": None, "left": None}}
    alone.tell_time(left_s=3000, budgets=budgets, warnings=["half of the tokens are used"])
    with DriverServer(script, key="token") as driver:
        code, lines = alone.run(driver.url, AUTORL_DRIVER_PARAMETERS=own_options(command_timeout_s=4))
        bodies = [each.body for each in driver.asked]
    assert code == 0, lines
    told = "\n".join(errors(lines))
    assert all(words in told for words in ("429", "500", "the stream was cut", "503")) and len(errors(lines)) == 4
    assert bodies[0]["temperature"] == 0.5 and "mini" not in bodies[0] and bodies[0]["max_tokens"] == 4096

    seen = contents(lines, "user")
    assert seen[0] == "Improve the model."
    assert "\n42\n" in seen[1] and "budget left: 50 min, 500,000 tokens]" in seen[1] and "half of the tokens" in seen[1]
    assert "held no command" in seen[2]
    assert "\n1\n2\n" in seen[3] and "99999\n100000" in seen[3] and "left out" in seen[3] and len(seen[3]) < 15_000
    assert "only the first command" in seen[3] and "half of the tokens" not in seen[3]
    assert "did not end within 4 s" in seen[4] and "nohup" in seen[4] and "begun" in seen[4]
    assert "Do something else" in seen[7] and "Do something else" not in seen[6]
    assert not (alone.path / "thought").exists() and not (alone.path / "second").exists()
    assert "It printed 7" not in json.dumps(bodies[-1]), "an invented output must not be read as a real one"


def test_a_conversation_longer_than_the_window_is_folded_until_it_fits(alone: Alone) -> None:
    """The driver's window is smaller than told, and the LLM prints a lot; at the end it still knows its task."""
    alone.accept("output/v1")

    def play(conversation: Conversation) -> Turn:
        assert "Improve the model." in conversation.text
        done = conversation.last.count("run 30")
        return say(DONE) if done else say(f"seq 2000; echo run {conversation.number}")

    with DriverServer(play, context_tokens=5000) as driver:
        code, lines = alone.run(
            driver.url, AUTORL_DRIVER_CONTEXT_TOKENS="12000", AUTORL_DRIVER_MAX_OUTPUT_TOKENS="1000"
        )
        sizes = [each.tokens_in for each in driver.conversations]
    assert code == 0 and max(sizes) > 5000
    assert any("folded more" in line for line in errors(lines)) and len(errors(lines)) <= 5
    assert len(sizes) < 40, "it is not told over and over again"


def test_tool_calls(alone: Alone) -> None:
    alone.accept("output/v1")
    script = [
        Turn("I look.", run="echo one"),
        Turn("", calls=(Call("bash", {"command": "echo two"}), Call("bash", {"command": "echo three"}))),
        Turn("", calls=(Call("browser", {"url": "x"}),)),
        Turn("Nothing to call."),
        Turn("", run=DONE),
    ]
    with DriverServer(script) as driver:
        code, lines = alone.run(driver.url, AUTORL_DRIVER_PARAMETERS=own_options(actions="tools"))
        last = driver.conversations[-1]
    assert code == 0, lines
    assert ["one" in each for each in contents(lines, "tool")] == [True, False, False]
    assert [message.role for message in last.messages[:6]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]
    assert "Unknown tool 'browser'" in last.text and "No tool calls found" in last.text
    assert "call the tool `bash`" in last.messages[0].text


@pytest.mark.parametrize("actions", ["text", "tools"])
def test_killed_in_a_command_it_goes_on_where_it_was_and_takes_a_reprompt(alone: Alone, actions: str) -> None:
    alone.accept("output/v1")
    options = own_options(actions=actions)

    def play(conversation: Conversation) -> Turn:
        command = {0: "echo first", 1: "touch reached; sleep 300", 2: DONE, 3: DONE}[conversation.turns]
        return say(command) if actions == "text" else Turn("I go on.", run=command)

    with DriverServer(play) as driver:
        process = alone.start(driver.url, AUTORL_DRIVER_PARAMETERS=options)
        wait_for((alone.path / "reached").exists, what="the second command")
        os.killpg(process.pid, signal.SIGKILL)
        out = process.communicate()[0]
        with open(alone.path / ".home" / ".mini" / "conversation.jsonl", "a") as file:
            file.write('{"role": "user", "content": "half a li')
        code, lines = alone.run(driver.url, AUTORL_DRIVER_PARAMETERS=options)
        assert code == 0, lines
        asked = driver.conversations[-1]
        assert "first" in asked.text and "interrupted before" in asked.text and "half a li" not in asked.text
        assert "started again, perhaps on another node" in asked.last
        assert lines[0]["session"] == json.loads(out.splitlines()[0])["session"] and lines[0]["start"] == 2

        code, lines = alone.run(driver.url, "There is time left: go on.", AUTORL_DRIVER_PARAMETERS=options)
        assert code == 0 and driver.conversations[-1].last.endswith("There is time left: go on.")
        assert lines[0]["start"] == 3


@pytest.mark.parametrize(
    ("entry", "code", "words"),
    [
        (Failure(401, message="invalid API key"), 4, "invalid API key"),
        (Failure(503), 3, "did not answer for"),
        (refusal(429, "budget_exhausted", "all tokens are used"), 0, "all tokens are used"),
        (refusal(403, "driver_closed", "the budget is used up"), 0, "the budget is used up"),
    ],
)
def test_how_a_driver_ends_it_and_what_was_never_submitted_is(
    desk: Alone, entry: Failure, code: int, words: str
) -> None:
    desk.accept("output/v1")
    desk.checkpoint("output/v1")
    os.utime(desk.path / "output" / "v1" / "model.safetensors", (1, 1))
    desk.checkpoint("output/deep/v2")

    def play(conversation: Conversation) -> Turn | Failure:
        return entry if conversation.number > 1 else say("echo one")

    with DriverServer(play) as driver:
        ended, lines = desk.run(driver.url, AUTORL_DRIVER_PARAMETERS=own_options(patience_s=3))
        assert ended == code, lines
        assert words in contents(lines, "exit")[0]
        assert [each["model_path"] for each in desk.manifests()] == ["output/deep/v2"]
        assert lines[-1]["note"] == "last submission: output/deep/v2: accepted"
        assert code or len(driver.asked) == 2, "a refusal for good is not asked again"


@pytest.mark.parametrize("terminated", [False, True])
def test_the_budget_is_used_up_while_a_command_runs(desk: Alone, terminated: bool) -> None:
    """It is seen in time.json; where the grace is too short for that, TERM comes, and a manifest still counts for some seconds."""
    desk.checkpoint("output/v1")
    with DriverServer([say("touch reached; sleep 300")]) as driver:
        process = desk.start(driver.url)
        wait_for((desk.path / "reached").exists, what="the command")
        if terminated:
            os.killpg(process.pid, signal.SIGSTOP)  # so that it does not see it before
        desk.tell_time(left_s=1800, grace={"out_of": "gpu_hours", "left_s": 60.0})
        if terminated:
            os.killpg(process.pid, signal.SIGTERM)
            os.killpg(process.pid, signal.SIGCONT)
        process.communicate(timeout=PATIENCE_S)
        assert len(driver.asked) == 1, "it is not asked any more"
    assert process.returncode == (143 if terminated else 0)
    assert [each["model_path"] for each in desk.manifests()] == ["output/v1"]
