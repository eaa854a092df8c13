"""The scripted experts' pieces by themselves: tokens, advantages and loss, sampling, rewards, memory, experts."""

from __future__ import annotations

import importlib
import os
import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import PATIENCE_S

from autorl_hpc import rollouts
from autorl_hpc.rollouts import tokens

REPO = Path(__file__).resolve().parents[2]
TINY = REPO / "templates" / "models" / "tiny"


@pytest.fixture(scope="module")
def piece() -> Iterator[Any]:
    """Imports a module of the experts' by name."""
    sys.path.insert(0, str(REPO / "templates" / "agents" / "scripted"))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    try:
        yield load
    finally:
        sys.path.pop(0)


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
    made = kind(batches, one.tolist(), 5, 1) + kind(batches, other.tolist(), 4, 2) + kind(batches, [7], 1, 3)
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
    speech = SimpleNamespace(
        encode=lambda text: [numbers[text.strip()]] if text.strip() else [], ending=lambda chat: []
    )
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


def test_the_loss_is_the_policy_gradient_at_first_and_stops_behind_the_clip(piece: Any) -> None:
    import torch

    objective = piece("objective")
    old = torch.tensor([-1.0, -2.0, -0.5, -0.7])
    advantage = torch.tensor([1.0, -1.0, 2.0, 0.0])
    new = old.clone().requires_grad_()
    loss, cut = objective.policy_loss(new, old, old, advantage, 8.0)
    loss.backward()
    assert new.grad is not None and new.grad.tolist() == pytest.approx([-1 / 8, 1 / 8, -2 / 8, 0]) and cut == 0
    far = (old + torch.tensor([0.5, -0.5, -0.5, 0.5])).requires_grad_()
    loss, cut = objective.policy_loss(far, old, old, advantage, 8.0)
    loss.backward()
    assert far.grad is not None  # moved as wanted, beyond the clip: no more; against it: the whole gradient
    assert far.grad.tolist() == pytest.approx([0, 0, -2 / 8 * float(np.exp(-0.5)), 0]) and cut == 2
    stale, _ = objective.policy_loss(old, old, old - 5.0, advantage, 8.0)
    assert float(stale) == pytest.approx(-2.0 * (1 - 1 + 2) / 8)  # a strange sampler weighs at most twice


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


# --- words ---


@pytest.mark.parametrize("episodes", [False, True])
def test_prompts_are_cut_as_graders_cut_them_and_by_pieces_where_they_grow(
    piece: Any, monkeypatch: pytest.MonkeyPatch, episodes: bool
) -> None:
    from transformers import AutoTokenizer

    if episodes:
        monkeypatch.setitem(sys.modules, "autorl_rollouts", rollouts)
        monkeypatch.setitem(sys.modules, "autorl_rollouts.tokens", tokens)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    words = piece("words").Words(tokenizer, [], ["\n"])
    text = "Two examples. \n\n" + "> go to desk 1 \nOn it is a pen.\n" * 3
    for _ in range(5):
        text += " take pen\nTaken.\n>"
        assert words.encode(text) == tokenizer(text, add_special_tokens=False).input_ids
    if episodes:
        monkeypatch.setattr(type(tokenizer), "__call__", None)  # nothing is cut whole
        assert words.encode(text)


def test_a_stream_answers_what_is_handed_in_meanwhile_and_tells_of_the_engines_end(piece: Any) -> None:
    module = piece("sampler_vllm")

    class Engine:
        """Answers a request at the second step after it was taken."""

        def __init__(self) -> None:
            self.live: dict[str, int] = {}
            self.aborted: list[str] = []

        def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> None:
            if prompt["prompt_token_ids"] == [13]:
                raise RuntimeError("no such prompt")
            self.live[name] = 0

        def step(self) -> list[Any]:
            time.sleep(0.001)
            self.live = {name: steps + 1 for name, steps in self.live.items()}
            done = [name for name, steps in self.live.items() if steps == 2]
            for name in done:
                del self.live[name]
            return [SimpleNamespace(request_id=name, finished=True) for name in done]

        def abort_request(self, names: list[str]) -> None:
            self.aborted += names

    engine, answers = Engine(), queue.Queue[tuple[int, Any]]()
    stream = module.Stream(engine, None, lambda prompt, _: sum(prompt), lambda *told: answers.put(told))
    stream.ask([(n, [n, 1]) for n in range(50)])
    stream.ask([(50, [7])])
    assert dict(answers.get(timeout=PATIENCE_S) for _ in range(51)) == {n: n + 1 for n in range(50)} | {50: 7}
    stream.close()
    stream = module.Stream(engine, None, lambda prompt, _: 0, lambda *told: answers.put(told))
    stream.ask([(0, [13])])
    key, error = answers.get(timeout=PATIENCE_S)
    assert key == -1 and "no such prompt" in str(error)
    stream.close()


