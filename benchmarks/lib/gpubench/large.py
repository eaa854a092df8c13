"""A model of random weights in the shape of Qwen2.5: hashing, the engine's start, swaps, generation beside a bare call, memory and sleep;
and whether answers depend on what was asked before."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from autorl_hpc.files.checkpoint import TensorSpec, content_hash, file_sha256, hash_span, tensors_of
from autorl_hpc.grading.engines.weights_cache import read_checkpoint
from autorl_hpc.records.task import Sampling
from gpubench.figures import Figures
from gpubench.starting import start
from gpubench.usage import Usage, used_bytes, wait_until_free
from gpubench.world import World

if TYPE_CHECKING:
    from autorl_hpc.rollouts.engine import ServingEngine

SHAPES = {
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "toy": (64, 128, 2, 4, 2, 49152, True),
}
"""Qwen2.5's: hidden, intermediate, layers, heads, heads of keys and values, vocabulary, tied."""
SHARD_BYTES = 4_000_000_000
LAST = "model.norm.weight"
"""Stands in a shard of its own: by it two checkpoints differ, and share the rest by hard links."""
ROUNDS = 5
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 512, 256, 200
ASKED, KNOWN = 48, 49152
SLEEP_AFTER_S, ASLEEP_LIMIT_S = 10.0, 60.0
THREADS = 8
Part = tuple[str, str, tuple[int, ...], str]


class Made(World):
    """A world whose base model was made here."""

    folder: Path

    @property
    def base(self) -> Path:
        return self.folder


def measure(world: World, figures: Figures) -> None:
    """All but the last: of the made model. Its tokenizer is that of the world's base model."""
    shape, work = world.options.shape, world.options.work
    made = Made(world.options)
    made.folder = work / f"large-{shape}"
    begun = time.monotonic()
    size = _write(made.folder, SHAPES[shape], world.options.base or world.base)
    figures.say(f"{shape}: {size / 1e9:.1f} GB made and written in {time.monotonic() - begun:.1f} s")
    first = _hashing(made.folder, figures, shape)
    taken = [_reading(made.folder, first) for _ in range(2)]
    figures.show(
        f"{shape}: read and verified as the engine does, alone", taken, "s", note=f"{size / min(taken) / 1e6:.0f} MB/s"
    )
    other, second = _other(made.folder, work / f"large-{shape}-other")
    begun = time.monotonic()
    engine = _engine(made, made.folder)
    try:
        figures.show(f"{shape}: start of the engine, as its cache was found", time.monotonic() - begun, "s")
        for number in range(ROUNDS + 1):
            folder, wanted = ((made.folder, first), (other, second))[number % 2]
            begun = time.monotonic()
            loaded = engine.load(folder, wanted)
            wall = time.monotonic() - begun
            place = "the page cache" if number < 2 else "the engine's own memory"
            told = f"load {loaded.load_s:.2f}, swap {loaded.swap_s:.2f}"
            figures.show(f"{shape}: load and swap {number + 1}, from {place}", wall, "s", below=5.0, note=told)
        own = _rates(engine, figures, shape)
        if world.options.engine == "vllm":
            _sleep(engine, figures, shape)
    finally:
        close = getattr(engine, "close", None)
        if close is not None:
            close()
    if world.options.reference == "none":
        return
    wait_until_free()
    job = {"kind": "generate", "prompts": _prompts(_count(shape)), "seed": 0, "repeat": 3, "dtype": "bfloat16"}
    sampling = Sampling(max_new_tokens=NEW_TOKENS).model_dump(mode="json")
    bare = start(made, figures, f"bare-{shape}", [{**job, "sampling": sampling}])
    figures.show(f"{shape}: start of a bare LLM, as its cache was found", bare.parts.get("engine_s") or "failed", "s")
    rates = [line["tokens"] / line["seconds"] for line in bare.told[0] if line["event"] == "generated"][1:]
    if rates:
        figures.show(f"{shape}: the same prompts by a bare LLM.generate", rates, "tokens/s")
        figures.show(f"{shape}: the suite's generation against it", 100 * median(own) / median(rates), "%", above=90)


