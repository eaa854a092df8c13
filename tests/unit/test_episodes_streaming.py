"""The episode scheduler with engines that stream; environments that are slow or hang; where episodes are placed."""

from __future__ import annotations

import hashlib
import random
import threading
from pathlib import Path

import counting_environment
import pytest
from counting_environment import (
    ENVIRONMENT,
    TROUBLES,
    count,
    goal,
    limit_s,
    marks_the_last,
    outcomes,
    play,
    stuck,
    warm,
)
from helpers import wait_for
from players import Player
from streaming import StreamingPlayer

from autorl_hpc.rollouts import pool
from autorl_hpc.rollouts.engine import CONVERSATION
from autorl_hpc.rollouts.environment import MAX_ATTEMPTS
from autorl_hpc.rollouts.pool import Desk, Pool, WorkerCall
from autorl_hpc.rollouts.source import EnvironmentBroken, Source

source = counting_environment.source


# --- the same outcomes ---


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.slow
def test_streamed_and_gathered_episodes_are_equal_whatever_the_delays(source: Source, seed: int) -> None:
    draw = random.Random(seed)
    goals = [
        goal(number, n=draw.randint(1, 9), slow=draw.choice([0, 0, 0.002, 0.01]), chat=draw.random() < 0.3)
        for number in range(16)
    ]
    wrong = draw.randrange(16)
    goals[wrong] = {**goals[wrong], "n": 9, "trouble": "fail('a broken door')", "at": 5}
    options = {"max_steps": 8, "max_prompt_tokens": 60 if seed == 3 else None}
    expected = outcomes(play(source, goals, Player(count, template=True), workers=2, gather_s=30, **options))
    assert len({outcome[1] for outcome in expected}) >= 3
    engine = StreamingPlayer(count, template=True, seed=draw.randrange(1 << 30), most_s=draw.choice([0.0, 0.02]))
    places = {"workers": draw.randint(1, 4), "in_flight": draw.choice([1 + draw.randrange(5), 256])}
    streamed = play(source, goals, engine, **options, **places)
    assert outcomes(streamed) == expected, places
    batched = play(source, goals, Player(count, template=True), gather_s=draw.choice([0.0, 0.01]), **options, **places)
    assert outcomes(batched) == expected, places


def test_drawn_answers_do_not_depend_on_the_timing(source: Source) -> None:
    def speak(key: int, text: str) -> str:  # what a sampling engine says follows from the key
        noise = hashlib.sha256(str(key).encode()).hexdigest()[:6]
        return f"{count(text)} " if noise[0] in "01234567" else f" {count(text).strip()}  "

    Path(source.file).write_text(ENVIRONMENT.replace("assert action ==", "assert True or action =="))
    goals = [goal(number, n=5) for number in range(12)]
    runs = [
        play(
            source, goals, StreamingPlayer(count, seed=seed, most_s=0.01, speak=speak), workers=workers, in_flight=most
        )
        for seed, workers, most in [(1, 1, 12), (2, 3, 5), (3, 2, 1)]
    ]
    said = [[episode.completions for episode in episodes] for episodes in runs]
    assert said[0] == said[1] == said[2]
    assert len(set(said[0])) > 1


def test_what_is_ready_together_is_asked_together_and_nothing_is_gathered(source: Source, tmp_path: Path) -> None:
    engine = StreamingPlayer(marks_the_last(tmp_path / "mark", 7, 6))
    goals = [goal(0, n=2, **stuck(tmp_path / "mark")), *(goal(number, n=6) for number in range(1, 8))]
    play(source, goals, engine, workers=8, gather_s=30)
    keys = [key for asked in engine.asked for key in asked]
    assert len(keys) == 2 + 7 * 6 and all(asked == sorted(asked) for asked in engine.asked)
    assert engine.streams == 1
    of_the_slow_one = [place for place, key in enumerate(keys) if key < MAX_ATTEMPTS * CONVERSATION]
    assert len(of_the_slow_one) == 2 and of_the_slow_one[-1] == len(keys) - 1, "the others waited for the slow one"


# --- what fails ---


@pytest.mark.parametrize("name", ["killed", "hangs", "raises"])
def test_an_environment_that_fails_once_changes_no_outcome(source: Source, tmp_path: Path, name: str) -> None:
    calm = [goal(number, n=4) for number in range(6)]
    once = {"trouble": TROUBLES[name][0], "at": 2, "once": str(tmp_path / "once")}
    troubled = [{**g, **once} if g["id"] == "g3" else g for g in calm]
    with Pool(source, 2, call_limit_s=limit_s(name)) as pool:
        assert outcomes(play(source, troubled, StreamingPlayer(count, most_s=0.01), pool=pool)) == outcomes(
            play(source, calm)
        )
    assert (tmp_path / "once").exists()


