"""Environments and dialogues that fail: what is tried again, whose fault it is, when a run is given up; how workers end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import counting_environment
import pytest
from counting_environment import ENVIRONMENT, TROUBLES, goal, limit_s, outcomes, play
from helpers import alive, wait_for

from autorl_hpc.rollouts.episodes import MAX_BEGINNINGS
from autorl_hpc.rollouts.pool import Pool
from autorl_hpc.rollouts.source import EnvironmentBroken, Source

source = counting_environment.source


# --- environments that fail ---


@pytest.mark.parametrize("name", TROUBLES)
def test_an_environment_that_fails_once_changes_no_outcome(source: Source, tmp_path: Path, name: str) -> None:
    trouble, _ = TROUBLES[name]
    calm = [goal(number, n=4) for number in range(6)]
    troubled = [
        {**g, "trouble": trouble, "at": 2, "once": str(tmp_path / "once")} if g["id"] == "g3" else g for g in calm
    ]
    with Pool(source, 2, call_limit_s=limit_s(name)) as pool:
        episodes = play(source, troubled, pool=pool)
    assert (tmp_path / "once").exists()
    assert outcomes(episodes) == outcomes(play(source, calm))


@pytest.mark.parametrize("name", TROUBLES)
@pytest.mark.slow
def test_an_environment_that_always_fails_is_no_zero_and_no_harm_to_others(source: Source, name: str) -> None:
    trouble, reason = TROUBLES[name]
    goals = [goal(0, n=4), goal(1, n=4, trouble=trouble, at=2), goal(2, n=4), goal(3, n=4)]
    with Pool(source, 2, call_limit_s=limit_s(name)) as pool:
        first, failed, *others = play(source, goals, pool=pool)
        assert failed.reward is None and failed.problem is not None
        assert failed.problem.endswith(f"; begun {MAX_BEGINNINGS} times")
        assert [e.reward for e in (first, *others)] == [1.0] * 3
        assert [e.reward for e in play(source, goals[2:], pool=pool)] == [1.0, 1.0], "the pool is of no use any more"
    assert re.search(reason, failed.problem)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("def broken(:", "SyntaxError"),
        ("class Other: pass", "has no class Environment"),
        ("class Environment:\n    def __init__(self): raise ValueError('no games here')", "ValueError: no games here"),
    ],
)
def test_an_environment_that_cant_be_made_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "environment.py"
    file.write_text(text + "\n\n\nclass Dialogue:\n    pass\n" if "(:" not in text else text)
    with pytest.raises(EnvironmentBroken, match=r"environment\.py") as caught:
        play(Source(file, "Environment", tmp_path), [goal(0)])
    assert words in str(caught.value)


# --- dialogues that fail: the task's fault, in the workers, never the engine's ---


DIALOGUE_TROUBLES = {
    "raises": ("fail('no words')", r"Dialogue.action raised RuntimeError: no words"),
    "ends": ("sys.exit('enough')", r"Dialogue.action raised SystemExit: enough"),
    "no text": ("7", r"Dialogue.action|an action is text, not int"),
    "hangs": ("time.sleep(600)", r"gave no answer within 1 s"),
    "killed": ("die(9)", r"ended its process \(signal SIGKILL\)"),
}


def with_dialogue(source: Source, method: str, trouble: str) -> Source:
    """A dialogue that fails at the words `2`, whoever says them."""
    usual = "completion.strip()" if method == "action" else "transcript.first"
    when = "completion.strip() == '2'" if method == "action" else "len(transcript.turns) == 2"
    own = f"    def {method}(self, {'completion' if method == 'action' else 'transcript'}):\n"
    text = ENVIRONMENT.replace(
        "class Environment:",
        f"class Spoilt(Dialogue):\n{own}        return {trouble} if {when} else {usual}\n\n\nSpoilt.__name__ = 'Dialogue'\n\n\nclass Environment:",
    )
    Path(source.file).write_text(text + "\n\nDialogue = Spoilt\n")
    return source


@pytest.mark.parametrize("name", DIALOGUE_TROUBLES)
@pytest.mark.slow
def test_a_dialogue_that_fails_is_the_tasks_failure_and_no_zero(source: Source, name: str) -> None:
    trouble, reason = DIALOGUE_TROUBLES[name]
    spoilt = with_dialogue(source, "action", trouble)
    with Pool(spoilt, 2, call_limit_s=limit_s(name)) as pool:
        episodes = play(spoilt, [goal(0, n=1), goal(1, n=3)], pool=pool)
        assert episodes[0].reward == 1.0 and episodes[1].reward is None
        assert re.search(reason, str(episodes[1].problem)), episodes[1].problem
        with pytest.raises(EnvironmentBroken, match="episode g1: "):
            play(spoilt, [goal(0, n=1), goal(1, n=3)], pool=pool, all_or_none=True)


# --- workers and their children end with the pool, and with the process that has it ---


def children_of(pid: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(name))
            except OSError:
                continue
    return found


@pytest.fixture
def parent(source: Source) -> Iterator[subprocess.Popen[str]]:
    """A process whose two workers hang in a call that heeds no signal but SIGKILL."""
    script = f"""
        import sys, time
        from pathlib import Path
        from autorl_hpc.rollouts.pool import Pool
        from autorl_hpc.rollouts.source import Source
        pool = Pool(Source(Path({str(source.file)!r}), "Environment", Path("/")), 2)
        hang = "(signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)), time.sleep(600))"
        for slot in range(2):
            pool.begin(slot, {{"id": str(slot), "n": 1, "at": 0, "trouble": hang}}, 0)
        while len(pool.pids) < 2:
            time.sleep(0.01)
        time.sleep(1.5)
        print("up", flush=True)
        time.sleep(600)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_no_worker_outlives_its_parent(parent: subprocess.Popen[str], number: int) -> None:
    assert parent.stdout is not None and parent.stdout.readline() == "up\n"
    workers = children_of(parent.pid)
    assert len(workers) == 2
    parent.send_signal(number)
    wait_for(lambda: not any(alive(pid) for pid in workers), "the workers' end")


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("die(9)", "13 workers were lost in one run; the last one: .*SIGKILL"),
        ("fail('broken door')", "13 calls failed in one run; the last one: RuntimeError: broken door"),
    ],
)
def test_an_environment_that_fails_everywhere_ends_the_run_soon(source: Source, trouble: str, words: str) -> None:
    with pytest.raises(EnvironmentBroken, match=words):
        play(source, [goal(number, trouble=trouble, at=1) for number in range(40)])
