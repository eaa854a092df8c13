"""ALFWorld's valid_unseen with a stand-in for a GPU: what the scheduler, the environments and the tokens cost beside an engine.

The stand-in decodes all sequences that it has together, one token an iteration; an iteration takes ITERATION_S and SEQUENCE_S
for each sequence. A sequence is so long as a hash of its prompt says. It sleeps in the place of computing, so all processor time
is the suite's. The words are the game's walkthrough without its last command, then `look`: every game goes on to the last step.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autorl_hpc.records.task import Sampling
from autorl_hpc.rollouts.cores import usable_cores
from autorl_hpc.rollouts.engine import Answer
from autorl_hpc.rollouts.environment import Episode
from autorl_hpc.rollouts.episodes import Encoder, run_episodes
from autorl_hpc.rollouts.pool import Pool
from autorl_hpc.rollouts.source import Source, load

REPO = Path(__file__).resolve().parents[2]
FILE = REPO / "tasks" / "alfworld" / "environment.py"
ITERATION_S = float(os.environ.get("BENCH_ITERATION_MS", "6")) / 1000
SEQUENCE_S = float(os.environ.get("BENCH_SEQUENCE_MS", "0.02")) / 1000
GAMES = int(os.environ.get("BENCH_GAMES", "134"))
STEPS = int(os.environ.get("BENCH_STEPS", "50"))
ALONE = int(os.environ.get("BENCH_ALONE", "4"))
"""Games of the loop that plays one after the other."""
GATHER_S = 30.0
"""As graders have it."""


class _Prompt(list[int]):
    """Token ids with their text, by which the stand-in answers."""

    text = ""


class StandIn:
    """The engine in batches. `busy_s`: with work; `encode_s`: in which texts became tokens."""

    def __init__(self, goals: Sequence[Mapping[str, Any]], tokenizer: Any, by_pieces: bool) -> None:
        self._plans = {f"Your task is to: {goal['question']}": goal["walkthrough"][:-1] for goal in goals}
        encoder = Encoder(tokenizer)
        encoder.by_pieces &= by_pieces
        self._encode = encoder.encode
        self.busy_s = self.encode_s = 0.0

    def encode(self, text: str) -> list[int]:
        started = time.perf_counter()
        made = _Prompt(self._encode(text))
        self.encode_s += time.perf_counter() - started
        made.text = text
        return made

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        return None

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Answer]:
        answers = [self.answer(prompt) for prompt in prompts]
        started = time.monotonic()
        for token in range(max(answer.tokens for answer in answers)):
            time.sleep(ITERATION_S + SEQUENCE_S * sum(answer.tokens > token for answer in answers))
        self.busy_s += time.monotonic() - started
        return answers

    def answer(self, prompt: Sequence[int]) -> Answer:
        text = getattr(prompt, "text", "").rpartition("\nHere is the task.\n")[2]
        plan = next(plan for task, plan in self._plans.items() if task in text)
        turn = text.count("\n>") - 1
        said = f" {plan[turn]}" if turn < len(plan) else " look"
        return Answer(said, 6 + hashlib.sha256(text.encode()).digest()[0] % 13, False)


class StreamingStandIn(StandIn):
    """The same, one prompt joining the others at the next iteration."""

    def stream(self, sampling: Sampling, seed: int, deliver: Callable[[int, Answer | Exception], None]) -> _Stream:
        return _Stream(self, deliver)


class _Stream(threading.Thread):
    def __init__(self, engine: StandIn, deliver: Callable[[int, Answer | Exception], None]) -> None:
        super().__init__(daemon=True)
        self._engine, self._deliver = engine, deliver
        self._new: queue.SimpleQueue[tuple[int, Sequence[int]] | None] = queue.SimpleQueue()
        self.start()

    def ask(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> None:
        for each in prompts:
            self._new.put(each)

    def close(self) -> None:
        self._new.put(None)
        self.join()

    def run(self) -> None:
        left: dict[int, tuple[int, Answer]] = {}
        while True:
            while not left or not self._new.empty():
                came = self._new.get()
                if came is None:
                    return
                answer = self._engine.answer(came[1])
                left[came[0]] = (answer.tokens, answer)
            started = time.monotonic()
            time.sleep(ITERATION_S + SEQUENCE_S * len(left))
            self._engine.busy_s += time.monotonic() - started
            for key, (tokens, answer) in list(left.items()):
                if tokens > 1:
                    left[key] = (tokens - 1, answer)
                else:
                    del left[key]
                    self._deliver(key, answer)


def measure() -> Iterator[tuple[str, str]]:
    """Names and values, one a way of playing; transcripts of all must be equal."""
    data = Path(os.environ["AUTORL_TEST_DATA"]) / "alfworld"
    tokenizer = _tokenizer(Path(os.environ.get("BENCH_TOKENIZER", REPO / "templates" / "models" / "tiny")))
    with lzma.open(data / "valid_unseen.jsonl.xz", "rt") as file:
        goals = [load(FILE).goal_of(json.loads(line)) for line in file][:GAMES]
    goals = [{**goal, "question": f"{goal['question']} ({number})"} for number, goal in enumerate(goals)]
    source = Source(FILE, "Environment", data)
    cores = usable_cores()
    ways: list[tuple[str, type[StandIn], bool, int, int]] = [
        ("one game after the other, whole texts", StandIn, False, 1, ALONE),
        ("gathered, whole texts", StandIn, False, cores, len(goals)),
        ("gathered", StandIn, True, cores, len(goals)),
        ("streamed", StreamingStandIn, True, cores, len(goals)),
    ]
    only = os.environ.get("BENCH_ONLY", "")
    alone_s, told = 0.0, {}
    for name, kind, by_pieces, workers, count in ways:
        if only and name not in only.split(",") and workers > 1:
            continue
        chosen = goals[:: max(1, len(goals) // count)][:count]
        with Pool(source, workers) as pool:
            for again in ("", ", games known") if workers > 1 else ("",):
                engine = kind(goals, tokenizer, by_pieces)
                episodes, line, step_s = _played(engine, chosen, pool, 1 if workers == 1 else len(chosen))
                alone_s = alone_s or step_s
                told.setdefault(name, [episode.transcript_sha256 for episode in episodes])
                yield f"episodes, {name}{again}", f"{line}; {alone_s / step_s:.1f}x the first way, a step"
    whole = [digests for digests in told.values() if len(digests) == len(goals)]
    yield "transcripts equal", f"{all(digests == whole[0] for digests in whole)} ({len(whole)} ways)"


def _played(
    engine: StandIn, goals: Sequence[Mapping[str, Any]], pool: Pool, in_flight: int
) -> tuple[list[Episode], str, float]:
    pids, started, used = pool.pids, time.monotonic(), time.process_time()
    environments = sum(map(_cpu_s, pids))
    episodes = run_episodes(
        engine, goals, pool.source, Sampling(max_new_tokens=20), max_steps=STEPS, pool=pool, in_flight=in_flight, gather_s=GATHER_S
    )  # fmt: skip
    wall = time.monotonic() - started
    used, environments = time.process_time() - used, sum(map(_cpu_s, pool.pids)) - environments
    steps = sum(episode.steps for episode in episodes)
    assert not any(episode.problem for episode in episodes), [episode.problem for episode in episodes]
    line = (
        f"{len(goals)} games, {steps} steps: {wall:.1f} s, {steps / wall:.0f} steps/s, engine busy {100 * engine.busy_s / wall:.0f} %; "
        f"a step: environments {1e6 * environments / steps:.0f} us on {pool.size} cores, "
        f"this process {1e6 * used / steps:.0f} us, of it tokens {1e6 * engine.encode_s / steps:.0f} us by the clock"
    )
    return episodes, line, wall / steps


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer, logging

    logging.set_verbosity_error()
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
