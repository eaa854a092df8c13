"""Tasks of Inspect and lm-eval: their traps, each as the libraries set it (docs/harnesses.md). No model: an engine that is a function."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from autorl_hpc_harnesses.inspect_child import Refused
from autorl_hpc_harnesses.lm_eval_child import Evaluation
from needs import needs

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import Root
from autorl_hpc.records.task import Sampling, task_name
from autorl_hpc.rollouts.engine import Answer, LogLikelihood
from autorl_hpc.scoring.harness import Harnessed, library
from autorl_hpc.scoring.outcome import Context, JudgeFailed, Outcome, Verdict
from autorl_hpc.scoring.registry import scorer
from autorl_hpc.stage.stage import stage
from autorl_hpc.tasks.heldout import Item, load_items
from autorl_hpc.tasks.loader import load_task

INSTALLED = any(entry_points(group="autorl_hpc.harnesses"))
HAS = {name: INSTALLED and importlib.util.find_spec(name) is not None for name in ("inspect_ai", "lm_eval")}
pytestmark = pytest.mark.xdist_group("harnesses")  # one process keeps the children
with_inspect = needs("harnesses", HAS["inspect_ai"], "Inspect AI")
with_lm_eval = needs("harnesses", HAS["lm_eval"], "lm-evaluation-harness")

TASKS = '''
import json, os
from pathlib import Path
from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample, json_dataset
from inspect_ai.model import get_model
from inspect_ai.scorer import Score, accuracy, mean, match, model_graded_qa, scorer
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

IDS = ["a1", "a[1]", "0012", 12, *[f"n{number}" for number in range(116)]]


def samples():
    return MemoryDataset([Sample(id=one, input=f"say {one}", target=str(one)) for one in IDS])


@scorer(metrics=[mean()])
def odd():
    async def score(state, target):
        assert "AUTORL_FROM_DOTENV" not in os.environ, "the .env beside the task was read"
        if "broken" in state.output.completion:
            raise ValueError("no number in it")
        values = {"nan": float("nan"), "two": 2.0, "table": {"a": 1.0}}
        return Score(value=values.get(state.output.completion, float(state.output.completion == target.text)))
    return score


@task
def plain():
    return Task(dataset=samples(), solver=generate(cache=True, max_tokens=5, stop_seqs=["!"]), scorer=odd(), time_limit=1)


@task
def filed():
    return Task(dataset=json_dataset("rows.json"), solver=generate(), scorer=match())


@task
def judged():
    return Task(dataset=samples(), solver=generate(), scorer=model_graded_qa())


@tool
def add():
    async def execute(x: int):
        """Add.

        Args:
            x: A number.
        """
        return x
    return execute


@task
def tools():
    return Task(dataset=samples(), solver=[use_tools(add()), generate()], scorer=match())


@scorer(metrics=[accuracy()])
def asks_itself():
    async def score(state, target):
        return Score(value="C" if "C" in (await get_model().generate("right?")).completion else "I")
    return score


@task
def itself():
    return Task(dataset=samples(), solver=generate(), scorer=asks_itself())


@task
def docker():
    return Task(dataset=samples(), solver=generate(), scorer=match(), sandbox="docker")


@task
def local():
    return Task(dataset=samples(), solver=generate(), scorer=match(), sandbox="local")


@task
def several():
    return Task(dataset=samples(), solver=generate(), scorer=match(), model_roles={"critic": "mockllm/model"})


@task
def twice():
    return Task(dataset=MemoryDataset([Sample(id=1, input="a"), Sample(id="1", input="b")]), scorer=match())
'''
REFUSED = {
    "tools": "tools, which are not run here",
    "itself": "asks the model under test",
    "docker": "needs a sandbox (docker)",
    "local": "needs a sandbox (local)",
    "several": "several models",
    "twice": "the same id",
    "nothing": "no task nothing",
}


class Engine:
    """Answers by a function of the prompt's text, which it takes for its tokens; counts batches."""

    context_tokens = 64

    def __init__(self, answer: Callable[[str], str] = lambda text: "") -> None:
        self._answer = answer
        self.batches: list[list[str]] = []
        self.samplings: list[Sampling] = []

    def encode(self, text: str) -> list[int]:
        return [1, *map(ord, text)]

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        return None

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Answer]:
        self.batches.append([self._text(prompt) for prompt in prompts])
        self.samplings.append(sampling)
        return [Answer(self._answer(text), 2, False) for text in self.batches[-1]]

    def loglikelihood(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[LogLikelihood]:
        self.batches.append([f"{self._text(context)}|{self._text(tokens)}" for context, tokens in pairs])
        return [LogLikelihood(-float(len(tokens)), False) for _, tokens in pairs]

    @staticmethod
    def _text(tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens)).replace("\x01", "")