def _reading(folder: Path, wanted: str) -> float:
    """Seconds; what was read is gone before they end."""
    begun = time.monotonic()
    read_checkpoint(folder, wanted, frozenset())
    return time.monotonic() - begun


def _sleep(engine: ServingEngine, figures: Figures, shape: str) -> None:
    """What the GPU holds awake and asleep, and how long the first answer after it takes."""
    held = used_bytes()
    if held is None:
        figures.missing(f"{shape}: GPU memory", "NVML can't tell")
        return
    figures.show(f"{shape}: GPU memory in use, awake", held / 2**30, "GiB")
    deadline, left = time.monotonic() + ASLEEP_LIMIT_S, held
    while left > held - 2**30 and time.monotonic() < deadline:
        time.sleep(0.5)
        left = used_bytes() or held
    time.sleep(2.0)  # it may be giving back more
    figures.show(f"{shape}: asleep", (used_bytes() or held) / 2**30, "GiB")
    begun = time.monotonic()
    engine.generate(_prompts(1, 9), Sampling(max_new_tokens=1), 0)
    figures.show(f"{shape}: the first token of an answer that wakes it", time.monotonic() - begun, "s")


def before(world: World, figures: Figures) -> None:
    """How many of 48 greedy answers are equal when they are asked again: with the prefix cache as it is, after a load of the same
    checkpoint, which returns early, and after a swap there and back, which empties the cache."""
    base = world.options.base or world.base
    wanted = content_hash(_digests(base, 1))
    other, second = _other(base, world.options.work / "before-other", LAST)
    engine = _engine(world, base, workers=1)
    try:
        engine.load(base, wanted)
        prompts = [engine.encode(f"{'Here is a question about numbers. ' * 12}What is {n} times {n + 3}? Explain.") for n in range(ASKED)]  # fmt: skip
        others = [engine.encode(f"{'Here is a question about numbers. ' * 12}Which town is number {n}?") for n in range(ASKED)]  # fmt: skip
        sampling = Sampling(max_new_tokens=64)

        def told(what: str, prepare: Callable[[], Any] | None = None) -> None:
            if prepare is not None:
                prepare()
            again = [answer.text for answer in engine.generate(prompts, sampling, 0)]
            same = sum(a == b for a, b in zip(first, again, strict=True))
            figures.show(f"of {ASKED} answers equal to the first time's: {what}", same, "")

        first = [answer.text for answer in engine.generate(prompts, sampling, 0)]
        told("asked again at once")
        told("behind 48 other prompts", lambda: engine.generate(others, sampling, 0))
        told("behind a load of the same checkpoint (returns early)", lambda: engine.load(base, wanted))
        told("behind a swap there and back (empties the cache)", lambda: (engine.load(other, second), engine.load(base, wanted)))  # fmt: skip
        told("the same again", lambda: (engine.load(other, second), engine.load(base, wanted)))
    finally:
        close = getattr(engine, "close", None)
        if close is not None:
            close()


def _engine(world: World, base: Path, workers: int | str = "auto") -> ServingEngine:
    from autorl_hpc.grading.engines.transformers import TransformersEngine
    from autorl_hpc.grading.engines.vllm import VllmEngine
    from autorl_hpc.records.experiment import GraderSpec

    if world.options.engine == "transformers":
        return TransformersEngine(base, GraderSpec(device="cpu", threads=0), "bfloat16")
    spec = GraderSpec.model_validate(
        {**world.grader, "workers_per_gpu": workers, "cache_gib": 40, "sleep_after_s": SLEEP_AFTER_S}
    )
    return VllmEngine(base, spec, "bfloat16", log=world.options.work / f"engine-{base.name}.log")


def _rates(engine: ServingEngine, figures: Figures, shape: str) -> list[float]:
    """The suite's tokens a second, each time for other prompts; the first time warms up."""
    rates, busy = [], 0.0
    prompts: list[list[int]] = []
    for number in range(3):
        prompts = _prompts(_count(shape), number)
        with Usage() as usage:
            begun = time.monotonic()
            answers = engine.generate(prompts, Sampling(max_new_tokens=NEW_TOKENS), number)
            rates.append(sum(answer.tokens for answer in answers) / (time.monotonic() - begun))
        busy = usage.share() or 0.0
    what = f"{shape}: {len(prompts)} prompts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new, by the suite's engine"
    figures.show(what, rates[1:], "tokens/s", note=f"GPU busy {100 * busy:.0f} % by NVML")
    return rates[1:]


