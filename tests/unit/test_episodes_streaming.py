"""The episode scheduler with engines that stream."""

from __future__ import annotations

import random

import counting_environment
import pytest
from counting_environment import count, goal, outcomes, play
from players import Player
from streaming import StreamingPlayer

from autorl_hpc.rollouts.pool import Pool
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


# --- which worker hosts an episode ---


def test_all_or_none_closes_the_stream(source: Source) -> None:
    goals = [goal(0, n=3, trouble="fail('broken door')"), *(goal(number, n=30) for number in range(1, 9))]
    engine = StreamingPlayer(count, most_s=0.01)
    with Pool(source, 2) as pool:
        with pytest.raises(EnvironmentBroken, match="episode g0"):
            play(source, goals, engine, pool=pool, max_steps=30, all_or_none=True)
        asked = len(engine.asked)
        assert [e.reward for e in play(source, goals[1:], pool=pool, max_steps=30)] == [1.0] * 8
        assert len(engine.asked) == asked
