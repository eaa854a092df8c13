"""bin/check-task plays a task's environment: what is wrong with it is told before anybody trains with it."""

from __future__ import annotations

import hashlib
import json
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from realdata import REPO

from autorl_hpc.tasks.loader import PATH_VARIABLE

ENVIRONMENT = """
from autorl_hpc.rollouts.environment import Step


class Environment:
    def __init__(self):
        pass

    def reset(self, goal, seed):
        self.number = goal["number"]
        return "I think of a number."

    def step(self, action):
        if action == str(self.number):
            return Step("Right!", done=True, reward=1.0)
        return Step("No.")

    def close(self):
        pass


class Dialogue:
    def prompt(self, transcript):
        return transcript.first

    def action(self, completion):
        return completion.strip()
"""
ORACLE = "\n\ndef oracle(goal):\n    return ['0', str(goal['number'])]\n"
PREPARE = """from pathlib import Path

def prepare(source, out):
    for split in ("feedback", "report"):
        (out / split).mkdir()
        (out / split / "items.jsonl").write_bytes((Path(__file__).parent / "items.bytes").read_bytes())
"""


Check = Callable[..., tuple[int, str]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """The exit code and the words of bin/check-task on a task with that environment."""
    monkeypatch.setenv(PATH_VARIABLE, "")

    def checking(environment: str, **item: Any) -> tuple[int, str]:
        folder = task_folder(Path(tempfile.mkdtemp(dir=tmp_path)), environment, **item)
        monkeypatch.setattr(sys, "argv", ["check-task", str(folder)])
        code = runpy.run_path(str(REPO / "bin" / "check-task"))["main"]()
        return code, "".join(capsys.readouterr())

    return checking


def task_folder(folder: Path, environment: str, **item: Any) -> Path:
    made = folder / "guess"
    made.mkdir()
    data = b"".join(json.dumps({"id": f"g{n}", "number": n, **item}).encode() + b"\n" for n in (3, 4))
    (made / "items.bytes").write_bytes(data)
    (made / "environment.py").write_text(environment)
    (made / "prepare.py").write_text(PREPARE)
    (made / "description.md").write_text("x\n")
    pin = {"n": 2, "sha256": hashlib.sha256(data).hexdigest()}
    recipe = {"name": "default", "version": 1, "prompt": "{question}", "sampling": {"max_new_tokens": 4}}
    recipe |= {"max_steps": 3, "scorer": "episodes", "scorer_version": "1"}
    value = {"name": "guess", "title": "t", "source": "s", "licence": "l", "train_files": {}, "recipes": [recipe]}
    value |= {"splits": {"feedback": pin, "report": pin}, "environment": "environment.py:Environment"}
    (made / "task.yaml").write_text(yaml.safe_dump(value))
    return made


def test_perfect_play_of_a_function_and_of_the_items(check: Check) -> None:
    for code, said in (check(ENVIRONMENT + ORACLE), check(ENVIRONMENT, oracle=["3", "4"])):
        assert code == 0 and said.count("perfect answers score 100, empty ones 0") == 2, said


BROKEN = {
    "__init__ raises": (("        pass\n\n    def reset", "        raise OSError('no key')\n\n    def reset"), 1, "OSError: no key"),
    "it can't be imported": (("class Environment:", "import no_such_module\nclass Environment:"), 1, "No module named"),
    "no reset": (("def reset", "def begin"), 1, "reset of goal g3: AttributeError: 'Environment' object has no attribute 'reset'"),
    "two": (("reward=1.0", "reward=2.0"), 1, "step('3') of goal g3: InvalidStep: a reward lies between 0 and 1, not 2.0"),
    "the dialogue raises": (("return transcript.first", "return transcript.frist"), 1, "has no attribute 'frist'"),
    "it dies": (('return Step("No.")', "import os; os._exit(3)"), 1, "the environment ended its process (exit code 3)"),
    "anybody wins": (('return Step("No.")', 'return Step("No.", True, 1.0)'), 1, "empty ones 100  <- must be 100 and 0"),
    "nobody wins": (("reward=1.0", "reward=0.5"), 1, "perfect answers score 0, empty ones 0  <- must be 100 and 0"),
    "the oracle raises": (("return ['0'", "return [goal['x']"), 1, "KeyError: 'x'"),
    "the oracle is not a list": (("return ['0', str(goal['number'])]", "return [1]"), 1, "the oracle of goal g3 is not a list of actions"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_named(check: Check, name: str) -> None:
    (old, new), code, words = BROKEN[name]
    text = ENVIRONMENT + ORACLE
    assert old in text
    found, said = check(text.replace(old, new))
    assert found == code and words in said, said