def _count(shape: str) -> int:
    return 2 if shape == "toy" else PROMPTS


def _prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1000, KNOWN) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def _hashing(folder: Path, figures: Figures, shape: str) -> str:
    """Seconds of hashing files, as `verify_model` does, and tensors, as content hashes are made; the content hash."""
    files = [path for path in sorted(folder.iterdir()) if path.suffix == ".safetensors"]
    size = sum(path.stat().st_size for path in files)
    for threads in (1, THREADS):
        begun = time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(file_sha256, files))
        taken = time.monotonic() - begun
        what = f"{shape}: sha256 of all files, as `verify_model` does, {threads} thread{'s' if threads > 1 else ''}"
        figures.show(what, taken, "s", note=f"{size / taken / 1e6:.0f} MB/s, {len(files)} files")
    found: list[Part] = []
    for threads in (1, THREADS):
        begun = time.monotonic()
        found = _digests(folder, threads)
        taken = time.monotonic() - begun
        what = f"{shape}: content hash, tensor by tensor, {threads} thread{'s' if threads > 1 else ''}"
        figures.show(what, taken, "s", note=f"{size / taken / 1e6:.0f} MB/s")
    return content_hash(found)


def _digests(folder: Path, threads: int) -> list[Part]:
    def one(spec: TensorSpec) -> Part:
        fd = os.open(folder / spec.file, os.O_RDONLY)
        try:
            return spec.name, spec.dtype, spec.shape, hash_span(fd, spec.begin, spec.end)
        finally:
            os.close(fd)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(one, tensors_of(folder)))


def _other(folder: Path, place: Path, name: str = LAST) -> tuple[Path, str]:
    """A checkpoint that differs in one norm; its content hash."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (own,) = {spec.file for spec in tensors_of(folder) if spec.name == name}
    for path in folder.iterdir():
        if path.name == own:
            tensors = load_file(path)
            tensors[name] = (tensors[name].float() * torch.linspace(0.7, 1.3, len(tensors[name]))).to(
                tensors[name].dtype
            )
            save_file(tensors, place / own, {"format": "pt"})
        elif path.is_file():
            try:
                os.link(path, place / path.name)
            except OSError:  # another file system
                shutil.copy(path, place / path.name)
    return place, content_hash(_digests(place, THREADS))


def _write(folder: Path, shape: Sequence[Any], tokenizer: Path) -> int:
    """Config, the tokenizer of another model, and weights; bytes of weights."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    hidden, inner, layers, heads, kv_heads, words, tied = shape
    config = Qwen2Config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=words, tie_word_embeddings=tied, max_position_embeddings=8192,
        dtype="bfloat16", architectures=["Qwen2ForCausalLM"], bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    for path in tokenizer.iterdir():
        if path.name.startswith(("tokenizer", "special_tokens", "vocab", "merges")):
            shutil.copy(path, folder)
    with torch.device("meta"):
        named = dict(Qwen2ForCausalLM(config).named_parameters())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    shard: dict[str, Any] = {}
    index: dict[str, str] = {}
    size = 0

    def close() -> None:
        file = f"model-{len(set(index.values())) + 1:05d}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        index.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, meta in named.items():
        values = torch.randn(meta.shape, device=device, dtype=torch.bfloat16)
        values = values * 0.02 if meta.dim() > 1 or name.endswith("bias") else torch.ones_like(values)
        if shard and (name == LAST or sum(one.nbytes for one in shard.values()) + values.nbytes > SHARD_BYTES):
            close()
        shard[name] = values.cpu()
        size += values.nbytes
        if name == LAST:
            close()
    if shard:
        close()
    if device == "cuda":
        torch.cuda.empty_cache()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return size