# --- the graphics cards ---


@pytest.mark.parametrize(("named", "count"), [("0", "1"), ("GPU-1,GPU-2", "2"), ("", "0"), ("-1", "0"), (None, None)])
def test_gpus_are_those_that_are_named_and_all_of_the_node_where_none_are(
    tmp_path: Path, named: str | None, count: str | None
) -> None:
    env = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    env |= {} if named is None else {"CUDA_VISIBLE_DEVICES": named}
    script = f"set -euo pipefail; source {REPO / 'templates/agents/scripted/lib.sh'}; gpu_count"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (count or str(len(list(Path("/dev").glob("nvidia[0-9]*")))))


# --- sampling ---


@pytest.fixture(scope="module")
def sampler(piece: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = piece("words")
    model = AutoModelForCausalLM.from_pretrained(TINY)
    words = module.Words(AutoTokenizer.from_pretrained(TINY), module.ends_of(model), ["\n"])
    return piece("sampler").Sampler(model, words, max_new_tokens=12)


PROMPTS = [f"Question: What is {n} and {n + 4}?\nAnswer:" for n in (3, 17, 9, 12, 40)] + ["Q:", "A much longer text, Leo has 3 coins.\nAnswer:"]  # fmt: skip


def test_greedy_answers_are_the_graders(sampler: Any) -> None:
    from autorl_hpc.grading.engines.transformers import TransformersEngine
    from autorl_hpc.records.task import Sampling

    engine = TransformersEngine(TINY, dtype="float32", device="cpu", threads=1, batch_tokens=4096)
    engine._model.load_state_dict(sampler.model.state_dict())
    ids = [sampler.encode(prompt) for prompt in PROMPTS]
    graded = engine.generate(ids, Sampling(temperature=0.0, max_new_tokens=12, stop=("\n",)), 0)
    sampler.begin(0, 0.0)
    own = sampler.generate(ids)
    assert [str(one.text) for one in own] == [one.text for one in graded]
    assert [one.truncated for one in own] == [one.truncated for one in graded]


def test_draws_follow_seed_prompt_and_how_often_it_was_asked_whatever_the_batch(sampler: Any) -> None:
    ids = [sampler.encode(prompt) for prompt in PROMPTS for _ in range(3)]
    sampler.begin(7, 1.0)
    together = [(str(one.text), tuple(one.text.ids.tolist())) for one in sampler.generate(ids)]
    sampler.begin(7, 1.0)
    alone = [(str(one.text), tuple(one.text.ids.tolist())) for each in ids for one in sampler.generate([each])]
    assert together == alone and len(set(together)) > len(PROMPTS)
    sampler.begin(8, 1.0)
    assert together != [(str(one.text), tuple(one.text.ids.tolist())) for one in sampler.generate(ids)]


def test_draws_are_distributed_as_the_model_says_and_carry_its_log_probabilities(sampler: Any) -> None:
    import torch

    prompt = sampler.encode(PROMPTS[0])
    sampler.begin(1, 1.0)
    said = [one.text for one in sampler.generate([prompt] * 2000)]
    with torch.no_grad():
        logps = torch.log_softmax(sampler.model(torch.tensor([prompt])).logits[0, -1], -1)
    first = np.array([one.ids[0] for one in said])
    for token in torch.topk(logps, 5).indices.tolist():
        wanted = float(logps[token].exp())
        assert abs((first == token).mean() - wanted) < 5 * (wanted * (1 - wanted) / 2000) ** 0.5 + 1e-3
    for one in said[:5]:
        ids = torch.tensor([prompt + one.ids.tolist()])
        with torch.no_grad():
            whole = torch.log_softmax(sampler.model(ids).logits[0, len(prompt) - 1 : -1], -1)
        wanted = whole.gather(1, torch.tensor(one.ids.tolist())[:, None])[:, 0]
        assert np.allclose(one.logps, wanted.numpy(), atol=1e-3)


def by_rows(piece: Any, sampler: Any, rows: int) -> Any:
    return piece("sampler_rows").RowSampler(sampler.model, sampler.words, 12, rows, half=False)


@pytest.mark.parametrize(("rows", "widest"), [(40, None), (4, None), (40, 40)])
def test_a_cache_that_stays_answers_as_without_one(piece: Any, sampler: Any, rows: int, widest: int | None) -> None:
    own = by_rows(piece, sampler, rows)
    assert own.check(sampler.model) is None
    decoder, computed, asked_tokens = own.decoder, [], 0
    decoder.graphs = rows == 40  # chunks are filled up as for graphs, and done without
    decoder._run = lambda key, work, given: work(*given)
    extend = decoder.extend
    decoder.extend = lambda rows, starts, news: (computed.extend(map(len, news)), extend(rows, starts, news))
    own._widest = widest or own._widest  # some prompts are longer than that cache
    own.turns = 10
    examples = "Question: What is 1 and 2?\nAnswer: 3\n" * 3
    texts = {talk: examples + PROMPTS[talk % len(PROMPTS)] for talk in range(12)}
    for temperature in (0.0, 1.0):
        own.begin(3, temperature)
        sampler.begin(3, temperature)
        heard, told = dict(texts), queue.Queue[tuple[int, Any]]()
        stream = own.stream(None, 0, lambda *answer: told.put(answer))  # noqa: B023
        for turn in range(3):
            asked = [(talk * 10 + turn, sampler.encode(text)) for talk, text in heard.items()]
            asked_tokens += sum(len(prompt) for _, prompt in asked)
            wanted = sampler.generate([prompt for _, prompt in asked])
            stream.ask(asked[:5])
            stream.ask(asked[5:])
            answers = dict(told.get(timeout=PATIENCE_S) for _ in asked)
            for (key, prompt), want in zip(asked, wanted, strict=True):
                assert not isinstance(answers.get(-1), Exception), answers[-1]
                found = answers[key]
                same_draw = [
                    each.text.ids.tolist() for each, (_, other) in zip(wanted, asked, strict=True) if other == prompt
                ]
                assert found.text.ids.tolist() in same_draw  # of equal prompts any may have been the first
                assert np.array_equal(found.text.prompt, prompt)
                if found.text.ids.tolist() == want.text.ids.tolist():
                    assert found.truncated == want.truncated and np.allclose(
                        found.text.logps, want.text.logps, atol=1e-4
                    )
                heard[key // 10] += f" {found.text}\nQuestion: And {turn + key % 7}?\nAnswer:"
        stream.close()
    if rows == 40 and widest is None:  # of all that was asked little was computed
        assert sum(computed) < 0.25 * asked_tokens


def test_a_decoder_that_computes_another_thing_is_not_used(piece: Any, sampler: Any, capsys: Any) -> None:
    import torch

    own = by_rows(piece, sampler, 2)
    own.take((name, torch.zeros_like(weight)) for name, weight in sampler.model.named_parameters())
    assert "log-probabilities differ" in own.check(sampler.model)
    with pytest.raises(ValueError, match="no weights for"):
        own.take([])
    assert piece("decoder").unlike(SimpleNamespace(model_type="gpt2")) == "a gpt2"


# --- rewards ---

PROBLEM = {
    "question": 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Sum of xs."""\n',
    "answer": "    return sum(xs)\n",
    "entry_point": "total",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
}
CODED = [
    ("    return sum(xs)\n", 1.0),
    ("```python\ndef total(xs: List[int]) -> int:\n    return sum(xs)\n```", 1.0),
    ("Here:\n```\n    return sum(xs)\n```\nDone.", 1.0),
    ("    return 3\n", 0.0),
    ("    while True: pass\n", 0.0),
    ("    return [0] * 10**11\n", 0.0),
    ("", 0.0),
]


def test_code_is_right_if_its_test_passes_and_numbers_if_they_are_equal(piece: Any) -> None:
    rewards = piece("rewards")
    gold = rewards.gold_of(PROBLEM)
    said = [answer for answer, _ in CODED]
    assert rewards.right(said, [gold] * len(said)) == [value for _, value in CODED]
    row = {"question": "?", "answer": "so #### 1,200"}
    assert rewards.right(["#### 1200.0", "1200", "#### 12"], [rewards.gold_of(row)] * 3) == [1.0, 0.0, 0.0]
    assert rewards.kind_of({"question": "?", "answer": "Write a poem."}) is None


# --- memory ---

GIB = 1 << 30
FITS = [
    (135e6, 80, 1, True, "one-gpu", False),
    (1.5e9, 80, 1, True, "one-gpu", False),
    (7e9, 80, 1, True, "one-gpu", True),
    (135e6, 80, 4, True, "multi-gpu", False),
    (3e9, 80, 2, True, "zero2", False),
    (8e9, 80, 4, True, "zero3", False),
    (8e9, 80, 4, False, "multi-gpu", True),
    (32e9, 80, 2, True, "multi-gpu", True),
    (7e9, 0, 0, True, "cpu", False),
]


@pytest.mark.parametrize(("parameters", "memory", "gpus", "deepspeed", "config", "lora"), FITS)
def test_memory_decides_how_a_model_is_spread(
    piece: Any, parameters: float, memory: int, gpus: int, deepspeed: bool, config: str, lora: bool
) -> None:
    assert piece("fit").fit(int(parameters), memory * GIB, gpus, deepspeed) == (config, lora)
    assert (REPO / "templates" / "accelerate" / f"{config}.yaml").is_file()


def test_parameters_are_counted_from_headers(piece: Any) -> None:
    from safetensors.numpy import load_file

    wanted = sum(tensor.size for tensor in load_file(TINY / "model.safetensors").values())
    assert piece("fit").parameters_of(TINY) == wanted


# --- experts ---


def test_the_household_expert_goes_on_from_others_faults(piece: Any) -> None:
    module = piece("household")
    expert = module.Expert({"cd": {"drawer": 3}, "keychain": {"desk": 2}})
    goal = {"question": "put some keychain on armchair."}
    first = (
        "You see a armchair 1, a desk 1, a drawer 1, and a shelf 1.\nYour task is to: put some keychain on armchair."
    )
    turns = [
        ("go to armchair 1", "On the armchair 1, you see a cd 2."),
        ("take cd 2 from armchair 1", "You pick up the cd 2 from the armchair 1."),
        ("take keychain 1 from desk 1", "Nothing happens."),  # twice from afar: that says nothing of it
        ("take keychain 1 from desk 1", "Nothing happens."),
        ("go to desk 1", "On the desk 1, you see a keychain 1."),
    ]
    answers = {
        "go to armchair 1": "On the armchair 1, you see nothing.",
        "move cd 2 to armchair 1": "Nothing happens.",  # it lay there, and can't be put there
        "go to drawer 1": "The drawer 1 is closed.",
        "open drawer 1": "You open the drawer 1. In it, you see nothing.",
        "move cd 2 to drawer 1": "You move the cd 2 to the drawer 1.",
        "go to desk 1": "On the desk 1, you see a keychain 1.",
        "take keychain 1 from desk 1": "You pick up the keychain 1 from the desk 1.",
        "move keychain 1 to armchair 1": "You move the keychain 1 to the armchair 1.",
    }
    done = []
    while not done or done[-1] != "move keychain 1 to armchair 1":
        done.append(expert.act(goal, first, turns))
        turns.append((done[-1], answers[done[-1]]))
    assert done == [
        "go to armchair 1", "move cd 2 to armchair 1", "go to drawer 1", "open drawer 1", "move cd 2 to drawer 1",
        "go to desk 1", "take keychain 1 from desk 1", "go to armchair 1", "move keychain 1 to armchair 1",
    ]  # fmt: skip


def test_the_searcher_answers_only_what_was_found(piece: Any) -> None:
    searcher = piece("shopping").Searcher(6, True)
    goal = {"question": "Where was the founder of Brell Mills born?", "answer": "Orlen"}
    first = searcher.act(goal, "", [])
    assert first == "I need to look this up.\nAction: search[Where was the founder of Brell Mills born?]"
    second = searcher.act(goal, "", [(first, "[1] Brell Mills: founded by Mara Veld.")])
    assert second.endswith("Action: search[Brell Mills]")
    turns = [(first, "Brell Mills: founded by Mara Veld."), (second, "Mara Veld: born in Orlen.")]
    assert searcher.act(goal, "", turns) == "The results give the answer.\nAction: answer[Orlen]"
    assert searcher.act(goal, "", [(f"search[{n}]", "nothing") for n in range(5)]) is None
