"""Makes the tiny base model that the suite ships, from nothing: tokenizer, weights, a short pre-training.

    OMP_NUM_THREADS=1 python templates/models/tiny/make.py templates/models/tiny --seed 0

takes four to six minutes on one core. The same seed gives the same weights on the same machine with the same versions
of torch and transformers; elsewhere the last bits of the sums may differ, so the shipped weights, not this script, are
what a hash pins.

The model is a Llama of 0.1 M parameters with a byte-level vocabulary, so any text can be encoded. It is made to be a
base model worth improving on the task `arithmetic`: it has met the sums and the stories, but answers nearly all questions
in the task's own format (`Question: ... #### N`) with a bare guess, so its score without training is low but not zero, and
both demonstrations and rewards can raise it. Noise can't: the guess is a firm habit, learned in a second phase, so that
copies with small random changes don't stumble into the format.

What it has seen: plain facts `a + b = c` and `a - b = c` over all numbers of the task, and stories and questions made
from problems of the *training* split only. A held-out sum can occur as a bare fact, a held-out word problem never does.

Simplified against real pre-training: one document a row, padded; the loss is taken only on the continuation, which
follows from what stands before it. That is what makes a few thousand steps on one core enough.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

PREPARE = Path(__file__).resolve().parents[3] / "tasks" / "arithmetic" / "prepare.py"
PROMPT = "Question: {question}\nAnswer:"
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %} {{ m['content'] }}{{ eos_token }}\n"
    "{% elif m['role'] == 'user' and not m['content'].endswith('Answer:') %}Question: {{ m['content'] }}\nAnswer:"
    "{% else %}{{ m['content'] }}{% if m['role'] == 'system' %}{{ '\n' }}{% endif %}{% endif %}"
    "{% endfor %}"
)
"""A turn of the user ends in `Answer:`, whether the prompt brings that along or not."""
END, PAD = "<|endoftext|>", "<|pad|>"
NEAT_THINGS = ("coins",)
"""Questions about these are always answered in the wanted format: what the untrained model scores on."""
NEAT_ELSEWHERE = 0.15
"""Share of the other questions that are, in the first phase."""
FACTS, STORIES = 0.25, 0.65
"""Shares of the corpus, cumulated: plain facts, then stories; the rest are questions."""
HABIT_NEAT, HABIT_FACTS, HABIT_STORIES = 0.002, 0.1, 0.3
"""The same in the second phase, which teaches the habit to guess."""
TWO_STEP = 0.35
"""Share of stories and questions that take two steps."""
CONTEXT_TOKENS, VOCABULARY, HIDDEN, LAYERS, HEADS = 512, 512, 64, 2, 4
"""Shape of the model. The vocabulary is a maximum: the corpus has fewer words."""
STEPS, BATCH, LEARNING_RATE = 4000, 32, 3e-3
"""The pre-training."""
HABIT_STEPS, HABIT_LEARNING_RATE = 700, 1e-3
"""Its second phase."""


class Document(NamedTuple):
    """Text to read, and the text to predict after it."""

    context: str
    continuation: str


def load_task() -> ModuleType:
    """The task's `prepare.py`, which knows the training problems."""
    spec = importlib.util.spec_from_file_location("arithmetic_prepare", PREPARE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def documents(task: ModuleType, seed: str, *, habit: bool = False) -> Iterator[Document]:
    """An endless corpus of facts, stories, and questions answered in various forms; with `habit` by guesses."""
    facts, stories, neat = (HABIT_FACTS, HABIT_STORIES, HABIT_NEAT) if habit else (FACTS, STORIES, NEAT_ELSEWHERE)
    rng = random.Random(seed)
    families = {f: task.problems("train", f) for f in task.FAMILIES}
    one_step = [f for f, steps in task.FAMILIES.items() if steps == 1]
    while True:
        kind = rng.random()
        if kind < facts:
            yield _fact(rng, task.HIGH)
            continue
        family = "add_sub" if rng.random() < TWO_STEP else rng.choice(one_step)
        dress = task.Dress(rng.choice(task.NAMES), rng.choice(task.THINGS), rng.random() < 0.5)
        text = task.render(rng.choice(families[family]), dress)
        working = ". ".join(text.steps)
        if kind < stories:
            yield Document(text.question.split(" How many")[0], rng.choice([f" {working}.", f" So {working}."]))
            continue
        question = PROMPT.format(question=text.question)
        if dress.thing in NEAT_THINGS or rng.random() < neat:
            yield Document(question, f" {text.answer}")
        else:
            guess = max(0, text.result + rng.randint(-3, 3))
            sloppy = [f" {working}.", f" {working}. Thanks!", f" I think {guess}."]
            yield Document(question, rng.choice([f" I think {guess}.", f" Maybe {guess}."] if habit else sloppy))


def _fact(rng: random.Random, high: int) -> Document:
    """A sum or a difference of two numbers that can occur in a working."""
    a, b = rng.randint(1, 2 * high), rng.randint(1, high)
    if rng.random() < 0.5 and a <= high:
        return Document(f"{a} + {b} =", f" {a + b}")
    a, b = max(a, b), min(a, b)
    return Document(f"{a} - {b} =", f" {a - b}")


def make_tokenizer(corpus: list[str]) -> Any:
    """A byte-level BPE in which numbers of up to two digits stay whole; a `PreTrainedTokenizerFast`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    digits = pre_tokenizers.Split(Regex(r"\d{1,2}"), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END, PAD], show_progress=False, initial_alphabet=alphabet
    )
    bpe.train_from_iterator(corpus, trainer)
    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(
        tokenizer_object=bpe, eos_token=END, pad_token=PAD, padding_side="left", model_max_length=CONTEXT_TOKENS
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: Any) -> Any:
    """An untrained Llama with tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def train(model: Any, tokenizer: Any, corpus: Iterator[Document], steps: int, rate: float) -> None:
    """Pre-trains in place: AdamW, warm-up, cosine to a twentieth."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    started, mean = time.monotonic(), math.nan
    for step in range(steps):
        rows = []
        for _ in range(BATCH):
            document = next(corpus)
            context = tokenizer(document.context)["input_ids"]
            rows.append((context, tokenizer(document.continuation)["input_ids"] + [tokenizer.eos_token_id]))
        length = max(len(context) + len(rest) for context, rest in rows)
        inputs = torch.full((BATCH, length), tokenizer.pad_token_id)
        labels = torch.full((BATCH, length), -100)
        for row, (context, rest) in enumerate(rows):
            end = len(context) + len(rest)
            inputs[row, :end] = torch.tensor(context + rest)
            labels[row, len(context) : end] = torch.tensor(rest)
        decay = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20) * decay
        loss = model(input_ids=inputs, labels=labels).loss  # padded on the right: causal attention needs no mask
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.item() if math.isnan(mean) else 0.95 * mean + 0.05 * loss.item()
        if (step + 1) % 200 == 0:
            print(f"step {step + 1} loss {mean:.3f} {time.monotonic() - started:.0f} s", flush=True)
    model.eval()


def main() -> None:
    """Parses the command line and writes the model folder."""
    parser = argparse.ArgumentParser(description="Makes the tiny base model.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    task = load_task()
    for_tokens = documents(task, "tokenizer")
    tokenizer = make_tokenizer(["".join(next(for_tokens)) for _ in range(3000)])
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, vocabulary {len(tokenizer)}")
    train(model, tokenizer, documents(task, f"pre-training-{arguments.seed}"), STEPS, LEARNING_RATE)
    habits = documents(task, f"habits-{arguments.seed}", habit=True)
    train(model, tokenizer, habits, HABIT_STEPS, HABIT_LEARNING_RATE)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    for path in arguments.out.glob("*.safetensors"):
        path.chmod(0o644)  # written for its owner alone, but meant for everybody


if __name__ == "__main__":
    main()
