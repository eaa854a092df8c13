"""Whether an answer to a training question is right, for tasks whose questions tell: a number, or a function with its test.

The tests of functions are run in a process of its own with limits.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import texts

TEST_LIMIT_S = 10
TEST_MEMORY_BYTES = 2 << 30
TESTERS = 4
_FENCE = re.compile(r"```[a-zA-Z0-9]*\n(.*?)(?:```|\Z)", re.DOTALL)


def kind_of(row: Mapping[str, Any]) -> str | None:
    """How answers to a row are checked: `code`, `number`, or None: nothing here can tell a good one."""
    if "test" in row and "entry_point" in row:
        return "code"
    return "number" if texts.final_number(str(row.get("answer", ""))) is not None else None


def gold_of(row: Mapping[str, Any]) -> str:
    """What a row's answers are checked by, as text, so that it can stand in a table."""
    if kind_of(row) == "code":
        return json.dumps({key: row[key] for key in ("question", "test", "entry_point")})
    return str(texts.final_number(str(row["answer"])))


def right(completions: Sequence[str], gold: Sequence[str]) -> list[float]:
    """1 where an answer is right by its `gold_of`, else 0."""
    coded = [number for number, one in enumerate(gold) if one.startswith("{")]
    found = [0.0] * len(gold)
    for number, one in enumerate(gold):
        if not one.startswith("{"):
            found[number] = float(texts.final_number(completions[number]) == Decimal(one))
    if coded:
        with ThreadPoolExecutor(TESTERS) as testers:
            passed = testers.map(lambda n: passes(completions[n], json.loads(gold[n])), coded)
            for number, value in zip(coded, passed, strict=True):
                found[number] = float(value)
    return found


def program(completion: str, problem: Mapping[str, str]) -> str:
    """The program that tests an answer: the code in it, behind the question where it is a body alone, then the test."""
    fenced = _FENCE.search(completion)
    code = fenced[1] if fenced else completion
    name = re.escape(problem["entry_point"])
    whole = code if re.search(rf"^def {name}\b", code, re.MULTILINE) else problem["question"] + code
    heading = problem["question"].split(f"def {problem['entry_point']}")[0]
    return f"{heading}\n{whole}\n\n{problem['test']}\n\ncheck({problem['entry_point']})\n"


def passes(completion: str, problem: Mapping[str, str]) -> bool:
    """Whether the test ends without a complaint, within its time."""
    with tempfile.TemporaryDirectory() as place:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", program(completion, problem)],
                cwd=place,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=TEST_LIMIT_S,
                preexec_fn=_limits,
                check=False,
            )
        except (OSError, ValueError, subprocess.SubprocessError):
            return False
        return done.returncode == 0


def _limits() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (TEST_MEMORY_BYTES, TEST_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (TEST_LIMIT_S, TEST_LIMIT_S))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
