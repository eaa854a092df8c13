"""The engine `vllm` for real: on a GPU, or on vLLM's CPU build. Skips by name without either.

    AUTORL_TEST_BASE=/path/to/SmolLM2-135M-Instruct pytest -s tests/gpu/test_engine_vllm.py
    AUTORL_TEST_ENGINE_CPU=1 AUTORL_VLLM=/path/to/venv/bin/vllm pytest -s tests/gpu/test_engine_vllm.py

Without the base a small Llama with random weights is asked. One engine is started for most of the module, one more where a test kills it,
and one for each number of workers on the GPU. Prints how long a start, a swap, a death and a batch took; with AUTORL_TEST_BARE=1 a batch
beside one bare `LLM.generate` call too.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import needs
import numpy as np
import pytest
from checkpoints import TINY
from helpers import alive, wait_for
from test_driver_gpu import wide
from weights import read_safetensors, write_safetensors

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.checkpoint import HEAD_NAME, folder_content_hash, tensors_of, weight_files
from autorl_hpc.files.processes import descendants
from autorl_hpc.grading.engines.transformers import TransformersEngine
from autorl_hpc.grading.engines.vllm import VllmEngine
from autorl_hpc.grading.engines.worker_process import interpreter
from autorl_hpc.records.experiment import GraderSpec
from autorl_hpc.records.task import Sampling
from autorl_hpc.rollouts.engine import Answer, EngineFailed, WeightsChanged
from autorl_hpc.sandbox.prove import cuda_works

ON_CPU = os.environ.get("AUTORL_TEST_ENGINE_CPU") == "1"
BASE = os.environ.get("AUTORL_TEST_BASE")


def _has_vllm() -> bool:
    try:
        return bool(interpreter())
    except AutorlError:
        return False


pytestmark = [
    needs.needs("vllm", _has_vllm(), "no vllm here"),
    needs.needs("gpu", ON_CPU or cuda_works(), "no GPU here"),
    pytest.mark.timeout(1800),
]
DTYPE = "float32" if ON_CPU else "bfloat16"
SPEC = GraderSpec(
    engine="vllm",
    device="cpu" if ON_CPU else "cuda",
    threads=2,
    workers_per_gpu=1,
    gpu_memory=0.3,
    sleep_after_s=8.0,
)
WORKERS = (2,) if ON_CPU else (1, 2, 4)
GREEDY = Sampling(max_new_tokens=24)
STOPPING = Sampling(max_new_tokens=24, stop=("e", "\n"))
DRAWN = Sampling(max_new_tokens=16, temperature=1.0, top_p=0.9)
COUNT = 48

Checkpoint = tuple[Path, str]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Checkpoint]]:
    """The base, and checkpoints of it: `a` the base's own weights, `b` others, `head` those of `b` with the tied head beside them."""
    folder = tmp_path_factory.mktemp("engine")
    base = Path(BASE) if BASE else wide(TINY, folder / "base")
    if not BASE:
        _make_lively(base)
    made = {"a": _copy(base, folder / "a", 0.0), "b": _copy(base, folder / "b", 0.3)}
    names = {tensor.name for tensor in tensors_of(base)}
    if HEAD_NAME not in names:
        made["head"] = (_with_head(made["b"][0], folder / "head"), made["b"][1])
    return base, made


def _copy(base: Path, folder: Path, noise: float) -> Checkpoint:
    """Weights alone, as artifacts are: with some of the norms' scales changed, which changes answers in any dtype."""
    folder.mkdir()
    for name in weight_files(base):
        tensors = read_safetensors(base / name)
        rng = np.random.default_rng(1)
        for key, (kind, values) in tensors.items():
            if noise and ("norm" in key or "embed" in key):
                tensors[key] = (kind, _scaled(kind, values, rng.normal(1.0, noise, values.shape[-1])))
        write_safetensors(folder / name, tensors)
    return folder, folder_content_hash(folder)