class AJudge:
    """Says the same of every answer; refuses some."""

    model = "judge"

    def ask(self, conversations: Sequence[Any], *, max_tokens: int, logprobs: int = 0) -> list[Verdict]:
        self.asked = [str(one[-1]["content"]) for one in conversations]
        return [
            Verdict("", refused="filtered") if "say n7\n" in text else Verdict("fine. GRADE: C") for text in self.asked
        ]

    def forget(self, verdicts: Sequence[Verdict]) -> None: ...


class Staged:
    """A staged task: its items and ways to play them."""

    def __init__(self, root: Root, asked: str) -> None:
        self.root, self.task = root, load_task(task_name(asked), root=root)
        self.recipe = self.task.file.recipes[0]
        self.items = {s: load_items(root, self.task.name, s, pin) for s, pin in self.task.file.splits.items()}

    def play(
        self, engine: Any, split: str = "report", context: Context | None = None, limit: int | None = None
    ) -> tuple[list[Item], list[Outcome], Mapping[str, float]]:
        items = self.items[split][:limit]
        vault, given = self.root.task_vault(self.task.name), context or Context()
        answers, _ = library(self.recipe.scorer).play(
            [item.data for item in items], self.recipe, vault, engine, given, order=None
        )
        rater = scorer(self.recipe.scorer, self.recipe.scorer_version)
        outcomes = rater.score(items, [[answer.text] for answer in answers], given)
        return items, outcomes, rater.metrics(items, outcomes)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Root]:
    root = Root(tmp_path_factory.mktemp("harnesses"))
    (root.path / "tasks.py").write_text(TASKS)
    (root.path / "rows.json").write_text(json.dumps([{"id": n, "input": f"{n}", "target": f"{n}"} for n in range(8)]))
    (root.path / ".env").write_text("AUTORL_FROM_DOTENV=taken\nOPENAI_API_KEY=sk-none\n")
    before = Path.cwd()
    os.chdir(root.path)
    yield root
    os.chdir(before)


def staged(root: Root, asked: str, **settings: str) -> Staged:
    stage(root, [asked], settings=settings)
    return Staged(root, asked)


def says(text: str) -> str:
    """Return the word after `say`, as a perfect model."""
    return text.partition("say ")[2].split("\n")[0]


def test_names() -> None:
    names = {
        "inspect:inspect_evals/gsm8k": "inspect-gsm8k",
        "inspect:a/b.py@c": "inspect-b-c",
        "lm-eval:mmlu": "lm-eval-mmlu",
    }
    names |= {"lm-eval:a/b.yaml": "lm-eval-b", "gsm8k": "gsm8k", "env:x": "env:x"}
    assert {text: task_name(text) for text in names} == names


@with_inspect
def test_inspect_samples_batches_weights_and_lost_scores(place: Root) -> None:
    task = staged(place, "inspect:tasks.py@plain", feedback="20", report="100")
    ids = [item.id for split in task.items.values() for item in split]
    assert sorted(ids) == sorted(map(str, [*("a1", "a[1]", "0012", 12), *(f"n{n}" for n in range(116))]))
    right = Engine(says)
    items, outcomes, metrics = task.play(right)
    assert [item.id for item in items if "n" not in item.id] and all(one.value == 1 for one in outcomes)
    assert [len(batch) for batch in right.batches] == [100]  # not Inspect's own 20, 40, 80
    assert (right.samplings[0].max_new_tokens, right.samplings[0].stop) == (5, ("!",))  # the task's
    assert metrics == {"odd/mean": 1.0}
    wrong = Engine(lambda text: "wrong")  # other weights in the same process: no engine and no answer is remembered
    assert {one.value for one in task.play(wrong)[1]} == {0.0}
    for bad in ("broken", "nan", "two", "table"):  # one of a hundred has no score: no zero, and it counts neither way
        lost = items[3].id
        items, outcomes, _ = task.play(
            Engine(lambda text, lost=lost, bad=bad: bad if says(text) == lost else says(text))
        )
        assert [item.id for item, one in zip(items, outcomes, strict=True) if one.value is None] == [lost], bad
        assert {one.value for one in outcomes} == {None, 1.0}
    with pytest.raises(JudgeFailed, match=r"100 of 100 items have no score, the first: .*no number in it"):
        task.play(Engine(lambda text: "broken"))
    assert len(task.play(right, "feedback")[1]) == 20
    assert len(task.play(right, limit=3)[1]) == 3


