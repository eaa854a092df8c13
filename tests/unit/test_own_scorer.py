"""The scorer of a task's own: what `evaluate` may do, and that everything else is an error of the task, never a score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autorl_hpc.errors import AutorlError
from autorl_hpc.scoring.outcome import Context, Outcome
from autorl_hpc.scoring.own import EvaluateFailed, OwnScorer
from autorl_hpc.scoring.own_child import InvalidScore, as_score
from autorl_hpc.states import Fault
from autorl_hpc.tasks.folders import scorer_sha256
from autorl_hpc.tasks.heldout import Item

ITEM = Item("item-7", "What is half of 14?", "7", {"unit": "apples"})


def made(folder: Path, text: str, name: str = "evaluate.py") -> OwnScorer:
    (folder / name).write_text(text, encoding="utf-8")
    return OwnScorer("halves", folder, "1")


def scored(rater: OwnScorer, texts: list[str], item: Item = ITEM, **options: Any) -> Outcome:
    (outcome,) = rater.score([item], [texts], Context(options=options, workers=2))
    return outcome


def returning(expression: str) -> str:
    return f"def evaluate(question, model_answer, reference, **kw):\n    return {expression}\n"


def test_question_answer_and_reference_arrive(tmp_path: Path) -> None:
    rater = made(
        tmp_path, returning("float((question, model_answer, reference) == ('What is half of 14?', 'so 7', '7'))")
    )
    assert scored(rater, ["so 7"]) == Outcome(1.0)
    assert scored(rater, ["so 8"]) == Outcome(0.0)
    assert scored(rater, ["so 7", "no", "no", "no"]) == Outcome(0.25), "of several samples the mean counts"


@pytest.mark.parametrize(
    ("head", "expression"),
    [
        ("q, a, r, **kw", "float(kw == {'id': 'item-7', 'unit': 'apples'})"),
        ("q, a, r", "1.0"),
        ("q, a, r, unit", "float(unit == 'apples')"),
        ("q, a, r, unit=None, other='x'", "float((unit, other) == ('apples', 'x'))"),
        ("q, a, r, *, id", "float(id == 'item-7')"),
        ("*given", "float(len(given) == 3)"),
    ],
)
def test_it_gets_the_fields_that_its_signature_names(tmp_path: Path, head: str, expression: str) -> None:
    rater = made(tmp_path, f"def evaluate({head}):\n    return {expression}\n")
    assert scored(rater, ["x"]) == Outcome(1.0)


def test_numpy_s_numbers_are_numbers() -> None:
    import numpy

    assert as_score(numpy.float32(0.5)) == 0.5 and as_score(numpy.int64(1)) == 1.0
    assert as_score(numpy.bool_(True)) == as_score(1.0 + 1e-12) == 1.0 and as_score(-1e-12) == 0.0
    with pytest.raises(InvalidScore):
        as_score(numpy.array([0.5]))


BAD = [
    ("return float('nan')", "evaluate returned nan"),
    ("return 2.0", "evaluate returned 2.0"),
    ("return '1.0'", "evaluate returned '1.0' (str), which is not a number"),
    ("return None", "evaluate returned None, which is not a number"),
    ("return {'score': 1.0}", "evaluate returned {'score': 1.0} (dict), which is not a number"),
    ("return float(reference[9])", "evaluate raised IndexError: string index out of range (evaluate.py, line 2)"),
    ("raise KeyError(kw['unit'])", "evaluate raised KeyError: 'apples' (evaluate.py, line 2)"),
    ("import sys; sys.exit(0)", "evaluate raised SystemExit: 0 (evaluate.py, line 2)"),
    ("raise KeyboardInterrupt", "evaluate raised KeyboardInterrupt (evaluate.py, line 2)"),
    ("return evaluate(question, model_answer, reference)", "evaluate raised RecursionError"),
    ("import os; os._exit(0)", "evaluate ended its process (exit code 0)"),
    ("import os; os.kill(os.getpid(), 11)", "evaluate ended its process (signal SIGSEGV)"),
    ("return len(bytearray(1 << 40))", "evaluate raised MemoryError"),
    ("raise ValueError('\\ud800')", "evaluate raised ValueError: ?"),
]


@pytest.mark.parametrize(("body", "words"), BAD, ids=[body for body, _ in BAD])
def test_what_is_no_score_is_the_task_s_error(tmp_path: Path, body: str, words: str) -> None:
    rater = made(tmp_path, f"def evaluate(question, model_answer, reference, **kw):\n    {body}\n")
    with pytest.raises(EvaluateFailed) as caught:
        scored(rater, ["7"])
    error = caught.value
    assert error.what.startswith(f"evaluate.py of task halves, item item-7: {words}"), error.what
    assert error.what.endswith("; a score is a number from 0 to 1")
    assert error.fault is Fault.GRADER and error.where == str(tmp_path / "evaluate.py")
    assert ("evaluate_memory_gib" if "MemoryError" in words else "bin/check-task") in (error.next_step or "")


def test_a_hang_ends_after_its_time_and_the_next_call_has_a_new_process(tmp_path: Path) -> None:
    rater = made(
        tmp_path,
        "import time\n\n\ndef evaluate(question, model_answer, reference):\n"
        "    while model_answer == 'hang':\n        time.sleep(1)\n    return 1.0\n",
    )
    with pytest.raises(EvaluateFailed, match=r"item-7: evaluate gave no answer within 0\.5 s") as caught:
        scored(rater, ["hang"], evaluate_timeout_s=0.5)
    assert "evaluate_timeout_s" in (caught.value.next_step or "")
    assert scored(rater, ["7"], evaluate_timeout_s=60) == Outcome(1.0)


UNUSABLE = [
    ("def evaluate(:\n", "evaluate can't be used: raised SyntaxError"),
    ("import no_such_module_at_all\n", "evaluate can't be used: raised ModuleNotFoundError"),
    ("x = 1\n", "evaluate can't be used: evaluate.py has no function evaluate"),
    ("evaluate = 3\n", "evaluate can't be used: evaluate.py has no function evaluate"),
    ("raise SystemExit(3)\n", "evaluate can't be used: raised SystemExit: 3 (evaluate.py, line 1)"),
]


@pytest.mark.parametrize(("text", "words"), UNUSABLE)
def test_a_file_that_can_t_be_used(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(EvaluateFailed) as caught:
        scored(made(tmp_path, text), ["7"])
    assert words in caught.value.what and caught.value.fault is Fault.GRADER


def test_secrets_and_gpus_stay_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "x")
    monkeypatch.setenv("HF_TOKEN", "x")
    monkeypatch.setenv("WORDS_PATH", "kept")
    body = "float((e.get('SOME_API_KEY'), e.get('HF_TOKEN'), e['WORDS_PATH'], e['CUDA_VISIBLE_DEVICES']) == (None, None, 'kept', ''))"  # fmt: skip
    rater = made(tmp_path, f"import os\n\n\ndef evaluate(q, a, r):\n    e = os.environ\n    return {body}\n")
    assert scored(rater, ["7"]) == Outcome(1.0)


def test_another_scorer_than_the_run_s_is_refused(tmp_path: Path) -> None:
    rater = made(tmp_path, returning("1.0"))
    pinned = scorer_sha256(tmp_path)
    (tmp_path / "description.md").write_text("may change\n")
    assert scored(rater, ["7"], evaluate_sha256=pinned) == Outcome(1.0)
    (tmp_path / "helper.py").write_text("x = 1\n")
    with pytest.raises(AutorlError, match="not the one that this run was launched with") as caught:
        scored(rater, ["7"], evaluate_sha256=pinned)
    assert caught.value.fault is Fault.CLUSTER
