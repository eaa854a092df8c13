"""What the scripted experts compute in a way of their own, on a GPU, against transformers: sampling by rows with CUDA graphs, and
training behind a shared beginning. A random model of SmolLM2-135M's shape in bfloat16; `pytest -s` prints speeds. Skips by name without a GPU.
"""

from __future__ import annotations

import importlib
import queue
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import needs
import numpy as np
import pytest
from helpers import PATIENCE_S

from autorl_hpc.sandbox.prove import cuda_works

pytestmark = needs.needs("gpu", cuda_works(), "no GPU here")

REPO = Path(__file__).resolve().parents[2]
DEVICE = "cuda"
SHAPE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}  # fmt: skip
KINDS, EXAMPLES, TALKS, TURNS, NEW = 6, 1600, 256, 3, 40


@pytest.fixture(scope="module")
def piece() -> Iterator[Any]:
    scripted = REPO / "templates" / "agents" / "scripted"
    before, sys.path[:0] = sys.path[:], [str(scripted), str(scripted / "learner")]
    try:
        yield importlib.import_module
    finally:
        sys.path[:] = before


@pytest.fixture(scope="module")
def model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True)
    return LlamaForCausalLM(config).to(DEVICE)


def speech(end: int) -> Any:
    """Words without a tokenizer."""
    return SimpleNamespace(
        ends=[end], pad=0, stop=(), long_stops=False, stopping=list, text=lambda ids: ("", end in ids), tokenizer=None
    )


def conversations(seed: int) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    examples = [draw.integers(9, 49000, size=EXAMPLES).tolist() for _ in range(KINDS)]
    return [examples[n % KINDS] + draw.integers(9, 49000, size=NEW).tolist() for n in range(TALKS)]


def talk(sampler: Any, prompts: list[list[int]], turns: int) -> tuple[list[Any], float]:
    """Answers of all turns, and the seconds that the later ones took."""
    draw = np.random.default_rng(5)
    heard, found, begun = [list(prompt) for prompt in prompts], [], 0.0
    told: queue.Queue[tuple[int, Any]] = queue.Queue()
    sampler.turns = turns
    stream = sampler.stream(None, 0, lambda *answer: told.put(answer))
    for turn in range(turns):
        begun = time.monotonic() if turn == 1 else begun
        stream.ask([(n * turns + turn, prompt) for n, prompt in enumerate(heard)])
        answers = dict(told.get(timeout=PATIENCE_S) for _ in heard)
        assert -1 not in answers, answers[-1]
        for n, prompt in enumerate(heard):
            answer = answers[n * turns + turn].text
            found.append(answer)
            prompt += [*answer.ids.tolist(), *draw.integers(9, 49000, size=NEW).tolist()]
    stream.close()
    return found, time.monotonic() - begun


@pytest.mark.timeout(600)
def test_graphs_answer_as_without_and_as_transformers(piece: Any, model: Any) -> None:
    import torch

    module = piece("sampler_rows")
    model.eval()
    sampler = module.RowSampler(model, speech(1), 8, TALKS, half=True)
    assert sampler.check(model) is None
    assert sampler.decoder.graphs, "no CUDA graphs here"
    prompts = conversations(0)
    sampler.begin(0, 1.0)
    with_graphs, seconds = talk(sampler, prompts, TURNS)
    print(f"{TALKS * (TURNS - 1) / seconds:.0f} answers of 8 tokens a second, {sampler.decoder.width} columns")
    assert sampler.decoder.graphs
    sampler.decoder.graphs = False
    sampler.begin(0, 1.0)
    without, seconds = talk(sampler, prompts, TURNS)
    print(f"{TALKS * (TURNS - 1) / seconds:.0f} without graphs")
    same = np.mean(
        [one.ids[0] == other.ids[0] for one, other in zip(with_graphs[:TALKS], without[:TALKS], strict=True)]
    )
    assert same > 0.9  # but for rounding at the border of a draw
    for answer in with_graphs[:3] + with_graphs[-3:]:  # of the last turns, whose cache was there
        ids = torch.tensor([[*answer.prompt.tolist(), *answer.ids.tolist()]], device=DEVICE)
        with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
            logps = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), -1)
        wanted = logps[len(answer.prompt) - 1 : -1].gather(1, ids[0, len(answer.prompt) :, None])[:, 0]
        assert np.abs(wanted.cpu().numpy() - answer.logps).mean() < 0.1


@pytest.mark.timeout(600)
def test_training_behind_a_shared_beginning_is_that_of_each_episode(piece: Any, model: Any) -> None:
    import torch

    batches, learner_of = piece("batches"), piece("learner").Learner
    draw = np.random.default_rng(1)
    made = []
    for prompt in conversations(1)[:32]:
        ids = np.array(prompt + draw.integers(9, 49000, size=int(draw.integers(80, 400))).tolist(), np.int32)
        own = np.arange(len(ids)) % 9 == 0
        own[: EXAMPLES + NEW] = False
        made.append(batches.Tokens(ids, own, np.zeros(len(ids), np.float32), 1.0))
    found = {}
    for shares in (True, False):
        learner = object.__new__(learner_of)
        learner.plain, learner.shares, learner.dtype, learner.temperature = model, shares, torch.bfloat16, 1.0
        learner.accelerator = SimpleNamespace(
            device=torch.device(DEVICE), autocast=lambda: torch.autocast(DEVICE, torch.bfloat16)
        )
        learner.policy = SimpleNamespace(model=model)
        packs = batches.packs(made, 10_000, 0, shared=shares)
        for _ in range(2):  # the second time is measured
            model.zero_grad()
            begun = time.monotonic()
            losses = []
            for pack in packs:
                new = learner.logps(pack)[0]
                (new.sum() / 1000).backward()
                losses.append(new.detach())
            norm = torch.stack([one.grad.float().norm() for one in model.parameters()]).norm().item()
        seconds = time.monotonic() - begun
        tokens = sum(len(one.ids) for one in made)
        print(
            f"shared {shares}: {tokens / seconds:.0f} tokens/s, {sum(len(p.ids) for p in packs) / seconds:.0f} computed"
        )
        grads = torch.cat([one.grad.float().flatten()[:5000] for one in model.parameters()])
        found[shares] = (torch.cat(losses).sort().values.cpu(), norm, grads.cpu())
    (one, norm, grads), (other, wanted, plain) = found[True], found[False]
    assert float((one - other).abs().mean()) < 0.05
    assert abs(norm - wanted) < 0.05 * wanted
    assert float(torch.nn.functional.cosine_similarity(grads, plain, dim=0)) > 0.98