@pytest.mark.slow
def test_the_engines_own_error_ends_the_run_and_the_pool_stays_of_use(source: Source) -> None:
    goals = [goal(number, n=5, slow=0.005) for number in range(8)]
    expected = outcomes(play(source, goals))
    with Pool(source, 2) as pool:
        for breaks_at in (0, 3, 17):
            with pytest.raises(ZeroDivisionError, match="out of memory"):
                play(source, goals, StreamingPlayer(count, breaks_at=breaks_at, most_s=0.005), pool=pool)
            assert outcomes(play(source, goals, StreamingPlayer(count), pool=pool)) == expected
            assert outcomes(play(source, goals, pool=pool)) == expected


def test_all_or_none_closes_the_stream(source: Source) -> None:
    goals = [goal(0, n=3, trouble="fail('broken door')"), *(goal(number, n=30) for number in range(1, 9))]
    engine = StreamingPlayer(count, most_s=0.01)
    with Pool(source, 2) as pool:
        with pytest.raises(EnvironmentBroken, match="episode g0"):
            play(source, goals, engine, pool=pool, max_steps=30, all_or_none=True)
        asked = len(engine.asked)
        assert [e.reward for e in play(source, goals[1:], pool=pool, max_steps=30)] == [1.0] * 8
        assert len(engine.asked) == asked


# --- slow ones ---


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "SLOW_S", 0.2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.slow
def test_the_others_do_not_wait_for_one_that_is_slow_in_every_step(
    source: Source, tmp_path: Path, streams: bool
) -> None:
    """After a slow step it is at its second one for as long as the others play: who waits for it would wait for ever."""
    act = marks_the_last(tmp_path / "mark", 11, 6)
    slow = {"slow": 0.3, **stuck(tmp_path / "mark", at=2)}
    goals = [goal(number, n=6) for number in range(12)]
    engine = StreamingPlayer(act) if streams else Player(act)
    with Pool(source, 2) as pool:
        warm(source, pool)
        episodes = play(source, [{**goals[0], **slow}, *goals[1:]], engine, pool=pool, gather_s=0.05)
    assert outcomes(episodes) == outcomes(play(source, goals)), "the others had to wait for the slow one"


