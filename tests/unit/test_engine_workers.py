"""The engine `vllm` and its real worker on top of a stand-in of vLLM: hand-over, spreading, swapping, death and silence."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import TINY
from helpers import PATIENCE_S, alive, wait_for
from weights import noisy_tiny, read_safetensors, write_safetensors

from autorl_hpc.files.checkpoint import folder_content_hash
from autorl_hpc.grading.engines import framing, vllm
from autorl_hpc.grading.engines.transformers import BaseTokenizer
from autorl_hpc.grading.engines.vllm import VllmEngine
from autorl_hpc.grading.engines.worker_process import MODULE
from autorl_hpc.records.experiment import GraderSpec
from autorl_hpc.records.task import Sampling
from autorl_hpc.rollouts.engine import CONVERSATION, Answer, EngineFailed, WeightsChanged

STAND_IN = Path(__file__).resolve().parents[1] / "stand_in_vllm"
FEW = Sampling(max_new_tokens=40)
Start = Callable[..., VllmEngine]


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of what the stand-in does wrong, and of its notes."""
    folder = tmp_path / "faults"
    folder.mkdir()
    monkeypatch.setenv("STAND_IN", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    monkeypatch.setenv("AUTORL_ENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return folder


@pytest.fixture
def start(faults: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts engines of the tiny model; at the end nothing of them may be left."""
    made: list[VllmEngine] = []

    def starting(device: str = "cpu", workers: int | str = 1, model: Path = TINY, **limits: Any) -> VllmEngine:
        spec = GraderSpec(engine="vllm", device=device, cache_gib=0.1, workers_per_gpu=workers)
        log = tmp_path / "vllm.log"
        made.append(VllmEngine(model, spec, "float32", command=[sys.executable, "-m", MODULE], log=log, **limits))
        return made[-1]

    yield starting
    for engine in made:
        engine.close()
    assert not any(alive(pid) for pid in started(faults)), "a worker or its child was left behind"


def notes(faults: Path, word: str) -> list[str]:
    """What the stand-in noted, by the first word."""
    path = faults / "notes"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.partition(" ")[2] for line in lines if line.split()[0] == word]


def started(faults: Path) -> list[int]:
    """Workers and their children, all that there were."""
    return [int(pid) for line in notes(faults, "started") for pid in line.split()[:2]]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("other") / "weights"
    noisy_tiny(TINY, folder, seed=1)
    (folder / "config.json").unlink()
    return folder, folder_content_hash(folder)


@pytest.fixture(scope="module")
def base() -> tuple[Path, str]:
    return TINY, folder_content_hash(TINY)


def test_answers_come_in_order_from_all_gpus_as_text_like_any_engines(
    start: Start, faults: Path, base: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    engine = start("cuda")
    assert sorted(line.split()[2] for line in notes(faults, "started")) == ["4", "7"]
    assert engine.identity.backend == "vllm" and engine.identity.versions["vllm"] == "stand-in"
    engine.load(*base)
    words = BaseTokenizer(TINY)
    asked = [f"{number} and {number + 1} stop {number}" for number in range(150)]
    prompts = [words.encode(text) for text in asked]
    for sampling in (FEW, Sampling(max_new_tokens=40, stop=("pots", " and")), Sampling(max_new_tokens=3)):
        answers = engine.generate(prompts, sampling, 0)
        for prompt, answer in zip(prompts, answers, strict=True):
            said = [*prompt[::-1], words.ends[0]]
            assert answer == words.answer(said[: sampling.max_new_tokens], sampling)
    assert engine.generate([], FEW, 0) == []
    full, one = engine.generate([[5] * 64, [5] * 63], FEW, 0)
    assert full == Answer("", 0, True) and one.tokens == 1 and one.truncated
    pairs = [([9], [5]), ([9, 8], [5, 7, 5]), ([5] * 70, [6, 5]), ([5] * 3, [10] * 60)]
    assert engine.loglikelihood(pairs * 20) == [*[(-0.5, True), (-1.875, False), (-1.25, False), (-75.0, False)] * 20]
    assert engine.loglikelihood([]) == []
    for wrong in (([], [5]), ([5], []), ([5], [5] * 63)):
        with pytest.raises(ValueError, match="1 to 62"):
            engine.loglikelihood([wrong])


def test_several_workers_share_a_gpu_and_each_conversation_has_one(
    start: Start, faults: Path, base: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(vllm, "usable_cores", lambda: 16)
    (faults / "gpu").touch()
    engine = start("cuda", "auto")
    assert [line.split()[2] for line in notes(faults, "started")] == ["3"] * 4
    assert engine.identity.versions["workers_per_gpu"] == "4"
    for given in map(json.loads, notes(faults, "given")):
        assert given["memory"] == pytest.approx(0.85 / 4) and given["threads"] == "4"
        assert 10 << 30 < given["kv"] < 0.85 / 4 * (80 << 30) - framing.FIXED_BYTES
    engine.load(*base)
    assert len(notes(faults, "swap")) == 4
    prompts = [[5 + number, 6, 7] for number in range(40)]
    assert [answer.tokens for answer in engine.generate(prompts, FEW, 0)] == [3] * 40
    assert len({line.split()[0] for line in notes(faults, "asked")}) == 4
    done = threading.Semaphore(0)

    def deliver(key: int, answer: Answer | Exception) -> None:
        if key % CONVERSATION < 4:
            stream.ask([(key + 1, [5] * (2 + key % CONVERSATION))])
        else:
            done.release()

    before = len(notes(faults, "asked"))
    stream = engine.stream(FEW, 0, deliver)
    stream.ask([(number * CONVERSATION, [5]) for number in range(8)])
    assert all(done.acquire(timeout=PATIENCE_S) for _ in range(8))
    stream.close()
    said = [(int(key) // CONVERSATION, pid) for pid, key in map(str.split, notes(faults, "asked")[before:])]
    assert len(said) == 40 and len(set(said)) == 8 and len({pid for _, pid in said}) == 4
    pids = engine.pids
    os.kill(pids[2], signal.SIGKILL)
    with pytest.raises(EngineFailed, match="SIGKILL"):
        while True:
            engine.generate(prompts, FEW, 0)
    engine.close()
    assert not any(alive(pid) for pid in [*pids, *started(faults)])


def test_weights_are_swapped_once_and_only_if_they_are_the_right_ones(
    start: Start, faults: Path, base: tuple[Path, str], other: tuple[Path, str], tmp_path: Path
) -> None:
    engine = start()
    with pytest.raises(WeightsChanged):
        engine.load(base[0], other[1])
    with pytest.raises(OSError):
        engine.load(tmp_path / "nowhere", base[1])
    assert not notes(faults, "swap")
    for weights in (base, other, other, base):
        engine.prefetch(*other)
        engine.load(*weights)
    assert notes(faults, "swap") == [base[1], other[1], base[1]]
    assert len(notes(faults, "reset")) == 4, "each load empties the prefix cache, also one of what is there"
    tensors = read_safetensors(other[0] / "model.safetensors")
    for extra in (
        {"more.weight": tensors["model.norm.weight"]},
        {"model.norm.weight": ("F32", np.ones(1, np.float32))},
    ):
        misfit = tmp_path / f"misfit{len(extra)}{'more.weight' in extra}"
        misfit.mkdir()
        write_safetensors(misfit / "model.safetensors", {**tensors, **extra})
        with pytest.raises(EngineFailed, match="name or shape"):
            engine.load(misfit, folder_content_hash(misfit))
    assert len(notes(faults, "swap")) == 3
    (faults / "wrong").touch()
    with pytest.raises(EngineFailed, match="they don't fit"):
        engine.load(*other)


def test_a_stream_takes_prompts_while_it_answers_and_is_silent_after_its_end(
    start: Start, base: tuple[Path, str], faults: Path
) -> None:
    engine = start()
    engine.load(*base)
    got: dict[int, Answer] = {}
    done = threading.Event()

    def deliver(key: int, answer: Answer | Exception) -> None:
        assert isinstance(answer, Answer)
        got[key] = answer
        if key < 100:
            stream.ask([(key + 10, [5 + key % 9] * (1 + key % 7))])
        if len(got) == 110:
            done.set()

    stream = engine.stream(FEW, 0, deliver)
    with pytest.raises(EngineFailed, match="open"):
        engine.stream(FEW, 0, deliver)
    with pytest.raises(EngineFailed, match="open"):
        engine.load(*base)
    stream.ask([(key, [7]) for key in range(10)])
    assert done.wait(PATIENCE_S) and got[105].tokens == 1 + 95 % 7
    (faults / "hang").touch()
    late: list[int] = []
    stream.close()
    second = engine.stream(FEW, 0, lambda key, answer: late.append(key))
    second.ask([(1, [5, 6])])
    second.close()
    with pytest.raises(EngineFailed, match="closed"):
        second.ask([(2, [5])])
    (faults / "hang").unlink()
    assert engine.generate([[5, 6, 7]], FEW, 0)[0].tokens == 3
    assert not late


@pytest.mark.parametrize("moment", ["idle", "asked", "told"])
def test_a_worker_that_dies_is_an_engine_that_failed(
    start: Start, faults: Path, base: tuple[Path, str], moment: str
) -> None:
    engine = start()
    engine.load(*base)
    if moment == "asked":
        (faults / "hang").touch()
    if moment == "told":
        (faults / "die").touch()
    else:
        threading.Timer(0.0 if moment == "idle" else 0.5, os.kill, (engine.pids[0], signal.SIGKILL)).start()
    with pytest.raises(EngineFailed, match="with 3" if moment == "told" else "SIGKILL"):
        while True:
            engine.generate([[5, 6, 7]], FEW, 0)
    wait_for(lambda: not any(alive(pid) for pid in started(faults)), "its child to be ended too")
    for call in (lambda: engine.load(*base), lambda: engine.stream(FEW, 0, print)):
        with pytest.raises(EngineFailed):
            call()
    engine.prefetch(*base)
    for name in ("hang", "die"):
        (faults / name).unlink(missing_ok=True)
    fresh = start()
    fresh.load(*base)
    assert fresh.generate([[5, 6, 7]], FEW, 0)[0].tokens == 3


def test_what_keeps_it_from_starting_is_told(start: Start, faults: Path) -> None:
    (faults / "fail").touch()
    with pytest.raises(EngineFailed, match="Free memory on device"):
        start()
