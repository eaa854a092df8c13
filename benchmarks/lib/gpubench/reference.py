"""The reference's way of scoring, as a program: `reference.py JOB.json`. Its process makes one engine and ends.

AutoRL-Bench starts a new engine for every submission; asks a static split in one call of `LLM.generate`; and plays
ALFWorld's games one after the other in the stock environment, one prompt a call. The engine is made as that code makes it:
vLLM's defaults, but for the dtype, which is the recipe's. Not its code: a loop of the same shape, which leaves
out its logging and its HTTP server, so it is if anything faster.

JOB.json: backend, device, model, dtype, jobs, told. A job is `generate` (prompts as token ids, sampling,
repeat) or `play` (goals, sampling, max_steps, data, file, name, options, stock). What is measured is appended to the file
`told` as JSON lines.
"""

from __future__ import annotations

import time

STARTED = time.monotonic()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402


class Said(NamedTuple):
    """An answer and its number of tokens."""

    text: str
    tokens: int


class Vllm:
    """vLLM's own `LLM`, in this process as far as it goes."""

    def __init__(self, job: dict[str, Any]) -> None:
        import vllm

        self._vllm = vllm
        tell("import_s", time.monotonic() - STARTED)
        started = time.monotonic()
        self._llm = vllm.LLM(model=job["model"], dtype=job["dtype"], trust_remote_code=False)
        tell("engine_s", time.monotonic() - started)

    def _params(self, sampling: dict[str, Any], seed: int) -> Any:
        return self._vllm.SamplingParams(
            temperature=sampling["temperature"],
            top_p=sampling["top_p"],
            max_tokens=sampling["max_new_tokens"],
            stop=list(sampling["stop"]) or None,
            seed=seed if sampling["temperature"] > 0 else None,
        )

    def generate(self, prompts: list[list[int]], sampling: dict[str, Any], seed: int) -> list[Said]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return self._said(self._llm.generate(asked, self._params(sampling, seed), use_tqdm=False))

    def answer(self, prompt: str, sampling: dict[str, Any], seed: int) -> Said:
        (said,) = self._said(self._llm.generate([prompt], self._params(sampling, seed), use_tqdm=False))
        return said

    def forget(self) -> None:
        self._llm.reset_prefix_cache()

    @staticmethod
    def _said(outputs: Any) -> list[Said]:
        return [Said(output.outputs[0].text, len(output.outputs[0].token_ids)) for output in outputs]


class Transformers:
    """The suite's plain engine in vLLM's place: to try this program where there is no vLLM. Its figures mean nothing."""

    def __init__(self, job: dict[str, Any]) -> None:
        from autorl_hpc.files.checkpoint import folder_content_hash
        from autorl_hpc.grading.engines.transformers import TransformersEngine
        from autorl_hpc.records.experiment import GraderSpec

        tell("import_s", time.monotonic() - STARTED)
        started = time.monotonic()
        model = Path(job["model"])
        self._engine = TransformersEngine(model, GraderSpec(device=job["device"], threads=0), job["dtype"])
        self._engine.load(model, folder_content_hash(model))
        tell("engine_s", time.monotonic() - started)

    def generate(self, prompts: list[list[int]], sampling: dict[str, Any], seed: int) -> list[Said]:
        from autorl_hpc.records.task import Sampling

        answers = self._engine.generate(prompts, Sampling.model_validate(sampling), seed)
        return [Said(answer.text, answer.tokens) for answer in answers]

    def answer(self, prompt: str, sampling: dict[str, Any], seed: int) -> Said:
        return self.generate([self._engine.encode(prompt)], sampling, seed)[0]

    def forget(self) -> None:
        pass


BACKENDS: dict[str, Callable[[dict[str, Any]], Any]] = {"vllm": Vllm, "transformers": Transformers}


def tell(event: str, seconds: float, job: int | None = None, **more: object) -> None:
    """One line into the file of what was measured, which a kill leaves whole."""
    line = json.dumps({"job": job, "event": event, "seconds": seconds, **more})
    with open(TOLD, "a", encoding="utf-8") as file:
        file.write(line + "\n")


def generate(model: Any, job: dict[str, Any], number: int) -> None:
    """One call for all prompts, `repeat` times; nothing is left in the prefix cache between them."""
    for _ in range(job["repeat"]):
        model.forget()
        started = time.monotonic()
        said = model.generate(job["prompts"], job["sampling"], job["seed"])
        tell("generated", time.monotonic() - started, number, tokens=sum(answer.tokens for answer in said))


def play(model: Any, job: dict[str, Any], number: int) -> None:
    """One game after the other, one prompt a call."""
    from autorl_hpc.rollouts.environment import Transcript, Turn
    from autorl_hpc.rollouts.source import Source
    from gpubench.stock import Own, Stock

    source = Source(job["file"], job["name"], Path(job["data"]), held_out=True, options=job["options"])
    dialogue = source.dialogue()
    make = Stock if job["stock"] else Own
    began = time.monotonic()
    environment = make(source)
    tell("environment_s", time.monotonic() - began, number)
    for goal in job["goals"]:
        began, asked_s, calls, tokens = time.monotonic(), 0.0, 0, 0
        transcript, done, problem = Transcript(goal, environment.reset(goal, 0)), False, None
        while not done and calls < job["max_steps"]:
            before = time.monotonic()
            try:
                said = model.answer(dialogue.prompt(transcript), job["sampling"], 0)
            except ValueError as error:  # longer than the model takes
                problem = str(error)[:200]
                break
            asked_s += time.monotonic() - before
            calls, tokens = calls + 1, tokens + said.tokens
            action = dialogue.action(said.text)
            observation, done = environment.step(action)
            transcript.turns.append(Turn(action, observation))
        seconds = time.monotonic() - began
        tell("played", seconds, number, calls=calls, asked_s=asked_s, tokens=tokens, done=done, problem=problem)


def main() -> None:
    """Makes the engine and does the jobs."""
    model = BACKENDS[JOB["backend"]](JOB)
    for number, job in enumerate(JOB["jobs"]):
        {"generate": generate, "play": play}[job["kind"]](model, job, number)
    tell("until_done_s", time.monotonic() - STARTED)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # in the place of this folder, whose names are no packages
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    JOB = json.loads(Path(sys.argv[1]).read_text())
    TOLD = JOB["told"]
    main()
