"""HumanEval: runs what a model wrote against the tests of each problem (scorers `humaneval`, `humaneval-opencompass`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.scoring.code_answers import completion
from autorl_hpc.scoring.outcome import Context, Fact, ItemLike, Outcome
from autorl_hpc.scoring.programs.limits import Limits, Program, Verdict
from autorl_hpc.scoring.programs.runner import longest_s, run_programs
from autorl_hpc.scoring.thinking import without_closed_thinking
from autorl_hpc.states import Fault

VERSION: Final = "2"
"""Of the scorer `humaneval`. 1 gave programs that sleep 20 seconds."""
OPENCOMPASS_VERSION: Final = "a5acc4bb-2"
"""Of the scorer `humaneval-opencompass`: the revision of the other suite whose extraction it repeats, and how programs are run."""
OPENCOMPASS_LIMITS: Final = Limits(cpu_s=3)
"""Its three seconds, but of CPU time: its clock on the wall makes a score hang on the machine's load."""
KS: Final = (1, 10)
UNCONFINED: Final = "unconfined"
"""Option of a recipe: run programs also where nothing keeps them from writing their user's files."""

_BLOCK = re.compile(r"```\w*\n(.*?)```", re.DOTALL)


def pass_at_k(n: int, passed: int, k: int) -> float:
    """The unbiased estimate of the chance that one of `k` samples passes, from `n` samples of which `passed` do.

    1 - C(n - passed, k) / C(n, k) as a product that neither over- nor underflows: Chen et al. 2021 (arXiv 2107.03374), section 2.1.
    """
    if not 0 <= passed <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {passed} in {n} samples")
    missed = 1.0
    for number in range(n - passed + 1, n + 1):
        missed *= 1.0 - k / number
    return 1.0 - max(missed, 0.0)


def opencompass_completion(answer: str) -> str:
    """The code as the reference extracts it, faults included on purpose.

    Source: open-compass/opencompass @ a5acc4bb, `humaneval_postprocess_v2` of opencompass/datasets/humaneval.py, after the
    model-level `extract-non-reasoning-content`. The first fenced block whose fence ends its line, else the whole text, without
    the space before it. Known faults: a bare body loses its first indent, prose without a fence stays, a block that was cut
    off keeps its fence.
    """
    if "<think>" not in answer and "</think>" in answer:
        text = answer.rsplit("</think>", maxsplit=1)[-1].strip()
    else:
        text = without_closed_thinking(answer).strip()
    block = _BLOCK.search(text)
    return (block[1] if block else text).lstrip()


@dataclass(frozen=True)
class HumanEval:
    """The scorer. A sample counts if its program passes the problem's own `check`; of several samples the share counts.

    An item's question is the prompt; its data hold `test` and `entry_point`. A program is the prompt and what `extract` makes
    of the answer and the entry point; the prompt's own definitions are what a test may use beside it.
    """

    version: str
    extract: Callable[[str, str], str]
    limits: Limits

    def score(self, items: Sequence[ItemLike], answers: Sequence[Sequence[str]], context: Context) -> list[Outcome]:
        """See the Protocol.

        Raises:
            AutorlError: an item holds no test, or programs can't be run here.
        """
        programs = [[self._program(item, text) for text in texts] for item, texts in zip(items, answers, strict=True)]
        distinct = list(dict.fromkeys(program for drawn in programs for program in drawn))
        unconfined = context.options.get(UNCONFINED, False) is True
        told = run_programs(distinct, workers=context.workers, limits=self.limits, unconfined=unconfined)
        verdicts = dict(zip(distinct, told, strict=True))
        return [_outcome([verdicts[program] for program in drawn]) for drawn in programs]

    def metrics(self, items: Sequence[ItemLike], outcomes: Sequence[Outcome]) -> dict[str, float]:
        """`pass@1` and, from ten samples on, `pass@10`, in percent."""
        counts = [(int(o.facts["samples"]), int(o.facts["passed"])) for o in outcomes]
        fewest = min((n for n, _ in counts), default=0)
        return {
            f"pass@{k}": 100.0 * sum(pass_at_k(n, passed, k) for n, passed in counts) / len(counts)
            for k in KS
            if k <= fewest
        }

    def longest_s(self, calls: int, context: Context) -> float:
        """See `Clocked`."""
        return longest_s(calls, context.workers, self.limits)

    def _program(self, item: ItemLike, answer: str) -> Program:
        test, entry_point = item.data.get("test"), item.data.get("entry_point")
        if not isinstance(test, str) or not isinstance(entry_point, str):
            raise AutorlError(
                f"item {item.id} has no test and entry point",
                fault=Fault.GRADER,
                next_step="a task with this scorer needs both in each held-out item: see tasks/humaneval/prepare.py",
                exit_code=Exit.FAILED,
            )
        prompt = item.question if item.question.endswith("\n") else f"{item.question}\n"
        return Program(prompt + self.extract(answer, entry_point), test, entry_point, helpers=prompt)


def humaneval() -> HumanEval:
    """The scorer `humaneval`."""
    return HumanEval(VERSION, completion, Limits())


def humaneval_opencompass() -> HumanEval:
    """The scorer `humaneval-opencompass`: another suite's extraction, this one's runs."""
    return HumanEval(OPENCOMPASS_VERSION, lambda answer, _: opencompass_completion(answer), OPENCOMPASS_LIMITS)


def _outcome(verdicts: Sequence[Verdict]) -> Outcome:
    passed = sum(verdict.passed for verdict in verdicts)
    facts: Mapping[str, Fact] = {
        "samples": len(verdicts),
        "passed": passed,
        "isolation": verdicts[0].isolation,
        "reason": str(next((verdict.reason for verdict in verdicts if not verdict.passed), verdicts[0].reason)),
    }
    return Outcome(passed / len(verdicts), facts)
