"""How the scripted experts sample: prompts, streams, greedy answers and draws, a cache that stays."""

from __future__ import annotations

import queue
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pieces
import pytest
from helpers import PATIENCE_S
from pieces import TINY

from autorl_hpc import rollouts
from autorl_hpc.rollouts import episodes as tokens

piece = pieces.piece


# --- words ---


@pytest.mark.parametrize("episodes", [False, True])
def test_prompts_are_cut_as_graders_cut_them_and_by_pieces_where_they_grow(
    piece: Any, monkeypatch: pytest.MonkeyPatch, episodes: bool
) -> None:
    from transformers import AutoTokenizer

    if episodes:
        monkeypatch.setitem(sys.modules, "autorl_rollouts", rollouts)
        monkeypatch.setitem(sys.modules, "autorl_rollouts.episodes", tokens)
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
    from autorl_hpc.records.experiment import GraderSpec
    from autorl_hpc.records.task import Sampling

    engine = TransformersEngine(TINY, GraderSpec(device="cpu", threads=1, batch_tokens=4096), "float32")
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