def _make_lively(base: Path) -> None:
    """Fresh weights echo the last token: with larger ones the layers have something to say."""
    for name in weight_files(base):
        tensors = read_safetensors(base / name)
        for key, (kind, values) in tensors.items():
            if ".layers." in key and values.ndim == 2:
                tensors[key] = (kind, values * np.float32(6.0))
        write_safetensors(base / name, tensors)


def _scaled(kind: str, values: np.ndarray, factors: np.ndarray) -> np.ndarray:
    if kind != "BF16":
        return (values * factors).astype(values.dtype)
    whole = (values.astype(np.uint32) << 16).view(np.float32) * factors.astype(np.float32)
    return (np.ascontiguousarray(whole).view(np.uint32) >> 16).astype(np.uint16)


def _with_head(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    name = weight_files(folder)[0]
    tensors = read_safetensors(folder / name)
    tensors[HEAD_NAME] = tensors["model.embed_tokens.weight"]
    write_safetensors(folder / name, tensors)
    return folder


class Asked:
    """An engine that is started when it is first needed, and again after a death."""

    def __init__(self, base: Path, log: Path) -> None:
        self.base = base
        self.log = log
        self.workers = 1
        self._engine: VllmEngine | None = None

    @property
    def engine(self) -> VllmEngine:
        if self._engine is None:
            begun = time.monotonic()
            try:
                spec = SPEC.model_copy(update={"workers_per_gpu": self.workers})
                self._engine = VllmEngine(self.base, spec, DTYPE, log=self.log)
            except EngineFailed as error:
                raise AssertionError(f"{error}\n{self.tail()}") from error
            print(f"\n{self.workers} workers ready after {time.monotonic() - begun:.1f} s: {self._engine.identity}")
        return self._engine

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:] if self.log.is_file() else "(no log)"

    def drop(self) -> None:
        if self._engine is not None:
            begun, pids = time.monotonic(), self._engine.pids
            below = set(pids) | {child for pid in pids for child in descendants(pid)}
            self._engine.close()
            self._engine = None
            assert not any(alive(pid) for pid in below), "close() leaves nothing behind"
            print(f"closed in {time.monotonic() - begun:.1f} s")


