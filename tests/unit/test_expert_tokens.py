"""Episodes as the scripted experts learn from them: tokens, micro-batches, advantages and the loss."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pieces
import pytest
from pieces import TINY

from autorl_hpc.rollouts import pool

piece = pieces.piece


# --- tokens ---


def spoken(batches: ModuleType, prompt: list[int], ids: list[int]) -> Any:
    return batches.Spoken(np.array(prompt), np.array(ids), -np.array(ids, np.float32))


def test_turns_that_go_on_are_one_sequence_and_only_own_tokens_count(piece: Any) -> None:
    batches = piece("batches")
    turns = [spoken(batches, [1, 2], [5, 6]), spoken(batches, [1, 2, 5, 6, 3], [7]), spoken(batches, [9, 9], [8])]
    first, second = batches.merged(turns, 100, 0.5)
    assert first.ids.tolist() == [1, 2, 5, 6, 3, 7]
    assert first.own.tolist() == [False, False, True, True, False, True]
    assert first.logps.tolist() == [0, 0, -5, -6, 0, -7] and first.advantage == 0.5
    assert second.ids.tolist() == [9, 9, 8]  # a window of history: no beginning in common
    assert [one.ids.tolist() for one in batches.merged(turns, 3)] == [[1, 2, 5], [9, 9, 8]]
    assert batches.merged([spoken(batches, [1, 2, 3], [4])], 3) == []  # nothing of its own is left


def test_micro_batches_hold_everything_once_and_keep_their_size(piece: Any) -> None:
    batches = piece("batches")
    draw = np.random.default_rng(0)
    made = [batches.merged([spoken(batches, [1] * int(n), [2])], 999)[0] for n in draw.integers(1, 60, size=50)]
    for shared in (False, True):
        found = batches.packs(made, 120, 0, shared=shared)
        assert sum(pack.learned for pack in found) == 0 and sum(pack.own.sum() for pack in found) == 50
        assert all(len(pack.ids) <= 120 for pack in found)
        assert all(len(pack.ids) == sum(group.tokens for group in pack.groups) for pack in found)
        assert sum(group.number for pack in found for group in pack.groups) == 50
    assert sum((pack.ids > 0).sum() for pack in batches.packs(made, 120, 0, shared=False)) == sum(
        len(one.ids) for one in made
    )


def kind(batches: ModuleType, examples: list[int], number: int, seed: int) -> list[Any]:
    """Episodes of several turns behind the same examples."""
    draw = np.random.default_rng(seed)
    made = []
    for _ in range(number):
        ids = np.concatenate([examples, draw.integers(3, 300, size=draw.integers(12, 30))]).astype(np.int32)
        own = np.concatenate([np.zeros(len(examples) + 3, bool), draw.random(len(ids) - len(examples) - 3) < 0.4])
        own[-1] = True
        made.append(batches.Tokens(ids, own, np.where(own, -ids / 100, 0).astype(np.float32), float(draw.normal())))
    return made


def test_episodes_behind_one_copy_of_their_examples_are_learned_from_as_each_by_itself(piece: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    batches = piece("batches")
    draw = np.random.default_rng(0)
    one, other = draw.integers(3, 300, size=80), draw.integers(3, 300, size=60)
    made = kind(batches, one.tolist(), 14, 1) + kind(batches, other.tolist(), 12, 2) + kind(batches, [7], 1, 3)
    made += [made[0]._replace(ids=made[0].ids.copy()), batches.merged([spoken(batches, [1], [2])], 9)[0]]
    limit = 200
    together = batches.packs(made, limit, 0)
    assert sum(len(pack.ids) for pack in together) < 0.6 * sum(len(each.ids) for each in made)
    assert all(len(pack.ids) <= limit for pack in together)
    found = []
    for shares, batch in ((True, together), (False, batches.packs(made, limit, 0, shared=False))):
        model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
        learner = object.__new__(piece("learner").Learner)
        learner.plain, learner.shares, learner.dtype, learner.temperature = model, shares, torch.float32, 0.8
        learner.accelerator = SimpleNamespace(device=torch.device("cpu"), autocast=nullcontext)
        learner.policy = SimpleNamespace(model=model)
        logps = []
        for pack in batch:
            new, known, weights = learner.logps(pack)
            (new * weights).sum().backward()
            logps += list(zip(weights.tolist(), known.tolist(), new.tolist(), strict=True))
        assert piece("sharing").can_share(model)  # as it was before
        found.append((sorted(logps), [parameter.grad for parameter in model.parameters()]))
    (packed_logps, packed_grads), (plain_logps, plain_grads) = found
    assert np.allclose(packed_logps, plain_logps, atol=1e-5)
    largest = max(float(grad.abs().max()) for grad in plain_grads)
    assert all(torch.allclose(a, b, atol=1e-5 * largest) for a, b in zip(packed_grads, plain_grads, strict=True))


def test_corrections_teach_what_the_expert_says_where_the_model_went(piece: Any) -> None:
    import random

    module, words = piece("corrections"), piece("words")
    said, prompts = (
        ["go", "sit", "go", "go"],
        [[1, 2], [1, 2, 10, 3], [1, 2, 10, 3, 11, 3], [1, 2, 10, 3, 11, 3, 10, 3]],
    )
    numbers = {"go": 10, "sit": 11, "take": 12, "look": 13}
    speech = SimpleNamespace(plain=lambda text: [numbers[text.strip()]] if text.strip() else [], ending=lambda chat: [])
    episode = SimpleNamespace(
        transcript=SimpleNamespace(first="", turns=[SimpleNamespace(action=word, observation="") for word in said]),
        completions=[
            words.said(word, prompt, [numbers[word]], [0.0]) for word, prompt in zip(said, prompts, strict=True)
        ],
    )
    advice = ["go", "take", None, "look"]
    adviser = SimpleNamespace(act=lambda goal, first, turns: advice[len(turns)])
    found, asked, other = module.corrected(episode, {}, adviser, speech, 100, random.Random(0))
    taught = [(one.ids.tolist(), one.ids[one.own].tolist()) for one in found]
    assert taught == [
        ([1, 2, 10, 3, 11, 3, 10, 3, 10], [10]),  # what the expert would have said, too: not the two later ones
        ([1, 2, 10, 3, 12], [12]),
        ([1, 2, 10, 3, 11, 3, 10, 3, 13], [13]),
    ]
    assert (asked, other) == (3, 2)


# --- objective ---


def test_advantages_are_of_a_group_and_equal_rewards_have_none(piece: Any) -> None:
    import torch

    found = piece("objective").advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]]))
    assert found[0].tolist() == pytest.approx([0.866, -0.866, -0.866, 0.866], abs=1e-3)
    assert found[1].tolist() == [0, 0, 0, 0]


def test_the_loss_is_the_policy_gradient_and_a_strange_sampler_weighs_at_most_twice(piece: Any) -> None:
    import torch

    objective = piece("objective")
    sampled = torch.tensor([-1.0, -2.0, -0.5, -0.7])
    new = sampled.clone().requires_grad_()
    weight = torch.tensor([1.0, -1.0, 2.0, 0.0])
    objective.policy_loss(new, sampled, weight, 8.0).backward()
    assert new.grad is not None and new.grad.tolist() == pytest.approx([-1 / 8, 1 / 8, -2 / 8, 0])
    assert float(objective.policy_loss(sampled, sampled - 5.0, weight, 8.0)) == pytest.approx(-2.0 * (1 - 1 + 2) / 8)


def test_a_step_weighs_long_and_short_episodes_alike_and_leaves_equal_groups_out(piece: Any) -> None:
    words = piece("words")

    def episode(reward: float | None, turns: int) -> Any:
        said = [words.said("x", [1] * (3 + 2 * n), [1, 1], [0.0, 0.0]) for n in range(turns)]
        return SimpleNamespace(reward=reward, completions=said, steps=turns, tokens=2 * turns)

    seen: list[Any] = []
    learner = object.__new__(piece("learner").Learner)
    learner.accelerator = SimpleNamespace(num_processes=1, device="cpu")
    learner.policy = SimpleNamespace(limit=100, optimizer=SimpleNamespace(param_groups=[{"lr": 0.0}]))
    learner.batches = lambda sequences: seen.extend(sequences) or []
    groups = [
        [episode(1.0, 2), episode(0.0, 9)],
        [episode(1.0, 3), episode(1.0, 4)],
        [episode(None, 3), episode(0.5, 1)],
    ]
    told = learner.learn(groups, 0.25)
    assert [round(float(one.own.sum() * one.advantage), 3) for one in seen] == [0.707, -0.707]
    assert learner.policy.optimizer.param_groups == [{"lr": 0.25}]
    assert (told["groups"], told["mixed_groups"], told["reward"]) == (3, 0.333, 0.6667)


def test_games_that_failed_before_are_drawn_again_but_few_of_few(piece: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "autorl_rollouts.pool", pool)  # as a workspace has it
    run = object.__new__(piece("train_online").Run)
    run.sizes, run.goals, run.iteration = {"games": 8}, [{}] * 40, 3
    run.known = {n: 1.0 if n < 4 else 0.25 if n < 8 else 0.0 for n in range(24)}
    numbers = run.drawn(0, 20)
    assert len(numbers) == len(set(numbers)) == 8 and numbers == run.drawn(0, 20) != run.drawn(1, 20)
    assert all(4 <= n < 8 for n in numbers[:2]) and all(n >= 24 for n in numbers[2:]), (
        "of twenty, two that were won sometimes"
    )
    run.known = {n: 1.0 if n < 4 else 0.25 if n < 8 else 0.0 for n in range(36)}
    numbers = run.drawn(0, 20)
    assert {4, 5, 6, 7} == {*numbers[:4]} and numbers[4:8] != sorted(numbers[4:8]), "few new ones are left: half"
    run.known = dict.fromkeys(range(40), 1.0)
    assert len(set(run.drawn(0, 3))) == 3  # all are always won: any of them


def test_log_probabilities_are_those_of_every_own_token(piece: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY)
    ids = torch.randint(3, 300, (3, 20), generator=torch.Generator().manual_seed(0))
    own = torch.rand(3, 20, generator=torch.Generator().manual_seed(1)) < 0.3
    own[:, 0] = False
    with torch.no_grad():
        found = piece("objective").token_logps(model, ids, own, 0.7)
        whole = torch.log_softmax(model(ids).logits[:, :-1] / 0.7, -1).gather(2, ids[:, 1:, None])[..., 0]
    assert torch.allclose(found, whole[own[:, 1:]], atol=1e-4)