@with_inspect
def test_inspect_splits_are_the_same_everywhere_but_with_a_secret(place: Root) -> None:
    one = staged(place, "inspect:tasks.py@filed", feedback="0.25", report="4")
    (place.path / "rows.json").unlink()  # its loader never runs again
    assert [item.id for item in one.items["feedback"]] == ["5", "6"] and len(one.items["report"]) == 4
    assert [each.value for each in one.play(Engine(lambda text: text.split()[-1]))[1]] == [1.0] * 4
    (place.path / "rows.json").write_text(json.dumps([{"id": n, "input": f"{n}", "target": f"{n}"} for n in range(8)]))
    (place.vault / ".split-secret").write_bytes(b"of another installation")
    stage(place, ["inspect:tasks.py@filed"], settings={"feedback": "2", "report": "4", "secret": "true"}, again=True)
    hidden = Staged(place, "inspect:tasks.py@filed")
    assert [item.id for item in hidden.items["feedback"]] != ["5", "6"]
    assert "secret of this installation" in hidden.task.file.source
    with open(place.path / "tasks.py", "a") as file:
        file.write("# changed\n")
    with pytest.raises(AutorlError, match="staged from something else"):
        stage(place, ["inspect:tasks.py@filed"])
    with pytest.raises(AutorlError, match="8 samples: 6 for feedback and 4"):
        stage(place, ["inspect:tasks.py@filed"], settings={"feedback": "6", "report": "4"}, again=True)


@with_inspect
def test_inspect_judges_are_the_experiments(place: Root) -> None:
    task = staged(place, "inspect:tasks.py@judged", feedback="10", report="110")
    assert task.recipe.judge == "discrete"  # seen while it was staged: launch asks for a judge
    engine, judge = Engine(says), AJudge()
    items, outcomes, _ = task.play(engine, context=Context(judge=judge))
    assert len(engine.batches) == 1 and len(judge.asked) > 50  # the model under test never judges itself
    refused = [item.id for item, one in zip(items, outcomes, strict=True) if one.value is None]
    assert refused == ["n7"] and {one.value for one in outcomes} == {1.0, None}
    with pytest.raises(JudgeFailed, match="its recipe names none"):
        task.play(engine)


@with_inspect
def test_inspect_refuses(place: Root) -> None:
    for name in ("tools", "itself", "twice", "docker"):
        with pytest.raises(AutorlError) as refused:
            stage(place, [f"inspect:tasks.py@{name}"], settings={})
        assert REFUSED[name] in refused.value.what
        assert not place.task_vault(f"inspect-tasks-{name}").exists()
    (place.path / "task.py").write_text(TASKS)
    first = {"args": {}, "vault": str(place.path), "load": True, "home": str(place.path)}
    code = "import json, sys; from autorl_hpc_harnesses.inspect_child import _begin; given = json.loads(sys.argv[1])\n"
    code += "print(json.dumps([_begin(one)[0] for one in given]))"
    given = json.dumps([{**first, "task": f"task.py@{name}"} for name in REFUSED])
    done = subprocess.run([sys.executable, "-c", code, given], capture_output=True, text=True, check=True)
    told = dict(zip(REFUSED, json.loads(done.stdout.splitlines()[-1]), strict=True))
    assert all(REFUSED[name] in told[name]["error"] for name in ("docker", "local", "several", "nothing")), told


