"""The episode scheduler with engines that stream; where episodes are placed."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import counting_environment
import pytest
from counting_environment import (
    ENVIRONMENT,
    count,
    goal,
    marks_the_last,
    outcomes,
    play,
    stuck,
)
from players import Player
from streaming import StreamingPlayer

from autorl_hpc.rollouts.engine import CONVERSATION
from autorl_hpc.rollouts.environment import MAX_ATTEMPTS
from autorl_hpc.rollouts.pool import Pool
from autorl_hpc.rollouts.source import Source

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


# --- which worker hosts an episode ---


def test_copies_of_a_goal_go_where_it_is_known_but_no_worker_gets_many_more(source: Source) -> None:
    def hosts(pool: Pool) -> list[str]:
        return [play(source, [goal(number)], pool=pool)[0].transcript.first for number in (0, 1, 0, 1)]

    text = ENVIRONMENT.replace("seed {seed}", "process {os.getpid()}")
    Path(source.file).write_text(text)
    with Pool(source, 2) as pool:
        first = [episode.transcript.first for episode in play(source, [goal(0), goal(1)], pool=pool)]
        assert hosts(pool) == [*first, *first]
        together = play(source, [goal(0) for _ in range(20)], pool=pool)
        places = [episode.transcript.first for episode in together]
        assert min(places.count(place) for place in set(places)) >= 6 and len(set(places)) == 2
