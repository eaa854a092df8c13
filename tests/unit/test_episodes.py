"""The episode scheduler and its worker processes, with small environments in files and engines that play by a plan."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_S, alive, wait_for
from players import Player

from autorl_hpc.records.task import Sampling
from autorl_hpc.rollouts.episode import Episode
from autorl_hpc.rollouts.episodes import MAX_BEGINNINGS, run_episodes
from autorl_hpc.rollouts.pool import Pool
from autorl_hpc.rollouts.source import EnvironmentBroken, Source
from autorl_hpc.rollouts.worker import MAX_OBSERVATION_CHARS
from autorl_hpc.scoring.episodes import Episodes, encode
from autorl_hpc.scoring.outcome import Context
from autorl_hpc.tasks.heldout import Item

REPO = Path(__file__).resolve().parents[2]
SAMPLING = Sampling(max_new_tokens=8)

ENVIRONMENT = '''
import os, signal, subprocess, sys, time
from autorl_hpc.rollouts.environment import Step


class Dialogue:
    def prompt(self, transcript):
        shown = transcript.first + "".join(f" > {action}: {seen}" for action, seen in transcript.turns)
        if transcript.goal.get("chat"):
            return [{"role": "system", "content": "count"}, {"role": "user", "content": shown}]
        return shown

    def action(self, completion):
        return completion.strip()


class Environment:
    """Count to `n`. At step `at` (0: in reset) `trouble` happens, only the first time where `once` names a file."""

    def __init__(self, data, options):
        self.options = options

    def reset(self, goal, seed):
        self.goal, self.count = goal, 0
        return self.trouble(f"{goal['id']}: count to {goal['n']}, seed {seed}")

    def step(self, action):
        assert action == str(self.count + 1), f"{action} follows on {self.count}"
        self.count += 1
        time.sleep(self.goal.get("slow", 0))
        done = self.count == self.goal["n"]
        return self.trouble(Step(f"{self.count}", done, self.count / self.goal["n"]))

    def close(self):
        pass

    def trouble(self, usual):
        goal = self.goal
        if "trouble" not in goal or goal.get("at", 1) != self.count or os.path.exists(goal.get("once", "/nowhere")):
            return usual
        if "once" in goal:
            open(goal["once"], "w").close()
        return eval(goal["trouble"])


def fail(words):
    raise RuntimeError(words)


def die(number):
    os.kill(os.getpid(), number)
    time.sleep(60)


def wait(path):
    while not os.path.exists(path):
        time.sleep(0.005)
'''


@pytest.fixture
def source(tmp_path: Path) -> Source:
    file = tmp_path / "environment.py"
    file.write_text(ENVIRONMENT)
    return Source(file, "Environment", tmp_path)


def count(prompt: str) -> str:
    """What a model says that can count: the next number."""
    return f" {prompt.count(' > ') + 1}\n"


def goal(number: int, n: int = 3, **fields: Any) -> dict[str, Any]:
    return {"id": f"g{number}", "n": n, **fields}


def play(source: Source, goals: list[dict[str, Any]], engine: Player | None = None, **options: Any) -> list[Episode]:
    return run_episodes(engine or Player(count), goals, source, SAMPLING, **{"max_steps": 20, **options})


def stuck(mark: Path, at: int = 1) -> dict[str, Any]:
    """Fields of a goal whose environment is at one step until there is such a file."""
    return {"trouble": f"wait({str(mark)!r}) or usual", "at": at}


def marks_the_last(mark: Path, others: int, n: int) -> Callable[[str], str]:
    """A model that counts, and makes the file once it is asked for the last word of so many episodes other than g0."""
    asked: set[str] = set()

    def act(prompt: str) -> str:
        name = prompt.partition(":")[0]
        if name != "g0" and prompt.count(" > ") == n - 1:
            asked.add(name)
        if len(asked) == others:
            mark.touch()
        return count(prompt)

    return act


def limit_s(name: str) -> float:
    """Of a call: a second where nothing else ends it, and otherwise as long as a busy machine may take."""
    return 1 if name == "hangs" else PATIENCE_S


def warm(source: Source, pool: Pool) -> None:
    """Lets all its workers play, so that none of them comes when the others have done all there is to do."""
    while len(pool.pids) < pool.size:
        play(source, [goal(number, n=1) for number in range(90, 98)], pool=pool)


def outcomes(episodes: list[Episode]) -> list[tuple[Any, ...]]:
    return [(e.goal, e.reward, e.done, e.steps, e.tokens, e.transcript_sha256, e.problem) for e in episodes]


# --- order, batches ---


def test_episodes_come_back_in_the_goals_order_with_the_same_outcome_each_time(source: Source) -> None:
    goals = [goal(number, n=1 + number % 7) for number in range(20)]
    engine = Player(count)
    episodes = play(source, goals, engine, workers=3, gather_s=30)
    assert [e.goal for e in episodes] == [g["id"] for g in goals]
    assert [(e.reward, e.done, e.steps, e.tokens) for e in episodes] == [(1.0, True, g["n"], g["n"]) for g in goals]
    assert [len(batch) for batch in engine.batches] == [20, 17, 14, 11, 8, 5, 2], "not all that were ready were asked"
    assert episodes[2].completions == (" 1\n", " 2\n", " 3\n")
    assert [turn.observation for turn in episodes[2].transcript.turns] == ["1", "2", "3"]
    for workers, in_flight, gather_s in [(1, 256, 0.0), (2, 3, 0.001), (3, 1, 1.0)]:
        again = play(source, goals, workers=workers, in_flight=in_flight, gather_s=gather_s)
        assert outcomes(again) == outcomes(episodes)


def test_a_finished_episode_makes_room_for_the_next_goal(source: Source) -> None:
    engine = Player(count)
    play(source, [goal(number, n=1 + number % 4) for number in range(24)], engine, in_flight=6, gather_s=30)
    sizes = [len(batch) for batch in engine.batches]
    assert max(sizes) == 6 and sum(sizes) == 60
    assert all(size == 6 for size in sizes[:8]), f"the batch was not kept full: {sizes}"


def test_a_slow_environment_does_not_stall_the_others(source: Source, tmp_path: Path) -> None:
    engine = Player(marks_the_last(tmp_path / "mark", 5, 10))
    goals = [goal(0, n=2, **stuck(tmp_path / "mark")), *(goal(number, n=10) for number in range(1, 6))]
    episodes = play(source, goals, engine, workers=6, gather_s=0.05)
    assert [e.reward for e in episodes] == [1.0] * 6, "the others waited for the slow one"
    last = next(i for i, batch in enumerate(engine.batches) if any("g0: " in text and ">" in text for text in batch))
    assert last >= 10


def test_more_steps_than_allowed_end_an_episode(source: Source) -> None:
    (episode,) = play(source, [goal(0, n=8)], max_steps=4)
    assert (episode.reward, episode.done, episode.steps, episode.problem) == (0.5, False, 4, None)


def test_a_prompt_that_grows_too_long_ends_an_episode_with_the_reward_so_far(source: Source) -> None:
    short, long = play(source, [goal(0, n=2), goal(1, n=10)], max_prompt_tokens=50)
    assert short.reward == 1.0 and short.problem is None
    assert long.reward is not None and 0 < long.reward < 1 and not long.done
    assert long.problem == "the prompt is longer than the recipe allows"


def test_messages_go_through_the_template_and_to_plain_text_without_one(source: Source) -> None:
    with_template, without = Player(count, template=True), Player(count)
    goals = [goal(0, n=1, chat=True)]
    assert [e.reward for e in (*play(source, goals, with_template), *play(source, goals, without))] == [1.0, 1.0]
    assert with_template.batches[0] == ["<system>count<user>g0: count to 1, seed 0"]
    assert without.batches[0] == ["count\n\ng0: count to 1, seed 0"]


def test_nothing_to_play(source: Source) -> None:
    assert play(source, []) == []


def test_the_seed_and_cut_off_completions_are_told(source: Source) -> None:
    engine = Player(lambda prompt: "1 cut off" if "> " not in prompt else "2")
    (episode,) = play(source, [goal(0, n=2, trouble="fail('never')", at=9)], engine, seed=7)
    assert "AssertionError: 1 cut off follows on 0" in str(episode.problem), episode
    (episode,) = play(source, [goal(0, n=1)], Player(lambda prompt: "1"), seed=7)
    assert episode.transcript.first.endswith("seed 7")


# --- environments that fail ---

TROUBLES = {
    "killed": ("die(9)", r"the environment's process died \(signal SIGKILL\)"),
    "crashed": ("die(11)", r"the environment's process died \(signal SIGSEGV\)"),
    "left": ("os._exit(3)", r"the environment's process died \(exit code 3\)"),
    "hangs": ("time.sleep(600)", r"the environment gave no answer within 1 s"),
    "raises": ("fail('broken \\ud800 door')", r"the environment failed: RuntimeError: broken \? door"),
    "ends": ("sys.exit('enough')", r"the environment failed: SystemExit: enough"),
    "no step": ("'seven'", r"a step is \(observation, done, reward\), not 'seven'"),
    "nothing": ("None", r"a step is \(observation, done, reward\), not None"),
    "no number": ("('a', False, 'much')", r"a reward is a number, not 'much'"),
    "a number as text": ("('a', True, '1')", r"a reward is a number, not '1'"),
    "done in words": ("('a', 'no', 0.0)", r"`done` is True or False, not 'no'"),
    "done as a number": ("('a', 1, 0.0)", r"`done` is True or False, not 1"),
    "NaN": ("('a', False, float('nan'))", r"a reward lies between 0 and 1, not nan"),
    "too much": ("('a', True, 1.5)", r"a reward lies between 0 and 1, not 1.5"),
    "no text": ("(b'a', False, 0.0)", r"an observation is text, not bytes"),
}


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


def test_an_environment_that_fails_in_reset(source: Source) -> None:
    (failed,) = play(source, [goal(0, trouble="fail('no door')", at=0)])
    assert failed.reward is None and "RuntimeError: no door" in str(failed.problem) and failed.steps == 0
    (failed,) = play(source, [goal(0, trouble="42", at=0)])
    assert failed.reward is None and "an observation is text, not int" in str(failed.problem)


def test_an_action_that_is_no_text_is_named(source: Source, tmp_path: Path) -> None:
    text = Path(source.file).read_text().replace("return completion.strip()", "return None")
    file = tmp_path / "mute.py"
    file.write_text(text)
    (failed,) = play(replace(source, file=file), [goal(0)])
    assert failed.reward is None and "an action is text, not NoneType" in str(failed.problem)


def test_a_worker_killed_from_outside_changes_no_outcome(source: Source) -> None:
    goals = [goal(number, n=6) for number in range(8)]
    with Pool(source, 2) as pool:
        engine = Player(count)

        def kills(prompt: str) -> str:
            if len(engine.batches) == 3 and prompt.startswith("g0"):
                process = pool._workers[pool.worker_of(0) or 0].process
                assert process is not None
                process.kill()
            return count(prompt)

        engine.act = kills
        episodes = play(source, goals, engine, pool=pool, gather_s=30)
    assert len(engine.batches) > 6, "nothing was begun again"
    assert outcomes(episodes) == outcomes(play(source, goals))


def test_an_environment_that_dies_everywhere_ends_the_run_soon(source: Source) -> None:
    with pytest.raises(EnvironmentBroken, match=r"13 workers were lost in one run; the last one: .*SIGKILL"):
        play(source, [goal(number, trouble="die(9)", at=1) for number in range(40)])


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
    "killed": ("die(9)", r"process died \(signal SIGKILL\)"),
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
def test_a_dialogue_that_fails_is_the_tasks_failure_and_no_zero(source: Source, name: str) -> None:
    trouble, reason = DIALOGUE_TROUBLES[name]
    spoilt = with_dialogue(source, "action", trouble)
    with Pool(spoilt, 2, call_limit_s=limit_s(name)) as pool:
        episodes = play(spoilt, [goal(0, n=1), goal(1, n=3)], pool=pool)
        assert episodes[0].reward == 1.0 and episodes[1].reward is None
        assert re.search(reason, str(episodes[1].problem)), episodes[1].problem
        with pytest.raises(EnvironmentBroken, match="episode g1: "):
            play(spoilt, [goal(0, n=1), goal(1, n=3)], pool=pool, all_or_none=True)


@pytest.mark.parametrize(
    "trouble", ["fail('no prompt')", "7", "[{'role': 'user'}]", "[{'role': 'user', 'content': 7}]", "None"]
)
def test_a_prompt_that_is_none_is_the_tasks_failure(source: Source, trouble: str) -> None:
    spoilt = with_dialogue(source, "prompt", trouble)
    (episode,) = play(spoilt, [goal(0, n=3)], Player(lambda prompt: "1"), max_steps=5)
    spoken = str(episode.problem)
    assert episode.reward is None and ("Dialogue.prompt raised" in spoken or "AssertionError" in spoken)


@pytest.mark.parametrize("line", ["sys.exit('at import')", "os._exit(3)", "raise KeyError('x')"])
def test_a_file_that_ends_its_interpreter_ends_no_other(source: Source, line: str) -> None:
    Path(source.file).write_text(ENVIRONMENT + f"\n\n{line}\n")
    with pytest.raises(EnvironmentBroken, match="can't be loaded"):
        play(source, [goal(0)])


def test_a_file_that_hangs_at_import_is_given_up(source: Source) -> None:
    Path(source.file).write_text(ENVIRONMENT + "\n\ntime.sleep(600)\n")
    with Pool(source, 1, start_limit_s=1) as pool, pytest.raises(EnvironmentBroken, match="no answer within 1 s"):
        play(source, [goal(0)], pool=pool)


def test_the_tasks_code_runs_in_the_workers_alone(source: Source) -> None:
    Path(source.file).write_text(ENVIRONMENT + "\n\nassert 'autorl_hpc.rollouts.episodes' not in sys.modules\n")
    assert [e.reward for e in play(source, [goal(0)])] == [1.0]


# --- where no score can come of it ---


def test_all_or_none_stops_at_the_first_episode_without_a_reward(source: Source) -> None:
    engine = Player(count)
    goals = [goal(0, n=30, trouble="fail('broken door')"), *(goal(number, n=30) for number in range(1, 40))]
    with pytest.raises(EnvironmentBroken, match=r"episode g0: .*broken door; begun 3 times"):
        play(source, goals, engine, max_steps=30, all_or_none=True, gather_s=30)
    assert sum(map(len, engine.batches)) <= 4 * 40, "the others were played to their end"


def test_an_environment_that_raises_everywhere_ends_the_run_soon(source: Source) -> None:
    engine = Player(count)
    with pytest.raises(EnvironmentBroken, match=r"13 calls failed in one run; the last one: RuntimeError: broken door"):
        play(source, [goal(number, trouble="fail('broken door')") for number in range(40)], engine)


def test_what_cant_be_reached_is_not_asked_again(source: Source) -> None:
    Path(source.file).write_text(
        ENVIRONMENT.replace("import Step", "import Step, Unavailable").replace(
            "raise RuntimeError", "raise Unavailable"
        )
    )
    (episode,) = play(source, [goal(0, trouble="fail('away')")])
    assert episode.reward is None and str(episode.problem).endswith("Unavailable: away; begun once")


# --- texts ---


def test_texts_of_all_kinds_come_through(source: Source) -> None:
    odd = "a\u2028b\u0085c\0d \U0001f600 \u202e e\u0301 \\n {question} </s>\r\n\t"
    (episode,) = play(source, [goal(0, n=1, trouble=f"Step({odd!r}, True, 1)", at=1)])
    assert episode.transcript.turns[0].observation == odd
    (episode,) = play(source, [goal(0, n=1, trouble="Step('half \\ud83d of it', True, 1)", at=1)])
    assert episode.transcript.turns[0].observation == "half ? of it"


def test_a_huge_observation_is_cut(source: Source) -> None:
    (episode,) = play(source, [goal(0, n=1, trouble="Step('\\u00e9' * 50_000_000, True, 1)", at=1)])
    assert episode.reward == 1.0
    assert episode.transcript.turns[0].observation == "\u00e9" * MAX_OBSERVATION_CHARS


def test_a_huge_goal_and_action_come_through(source: Source) -> None:
    wide = [goal(number, n=2, filling="x" * 3_000_000) for number in range(4)]
    assert [e.reward for e in play(source, wide, workers=1)] == [1.0] * 4


def test_an_environment_that_prints_and_reads_disturbs_nothing(
    source: Source, capfd: pytest.CaptureFixture[str]
) -> None:
    trouble = "(print('{\"done\": 1}'), os.system('echo from a shell'), sys.stdin.read(), Step('1', True, 1))[-1]"
    (episode,) = play(source, [goal(0, n=1, trouble=trouble, at=1)])
    assert episode.reward == 1.0
    assert "from a shell" in capfd.readouterr().err


# --- the engine ---


def test_the_engines_own_error_passes_and_the_pool_stays_of_use(source: Source) -> None:
    def breaks(prompt: str) -> str:
        if prompt.count(" > ") == 2:
            raise ZeroDivisionError("out of memory")
        return count(prompt)

    goals = [goal(number, n=5) for number in range(6)]
    with Pool(source, 2) as pool:
        with pytest.raises(ZeroDivisionError):
            play(source, goals, Player(breaks), pool=pool)
        assert outcomes(play(source, goals, pool=pool)) == outcomes(play(source, goals))


# --- nothing is left behind ---


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


def test_closing_ends_workers_and_their_children(source: Source) -> None:
    pool = Pool(source, 2)
    warm(source, pool)
    sleeper = "(globals().__setitem__('p', subprocess.Popen(['sleep', '600'])), Step(str(p.pid), False, 0))[1]"
    episodes = play(source, [goal(0, n=2, trouble=sleeper, at=1), goal(1, n=2)], pool=pool)
    pids = [*pool.pids, int(episodes[0].transcript.turns[0].observation)]
    assert len(pids) == 3 and all(alive(pid) for pid in pids)
    pool.close()
    wait_for(lambda: not any(alive(pid) for pid in pids), "the workers' end")


def test_closing_does_not_wait_for_a_hanging_call(source: Source) -> None:
    pool = Pool(source, 1)
    pool.begin(0, goal(0, trouble="time.sleep(600)", at=0), 0)
    (pid,) = wait_for(lambda: pool.pids, "a worker")
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 60 and not alive(pid)


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
def test_no_worker_outlives_its_parent(parent: subprocess.Popen[str], number: int) -> None:
    assert parent.stdout is not None and parent.stdout.readline() == "up\n"
    workers = children_of(parent.pid)
    assert len(workers) == 2
    parent.send_signal(number)
    wait_for(lambda: not any(alive(pid) for pid in workers), "the workers' end")


# --- the scorer ---


@pytest.mark.parametrize(
    ("reward", "threshold", "won"),
    [
        (1.0, None, 1),
        (1.0 - 1e-10, None, 1),
        (0.999999, None, 0),
        (0.5, None, 0),
        (0.5, 0.5, 1),
        (0.5 - 1e-10, 0.5, 1),
        (0.49, 0.5, 0),
        (0.0, None, 0),
        (0.0, 0.5, 0),
    ],
)
def test_won_is_what_reaches_the_threshold(reward: float, threshold: float | None, won: int) -> None:
    context = Context() if threshold is None else Context(options={"threshold": threshold})
    items = [Item("a", "", "")]
    (outcome,) = Episodes().score(items, [[encode(reward, 3, True, "0" * 64)]], context)
    assert outcome.value == won and outcome.facts == {"reward": reward, "steps": 3.0}


def test_the_metrics_of_rewards() -> None:
    items = [Item(str(number), "", "") for number in range(4)]
    answers = [[encode(reward, steps, True, "")] for reward, steps in [(1.0, 2), (0.5, 4), (0.25, 6), (0.0, 8)]]
    outcomes = Episodes().score(items, answers, Context(options={"threshold": 0.5}))
    assert [o.value for o in outcomes] == [1, 1, 0, 0]
    assert Episodes().metrics(items, outcomes) == {
        "average_reward": 0.4375,
        "success_at_1": 25.0,
        "success_at_half": 50.0,
        "mean_steps": 5.0,
    }


# --- for agents ---


def test_the_room_imports_nothing_of_the_suite_but_itself() -> None:
    script = (
        "import json, sys; import autorl_hpc.rollouts.episodes, autorl_hpc.rollouts.worker;"
        "print(json.dumps(sorted(m for m in sys.modules if m.startswith('autorl_hpc'))))"
    )
    found = json.loads(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    )
    assert all(name == "autorl_hpc" or name.startswith("autorl_hpc.rollouts") for name in found), found
    room = REPO / "autorl_hpc" / "rollouts"
    for path in (*room.rglob("*.py"), *(REPO / "tasks").glob("*/environment.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for_types = {id(n) for node in ast.walk(tree) if isinstance(node, ast.If) for n in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in for_types:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                for name in names:
                    inside = name.split(".")[0] != "autorl_hpc" or name.startswith("autorl_hpc.rollouts")
                    assert inside, f"{path} imports {name}, which agents don't get"