LM_TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{train: docs.jsonl, test: docs.jsonl}}}}
training_split: train
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
metadata: {{version: 1}}
"""
LM = {
    "choice": (
        "multiple_choice",
        'doc_to_target: "{{answer}}"\ndoc_to_choice: "{{choices}}"\nnum_fewshot: 1\nfewshot_split: train\n',
    ),
    "written": (
        "generate_until",
        'doc_to_target: "{{word}}"\ngeneration_kwargs: {until: ["."], max_gen_toks: 7}\nmetric_list: [{metric: exact_match}]\n',
    ),
    "rolling": ("loglikelihood_rolling", 'doc_to_target: "{{text}}"\nmetric_list: [{metric: byte_perplexity}]\n'),
    "unsafe": (
        "generate_until",
        'doc_to_target: "{{word}}"\nunsafe_code: true\nmetric_list: [{metric: exact_match}]\n',
    ),
}


@pytest.fixture
def documents(place: Root) -> Root:
    rows = [
        {
            "question": f"q{n}",
            "choices": ["x" * (1 + n % 2), "yyy"],
            "answer": n % 2,
            "word": f"w{n}",
            "text": f"text {n} " * 20,
        }
        for n in range(120)
    ]
    (place.path / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, (kind, more) in LM.items():
        (place.path / f"{name}.yaml").write_text(LM_TASK.format(name=name, kind=kind) + more)
    return place


@with_lm_eval
def test_lm_eval_multiple_choice_and_rolling(documents: Root) -> None:
    task = staged(documents, "lm-eval:choice.yaml", feedback="5", report="110", chat="none")
    engine = Engine()
    items, outcomes, metrics = task.play(engine)
    assert [len(batch) for batch in engine.batches] == [220]
    # The shorter continuation is likelier here; each document keeps its own label, whatever part is asked.
    assert [one.value for one in outcomes] == [float(item.data["doc"]["answer"] == 0) for item in items]
    assert metrics["choice/acc,none"] == pytest.approx(sum(one.value or 0 for one in outcomes) / 110)
    assert task.play(Engine(), limit=4)[1] == outcomes[:4]
    rolling = staged(documents, "lm-eval:rolling.yaml", feedback="5", report="10", chat="none")
    engine = Engine()
    items, outcomes, _ = rolling.play(engine)
    texts = [item.data["doc"]["text"] for item in items]
    asked = [part.partition("|")[2] for part in engine.batches[0]]
    assert sorted("".join(asked)) == sorted("".join(texts))  # each token once, in windows of the engine's size
    assert all(len(part) <= engine.context_tokens + 1 for part in engine.batches[0])
    assert [one.value for one in outcomes] == pytest.approx([0.36788] * 10, abs=1e-4)  # e^-1 a byte


@with_lm_eval
def test_lm_eval_texts(documents: Root) -> None:
    task = staged(documents, "lm-eval:written.yaml", feedback="5", report="110", chat="none")
    engine = Engine(lambda text: "w" + text[1:])
    _, outcomes, _ = task.play(engine)
    assert [one.value for one in outcomes] == [1.0] * 110 and [len(batch) for batch in engine.batches] == [110]
    assert (engine.samplings[0].max_new_tokens, engine.samplings[0].stop, engine.samplings[0].temperature) == (
        7,
        (".",),
        0.0,
    )
    assert len(task.play(engine, limit=1)[1]) == 1
    with pytest.raises(AutorlError, match="never happens in the grader"):
        stage(documents, ["lm-eval:unsafe.yaml"])


def test_a_metric_of_lm_eval_that_fails_costs_its_document_alone() -> None:
    """lm-eval itself gives up all documents for one exception, and a metric that is missing leaves its denominator."""

    def metric(doc: str, results: Any) -> dict[str, float]:
        return {"acc": {"good": 1.0, "beyond": 7.0, "none": float("nan")}[doc]}

    class Task:
        process_results = staticmethod(metric)
        aggregation = staticmethod(lambda: {"acc": sum})
        higher_is_better = staticmethod(lambda: {"acc": True})

    documents = ["good", "raises", "beyond", "none", "good"]
    evaluation = Evaluation({"task": Task}, {"args": {}, "chat": False})
    samples = [
        {"filter": "none", "doc_id": n, "resps": [["text"]], **Task.process_results(doc, [])}
        for n, doc in enumerate(documents)
    ]
    found = evaluation._outcomes(Task, samples[::-1], SimpleNamespace(lengths={"text": (3, True)}), 5)
    assert [one["outcome"] for one in found] == [1.0, None, None, None, 1.0]
    assert "KeyError: 'raises'" in found[1]["why"] and (found[0]["tokens"], found[0]["truncated"]) == (3, True)
    with pytest.raises(Refused, match="no metric f1"):
        Evaluation({}, {"args": {"metric": "f1"}, "chat": False})._outcomes(Task, samples, None, 5)


def test_a_lost_score_is_no_zero_and_too_many_are_no_score() -> None:
    class Of(Harnessed):
        kind = "inspect"

    told = [
        [json.dumps({"outcome": 1.0 if n else None, "text": "", "why": "judge", "metrics": {}})] for n in range(100)
    ]
    items = [Item(str(n), "q", "a") for n in range(100)]
    assert [one.value for one in Of().score(items, told, Context())] == [None, *[1.0] * 99]
    with pytest.raises(JudgeFailed, match="2 of 101"):
        Of().score([*items, items[0]], [*told, told[0]], Context())