@pytest.fixture(scope="module")
def asked(world: tuple[Path, dict[str, Checkpoint]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    made = Asked(world[0], tmp_path_factory.mktemp("log") / "vllm.log")
    try:
        yield made
    finally:
        made.drop()


@pytest.fixture(autouse=True)
def told(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where a test fails, what the worker printed."""
    before = request.session.testsfailed
    yield
    if request.session.testsfailed > before and "asked" in request.fixturenames:
        print(request.getfixturevalue("asked").tail())


def prompts(engine: VllmEngine, count: int = COUNT) -> list[list[int]]:
    """Questions behind one long beginning that they share, so that the prefix cache has something to get wrong."""
    shots = "".join(f"Question: What is {n} + {n + 2}?\nAnswer: {2 * n + 2}\n" for n in range(8))
    return [engine.encode(f"{shots}Question: What is {n} + {3 * n}?\nAnswer:") for n in range(count)]


def test_swapping_there_and_back(asked: Asked, world: tuple[Path, dict[str, Checkpoint]]) -> None:
    engine, (base, made) = asked.engine, world
    given = prompts(engine)
    answers: dict[str, list[Answer]] = {}
    for turn in ("a", "b", "a again", *(["head"] if "head" in made else [])):
        loaded = engine.load(*made[turn.split()[0]])
        begun = time.monotonic()
        answers[turn] = engine.generate(given, GREEDY, 0)
        print(
            f"{turn}: read {loaded.load_s:.3f} s, swapped {loaded.swap_s:.3f} s, checked {engine.checked[0]} of "
            f"{engine.checked[1]} tensors, {len(given)} answers in {time.monotonic() - begun:.2f} s"
        )
        assert engine.checked[0] > 0, asked.tail()
    assert answers["a"] != answers["b"], "other weights answer otherwise"
    same = sum(one == two for one, two in zip(answers["a"], answers["a again"], strict=True))
    print(f"{same} of {len(given)} answers are the same after swapping there and back; {answers['a'][:2]}")
    assert same >= len(given) * (1.0 if ON_CPU else 0.95)
    if "head" in made:
        assert answers["head"] == answers["b"] or not ON_CPU, "a tied head that lies in the file changes nothing"
    reference = TransformersEngine(base, GraderSpec(device=SPEC.device, threads=2, batch_tokens=16384), DTYPE)
    for turn in ("a", "b"):
        reference.load(*made[turn])
        for sampling in (GREEDY, STOPPING):
            engine.load(*made[turn])
            ours, others = (e.generate(given, sampling, 0) for e in (engine, reference))
            same = sum(one == two for one, two in zip(ours, others, strict=True))
            print(f"{turn}, {sampling.stop}: {same} of {len(given)} answers are those of transformers")
            enough = 0.8 if ON_CPU else 0.3 if turn == "a" else 0.0
            assert same >= len(given) * enough, list(zip(ours, others, strict=True))[:3]
        pairs = [(prompt, engine.encode(f" {number} and so on")) for number, prompt in enumerate(given)]
        ours, others = (e.loglikelihood(pairs) for e in (engine, reference))
        far = max(abs(one.logprob - two.logprob) for one, two in zip(ours, others, strict=True))
        print(f"{turn}: log-likelihoods differ by at most {far:.4f} from transformers'; the first is {ours[0]}")
        assert far < (0.01 if ON_CPU else 1.5)
    reference.close()


def test_draws_follow_from_the_seed_and_the_place(asked: Asked, world: tuple[Path, dict[str, Checkpoint]]) -> None:
    engine = asked.engine
    engine.load(*world[1]["a"])
    given = [prompts(engine, 1)[0]] * 16
    one, two, other = (engine.generate(given, DRAWN, seed) for seed in (5, 5, 6))
    assert len({answer.text for answer in one}) > 4, "each request draws by itself"
    assert sum(a == b for a, b in zip(one, two, strict=True)) >= (16 if ON_CPU else 8)
    assert one != other


def test_a_prompt_without_room_is_an_empty_answer(asked: Asked, world: tuple[Path, dict[str, Checkpoint]]) -> None:
    engine = asked.engine
    engine.load(*world[1]["a"])
    window = int(json.loads((world[0] / "config.json").read_text())["max_position_embeddings"])
    word = engine.encode("a")[0]
    full, nearly, short = engine.generate(
        [[word] * window, [word] * (window - 3), [word] * 3], GREEDY.model_copy(update={"max_new_tokens": 5}), 0
    )
    assert full == Answer("", 0, True)
    assert nearly.tokens <= 3 and short.tokens <= 5


def test_other_bytes_are_not_scored(asked: Asked, world: tuple[Path, dict[str, Checkpoint]], tmp_path: Path) -> None:
    engine, (_, made) = asked.engine, world
    engine.load(*made["a"])
    first = engine.generate(prompts(engine, 4), GREEDY, 0)
    folder, wanted = tmp_path / "changed", "0" * 64
    shutil.copytree(made["b"][0], folder)
    engine.prefetch(folder, wanted)
    with pytest.raises(WeightsChanged):
        engine.load(folder, wanted)
    with pytest.raises(OSError):
        engine.load(tmp_path / "nowhere", wanted)
    assert engine.generate(prompts(engine, 4), GREEDY, 0) == first, "the model is as it was"
    engine.load(*made["b"])  # another one, so that the next has to be loaded
    path = folder / weight_files(folder)[0]
    engine.prefetch(folder, made["b"][1])
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(WeightsChanged):
        engine.load(folder, "1" * 64)


def test_prompts_go_in_while_others_are_answered(asked: Asked, world: tuple[Path, dict[str, Checkpoint]]) -> None:
    engine, (_, made) = asked.engine, world
    engine.load(*made["a"])
    given = prompts(engine)
    whole = engine.generate(given, GREEDY, 0)
    got: dict[int, Answer] = {}
    done = threading.Event()

    def deliver(key: int, answer: Answer | Exception) -> None:
        assert isinstance(answer, Answer), answer
        got[key] = answer
        if key + 8 < len(given):
            stream.ask([(key + 8, given[key + 8])])  # by the engine's own thread
        if len(got) == len(given):
            done.set()

    stream = engine.stream(GREEDY, 0, deliver)
    engine.prefetch(*made["b"])  # is read meanwhile
    stream.ask([(key, given[key]) for key in range(8)])
    assert done.wait(600), asked.tail()
    stream.close()
    same = sum(got[key] == whole[key] for key in range(len(given)))
    print(f"{same} of {len(given)} answers are those of the one batch")
    assert same >= len(given) * (0.9 if ON_CPU else 0.5)
    loaded = engine.load(*made["b"])
    print(f"read ahead: read {loaded.load_s:.3f} s, swapped {loaded.swap_s:.3f} s")
    late: list[int] = []
    second = engine.stream(GREEDY, 0, lambda key, answer: late.append(key))
    second.ask(list(enumerate(given)))
    second.close()
    count = len(late)
    engine.load(*made["a"])
    assert len(late) == count, "nothing is delivered after the end of a stream"
    assert engine.generate(given, GREEDY, 0) == whole or not ON_CPU


def test_a_killed_worker_is_an_engine_that_failed(asked: Asked, world: tuple[Path, dict[str, Checkpoint]]) -> None:
    engine, (_, made) = asked.engine, world
    engine.load(*made["a"])
    given = prompts(engine)
    first = engine.generate(given, GREEDY, 0)
    pid = engine.pids[0]
    below = descendants(pid) | {pid}
    endless = Sampling(max_new_tokens=300, temperature=1.0)
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    begun = time.monotonic()
    with pytest.raises(EngineFailed, match="SIGKILL"):
        while True:
            engine.generate(given, endless, 0)
    print(f"told after {time.monotonic() - begun - 0.3:.2f} s")
    wait_for(lambda: not any(alive(one) for one in below), "nothing of it to be left")
    with pytest.raises(EngineFailed):
        engine.load(*made["a"])
    asked.drop()
    asked.engine.load(*made["a"])
    same = sum(one == two for one, two in zip(first, asked.engine.generate(given, GREEDY, 0), strict=True))
    assert same >= len(given) * (1.0 if ON_CPU else 0.5)


@needs.needs("gpu", not ON_CPU, "a CPU's memory is not given back")
def test_memory_is_given_back_when_idle(asked: Asked, world: tuple[Path, dict[str, Checkpoint]]) -> None:
    import torch

    engine, (_, made) = asked.engine, world
    engine.load(*made["a"])
    given = prompts(engine)
    first = engine.generate(given, GREEDY, 0)
    held = torch.cuda.mem_get_info()[0]
    freed = wait_for(
        lambda: found if (found := torch.cuda.mem_get_info()[0]) > held + 2**30 else None, "memory", patience_s=60
    )
    print(f"asleep: {(freed - held) / 2**30:.1f} GiB given back")
    begun = time.monotonic()
    same = sum(one == two for one, two in zip(first, engine.generate(given, GREEDY, 0), strict=True))
    assert same >= 0.9 * len(given), "it wakes with the weights that it had"
    print(f"awake and answered after {time.monotonic() - begun:.2f} s")
    wait_for(lambda: torch.cuda.mem_get_info()[0] > held + 2**30, "memory", patience_s=60)
    loaded = engine.load(*made["b"])
    print(f"woken by a load: read {loaded.load_s:.3f} s, swapped {loaded.swap_s:.3f} s")


def test_several_workers_on_one_gpu(asked: Asked, world: tuple[Path, dict[str, Checkpoint]]) -> None:
    """They swap together and die together. On a GPU it is printed how fast one, two and four are."""
    _, (_, made) = asked.engine, world
    given = prompts(asked.engine)
    for workers in WORKERS:
        if workers > 1:
            asked.drop()
            asked.workers = workers
        engine = asked.engine
        assert len(engine.pids) == workers
        answers = []
        for turn in ("a", "b", "a"):
            loaded = engine.load(*made[turn])
            answers.append(engine.generate(given, GREEDY, 0))
        print(f"{workers} workers: read {loaded.load_s:.3f} s, swapped {loaded.swap_s:.3f} s", end="")
        assert answers[0] != answers[1]
        same = sum(one == two for one, two in zip(answers[0], answers[2], strict=True))
        print(f", {same} of {len(given)} answers are the same after swapping there and back")
        assert same >= len(given) * (1.0 if ON_CPU else 0.9)
        if not ON_CPU:
            for name, asks, new in (("long", _long(engine, world[0]), 16), ("short", prompts(engine, 1319), 200)):
                for turn in ("b", "a"):
                    engine.load(*made[turn])  # empties the prefix cache
                begun = time.monotonic()
                tokens = sum(answer.tokens for answer in engine.generate(asks, Sampling(max_new_tokens=new), 0))
                took_s = time.monotonic() - begun
                each = f"{1e3 * took_s / len(asks):.2f} ms each, {tokens / took_s:.0f} tokens/s"
                print(f"{workers} workers: {len(asks)} {name} prompts, {new} tokens: {took_s:.2f} s, {each}")
    below = {one for pid in asked.engine.pids for one in descendants(pid) | {pid}}
    os.kill(asked.engine.pids[-1], signal.SIGKILL)
    with pytest.raises(EngineFailed, match="SIGKILL"):
        while True:
            asked.engine.generate(given, GREEDY, 0)
    asked.drop()
    assert not any(alive(one) for one in below), "the others are ended with the one that died"


def _long(engine: VllmEngine, base: Path) -> list[list[int]]:
    """400 prompts of 2,000 tokens, 50 each behind the same 1,600."""
    window = int(json.loads((base / "config.json").read_text())["max_position_embeddings"])
    length = min(2000, window - 16)
    known = sorted({token for prompt in prompts(engine) for token in prompt})
    draw = random.Random(0)
    heads = [draw.choices(known, k=length * 4 // 5) for _ in range(8)]
    return [[*heads[number % 8], *draw.choices(known, k=length - len(heads[0]))] for number in range(400)]


@needs.needs("gpu", not ON_CPU, "a rate is measured on a GPU")
@needs.needs("gpu", os.environ.get("AUTORL_TEST_BARE") == "1", "AUTORL_TEST_BARE=1 takes two more minutes")
def test_the_rate_beside_bare_vllm(asked: Asked, world: tuple[Path, dict[str, Checkpoint]]) -> None:
    pytest.importorskip("vllm")
    from bare_vllm import bare_rate

    asked.workers = 1
    _, (base, made) = asked.engine, world
    sampling = Sampling(max_new_tokens=256)
    given = [[*prompt, prompt[-1]] for prompt in prompts(asked.engine, 1319)]
    rates: list[float] = []
    for name in ("b", "a", "b", "a"):
        asked.engine.load(*made[name])
        if name == "a":
            begun = time.monotonic()
            answers = asked.engine.generate(given, sampling, 0)
            rates.append(sum(answer.tokens for answer in answers) / (time.monotonic() - begun))
    asked.drop()
    bare = max(bare_rate(base, given, sampling, DTYPE, SPEC.gpu_memory))
    print(f"{rates} tokens/s, bare LLM.generate {bare:.0f}: {max(rates) / bare:.2f} of it")
    assert max(rates) > 0.3 * bare