@pytest.mark.usefixtures("impatient")
@pytest.mark.slow
def test_one_that_hangs_is_replaced_and_the_others_go_on_meanwhile(source: Source, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    act = marks_the_last(mark, 11, 10)
    done_at_beginnings: list[bool] = []

    def noted(prompt: str) -> str:
        if prompt.startswith("g0: ") and " > " not in prompt:
            done_at_beginnings.append(mark.exists())
        said = act(prompt)
        if mark.exists():  # from here on, who hangs has had time enough
            for worker in pool._workers:
                worker._call_limit_s = 1
        return said

    goals = [goal(0, n=5, trouble="time.sleep(600)", at=2), *(goal(number, n=10) for number in range(1, 12))]
    with Pool(source, 2, call_limit_s=10) as pool:
        warm(source, pool)
        hung, *others = play(source, goals, StreamingPlayer(noted), pool=pool)
    assert hung.reward is None and "gave no answer within 1 s; begun 3 times" in str(hung.problem)
    assert [e.reward for e in others] == [1.0] * 11
    assert all(done_at_beginnings[1:]), "the others waited for the hung one"


@pytest.mark.usefixtures("impatient")
@pytest.mark.slow
def test_an_environment_that_tells_another_story_is_begun_from_nothing(source: Source, tmp_path: Path) -> None:
    text = ENVIRONMENT.replace("seed {seed}", "seed {seed}, process {os.getpid()}")
    Path(source.file).write_text(text)
    goals = [goal(0, n=4, slow=1.5), *(goal(number, n=6) for number in range(1, 8))]
    episodes = play(source, goals, StreamingPlayer(count), workers=2)
    assert [(e.reward, e.steps) for e in episodes] == [(1.0, g["n"]) for g in goals]


@pytest.mark.usefixtures("impatient")
@pytest.mark.slow
def test_what_can_not_be_played_again_stays_where_it_is(source: Source, tmp_path: Path) -> None:
    log = tmp_path / "resets"
    text = ENVIRONMENT.replace("    def reset(", "    replays = False\n\n    def reset(")
    text = text.replace(
        "self.goal, self.count = goal, 0", f"self.goal, self.count = goal, 0; open({str(log)!r}, 'a').write('x')"
    )
    Path(source.file).write_text(text)
    goals = [goal(0, n=3, slow=0.7), *(goal(number, n=4) for number in range(1, 6))]
    assert [e.reward for e in play(source, goals, StreamingPlayer(count), workers=2)] == [1.0] * 6
    assert log.read_text() == "x" * 6


# --- the desk ---


def take_all(made: Desk, workers: list[int], times: int) -> dict[int, list[int]]:
    """The slots that workers get, by turns, each done at once."""
    got: dict[int, list[int]] = {number: [] for number in workers}
    for _ in range(times):
        for number in workers:
            call = made.take(number)
            assert isinstance(call, WorkerCall)
            made.done(number)
            got[number].append(call.slot)
    return got


def test_copies_of_a_goal_go_where_it_is_known_and_come_back_there() -> None:
    made = Desk(4)
    goals = [{"id": f"g{number}"} for number in range(4)]
    for slot in range(16):
        made.begin(slot, goals[slot % 4], 0)
    got = take_all(made, [0, 1, 2, 3], 4)
    assert all(len({slot % 4 for slot in slots}) == 1 for slots in got.values()), got
    for slot in range(16):
        made.release(slot)
    for slot in reversed(range(16)):
        made.begin(slot, goals[slot % 4], 1)
    again = take_all(made, [3, 2, 1, 0], 4)
    assert {number: sorted(slots) for number, slots in again.items()} == got


def test_many_copies_of_one_goal_are_spread() -> None:
    made = Desk(4)
    for slot in range(64):
        made.begin(slot, {"id": "one"}, 0)
    while any(made.worker_of(slot) is None for slot in range(64)):
        for number, place in enumerate(made._places):  # workers that are equally quick; `take` would wait
            with made._lock:
                call = made._next(number, place)
            if call is not None:
                made.done(number)
    hosted = [[made.worker_of(slot) for slot in range(64)].count(number) for number in range(4)]
    assert min(hosted) >= 8, hosted


def test_calls_of_a_lost_or_released_episode_are_dropped() -> None:
    made = Desk(1)
    tickets = [made.begin(slot, {"id": f"g{slot}"}, 0) for slot in range(3)]
    take_all(made, [0], 3)
    made.act(0, {})
    made.release(0)
    last = made.act(1, {})
    assert made.act(0, {}) > last, "a step of an episode that is not there has a ticket too"
    call = made.take(0)
    assert call is not None and (call.ticket, call.request["slot"]) == (last, 1)
    assert made.lose(0) == (1, 2) and made.worker_of(1) is None
    again = made.begin(1, {"id": "g1"}, 0)
    assert made.take(0) == (again, 1, {"slot": 0, "goal": {"id": "g1"}, "seed": 0}) and again > max(tickets)


def test_a_worker_that_hosts_a_slow_episode_gets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "SLOW_S", 0.0)
    made = Desk(2)
    made.begin(0, {"id": "slow"}, 0)
    take_all(made, [0], 1)
    made.act(0, {})
    take_all(made, [0], 1)
    made.begin(1, {"id": "slow"}, 0)
    made.begin(2, {"id": "other"}, 0)
    assert take_all(made, [1], 2) == {1: [1, 2]}, "also what the slow one knows"


def dozing(made: Desk, number: int) -> tuple[threading.Thread, list[WorkerCall | None]]:
    """A worker that waits in a thread of its own, because there is nothing to do."""
    got: list[WorkerCall | None] = []
    thread = threading.Thread(target=lambda: got.append(made.take(number)), daemon=True)
    thread.start()
    wait_for(lambda: made._places[number].dozes, "a worker without work")
    return thread, got


WOKEN_S = 30.0
"""A hundred times as long as a free worker lets beginnings of others be."""


def test_a_free_worker_is_woken_for_what_a_slow_one_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Desk(2)
    made.begin(0, {"id": "slow"}, 0)
    made.begin(1, {"id": "known"}, 0)
    take_all(made, [0], 2)
    made.release(1)
    monkeypatch.setattr(pool, "SLOW_S", 0.0)
    made.act(0, {})
    take_all(made, [0], 1)
    thread, got = dozing(made, 1)
    made.begin(2, {"id": "known"}, 0)
    thread.join(WOKEN_S)
    assert [call.slot for call in got if call] == [2]


def test_a_free_worker_takes_over_what_waits_for_one_that_got_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "SLOW_BEGINNING_S", 0.1)
    made = Desk(2)
    made.begin(0, {"id": "known"}, 0)
    take_all(made, [0], 1)
    thread, got = dozing(made, 1)
    made.begin(1, {"id": "known"}, 0)
    made.begin(2, {"id": "known"}, 0)
    call = made.take(0)
    assert call is not None and call.slot == 1  # and is never done
    thread.join(WOKEN_S)
    assert [call.slot for call in got if call] == [2]
