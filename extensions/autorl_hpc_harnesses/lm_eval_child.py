"""Process that runs one lm-eval task or group: once to load its documents (`stage`), then for each evaluation. Prompts, filters and
metrics are lm-eval's; the parent's engine answers all requests of one kind at once."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autorl_hpc.rollouts.child import Answering, hide_memory, serve
from autorl_hpc_harnesses.evaluations import MAX_WORDS, Evaluations, Refused, read_from, words_of

SEED = 1234  # lm-eval's own, of the draw of worked examples
MAX_GEN_TOKS = 256  # lm-eval's own, for tasks that name no limit
TURNS = "\x02messages "
"""Begins a context that is a conversation as JSON: the parent's engine has the chat template."""


def main() -> int:
    """Run until stdin ends; return the exit code."""
    return serve(_begin, shown=False)


def _begin(first: dict[str, Any]) -> tuple[dict[str, Any], Answering]:
    hide_memory()
    work = tempfile.mkdtemp(prefix="autorl-lm-eval-")
    os.environ["LM_HARNESS_CACHE_PATH"] = os.environ["HF_DATASETS_CACHE"] = work
    try:
        datasets = Datasets(Path(first["vault"]), first["load"], first.get("from"))
        tasks = _tasks(first)
    except Refused as error:
        return {"error": str(error)}, lambda _: {}
    except BaseException as error:
        return {"error": words_of(error)}, lambda _: {}
    if first["load"]:
        return {"ready": True}, lambda _: _described(first, tasks, datasets)
    return {"ready": True}, Evaluation(tasks, first).answer


class Datasets:
    """`datasets.load_dataset`. While staging, what it returns is kept; later it is returned again and nothing is loaded."""

    def __init__(self, vault: Path, load: bool, source: str | None) -> None:
        import datasets

        if load and source is not None:
            read_from(Path(source))
        self.kept: dict[str, Any] = {} if load else json.loads((vault / "datasets.json").read_text(encoding="utf-8"))
        self._loader, self._load = datasets.load_dataset, load
        self.found: dict[str, Any] = {}
        datasets.load_dataset = self._call

    def _call(self, path: str, name: str | None = None, **named: Any) -> Any:
        import datasets

        key = json.dumps([path, name, named], sort_keys=True, default=str)
        if key in self.found:  # tasks of a group may share a dataset, and each asks its own documents
            return self.found[key] if self._load else datasets.DatasetDict(self.found[key])
        if self._load:
            found = self._loader(path, name, **named)
        elif key in self.kept:
            found = datasets.DatasetDict({s: datasets.Dataset.from_list(rows) for s, rows in self.kept[key].items()})
        else:
            raise Refused("it loads another dataset than when it was staged")
        self.found[key] = found
        return found


def _tasks(first: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tasks by name; a group has several. Raises Refused."""
    from lm_eval.tasks import TaskManager

    args = dict(first["args"])
    if set(args) - {"num_fewshot", "metric", "filter"}:
        raise Refused(
            f"--set {sorted(set(args) - {'num_fewshot', 'metric', 'filter'})[0]}: not known of an lm-eval task"
        )
    name, file = first["task"], Path(first["vault"]) / "task.yaml"
    manager = TaskManager(include_defaults=not file.is_file())  # the index of lm-eval's own tasks takes ten seconds
    tasks: dict[str, Any] = manager.load([str(file)] if file.is_file() else [name])["tasks"]
    for own, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task.config, "unsafe_code", False):
            raise Refused(
                f"{own} runs a model's code (code_eval), which never happens in the grader; see the task humaneval"
            )
        if getattr(task, "MULTIMODAL", False) or task.OUTPUT_TYPE not in KINDS:
            raise Refused(f"{own} needs {'images' if getattr(task, 'MULTIMODAL', False) else task.OUTPUT_TYPE}")
        if "num_fewshot" in args:
            task.set_config(key="num_fewshot", value=args["num_fewshot"])
    return tasks


KINDS = ("generate_until", "multiple_choice", "loglikelihood", "loglikelihood_rolling")


def _asked_split(task: Any) -> str:
    split: str = task.config.test_split if task.has_test_docs() else task.config.validation_split
    return split


def _described(first: Mapping[str, Any], tasks: Mapping[str, Any], datasets: Datasets) -> dict[str, Any]:
    try:
        rows: list[Any] = []
        train: list[Any] = []
        kept: dict[str, Any] = {}
        asked: dict[str, set[str]] = defaultdict(set)
        shown: dict[tuple[str, str], str] = {}
        for name, task in tasks.items():
            split, loaded = _asked_split(task), task.dataset
            key = next(key for key, found in datasets.found.items() if found is loaded)
            asked[key].add(split)
            shown[key, split] = task.config.training_split if task.has_training_docs() else split
            for number, doc in enumerate(loaded[split]):
                rows.append({"id": f"{name}-{number}", **_row(task, name, doc)})
            if task.has_training_docs():
                train += [_row(task, name, doc) for doc in loaded[task.config.training_split]]
        for key, found in datasets.found.items():
            # An asked split stays with one document, so that lm-eval sees its columns; worked examples come of the others.
            columns = {s: found[shown[key, s]].select([0]) if s in asked[key] else part for s, part in found.items()}
            kept[key] = {s: [dict(doc) for doc in part] for s, part in columns.items()}
        sampling = [task.config.generation_kwargs or {} for task in tasks.values()]
        most = max((int(one.get("max_gen_toks", MAX_GEN_TOKS)) for one in sampling), default=MAX_GEN_TOKS)
        found = {
            **{"rows": rows, "name": first["task"], "title": first["task"], "train": train, "packages": []},
            "open": True,
            "files": {"datasets.json": json.dumps(kept, sort_keys=True)},
            "sampling": {"max_new_tokens": most},
        }
        Path(first["found"]).write_text(json.dumps(found), encoding="utf-8")  # too long for a line
        return {}
    except Refused as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": words_of(error)}


def _row(task: Any, name: str, doc: Any) -> dict[str, Any]:
    told = json.dumps(doc, sort_keys=True)
    question = told if task.config.process_docs else str(task.doc_to_text(doc)) or told
    return {"question": question, "answer": told, "task": name, "doc": doc}


class Evaluation(Evaluations):
    """Evaluations of one task or group, one after the other."""

    def __init__(self, tasks: Mapping[str, Any], first: Mapping[str, Any]) -> None:
        self._tasks, self._args, self._chat = tasks, first["args"], first["chat"]
        super().__init__()
        self._whys: list[str] = []
        for task in tasks.values():
            task.process_results = self._guarded(task.process_results)

    def _guarded(self, metric: Callable[..., Any]) -> Callable[..., Any]:
        def process(doc: Any, results: Any) -> Any:
            try:
                return metric(doc, results)
            except Exception as error:  # lm-eval would give up all documents for one
                self._whys.append(words_of(error))
                return {}

        return process

    def ask(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the parent's answers."""
        self._out.put({"ask": list(requests)})
        found: list[dict[str, Any]] = self._back.get()["answers"]
        return found

    def _scores(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        import datasets
        from lm_eval.evaluator import evaluate

        self._whys.clear()
        of_task: dict[str, list[Any]] = defaultdict(list)
        for row in rows:
            of_task[row["task"]].append(row["doc"])
        tasks = {name: self._tasks[name] for name in of_task}
        for name, task in tasks.items():
            task.dataset[_asked_split(task)] = datasets.Dataset.from_list(of_task[name])
            task._instances = None
            task.set_fewshot_seed(SEED)
            if len(list(task.eval_docs)) != len(of_task[name]):
                raise Refused(f"{name} leaves out some of its documents")
        lm = _model(self)
        named: dict[str, Any] = {"apply_chat_template": self._chat, "fewshot_as_multiturn": self._chat}
        result = evaluate(lm=lm, task_dict={"tasks": tasks, "groups": {}}, bootstrap_iters=0, log_samples=True, **named)
        found = {name: self._outcomes(tasks[name], result["samples"][name], lm, len(of_task[name])) for name in tasks}
        taken = {name: iter(one) for name, one in found.items()}
        values = {f"{task}/{name}": value for task, one in result["results"].items() for name, value in one.items()}
        metrics = {
            name: float(value)
            for name, value in values.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        }
        return {"rows": [next(taken[row["task"]]) for row in rows], "metrics": metrics}

    def _outcomes(self, task: Any, samples: Sequence[Mapping[str, Any]], lm: Any, count: int) -> list[dict[str, Any]]:
        filters = list(dict.fromkeys(one["filter"] for one in samples))
        chosen = self._args.get("filter", filters[0])
        metric = self._args.get("metric") or next(iter(task.aggregation()))
        if chosen not in filters or metric not in task.aggregation():
            raise Refused(
                f"there is no metric {metric} with filter {chosen}: {', '.join(task.aggregation())}; {', '.join(filters)}"
            )
        found: dict[int, dict[str, Any]] = {}
        for one in samples:
            if one["filter"] == chosen:
                outcome = _outcome(one.get(metric), bool(task.higher_is_better().get(metric, True)))
                why = (
                    ""
                    if outcome is not None
                    else (self._whys[0] if self._whys else f"{metric} is {one.get(metric)!r:.80}")
                )
                told = [str(part) for answers in one["resps"] for part in answers]
                lengths = [lm.lengths.get(part, (0, False)) for answers in one["resps"] for part in map(str, answers)]
                found[one["doc_id"]] = {
                    **{"outcome": outcome, "why": why[:MAX_WORDS], "text": "\0".join(told)},
                    **{"tokens": sum(n for n, _ in lengths), "truncated": any(cut for _, cut in lengths)},
                }
        return [found[number] for number in range(count)]


def _outcome(value: Any, higher: bool) -> float | None:
    """Return a metric's value of one document as 0 to 1. A log-likelihood with its length becomes the mean probability of a unit."""
    if isinstance(value, (tuple, list)) and len(value) == 2 and value[1]:
        return math.exp(min(0.0, float(value[0]) / float(value[1])))
    if isinstance(value, bool) or (isinstance(value, (int, float)) and math.isfinite(value) and 0 <= value <= 1):
        return float(value) if higher else 1.0 - float(value)
    return float(value) if type(value).__module__ == "numpy" and 0 <= float(value) <= 1 else None


def _model(desk: Evaluation) -> Any:
    from lm_eval.api.model import LM

    class Asking(LM):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.lengths: dict[str, tuple[int, bool]] = {}

        def generate_until(self, requests: Any) -> list[str]:
            asked = []
            for context, given in (request.args for request in requests):
                stop = given.get("until") or []
                drawn = given.get("do_sample", False)
                wanted = {
                    "stop": [stop] if isinstance(stop, str) else list(stop),
                    **({"max_new_tokens": int(given["max_gen_toks"])} if "max_gen_toks" in given else {}),
                    "temperature": float(given.get("temperature", 1.0)) if drawn else 0.0,
                }
                asked.append({**_context(context), "sampling": wanted})
            answers = desk.ask(asked)
            for one in answers:
                self.lengths[one["text"]] = (int(one["tokens"]), bool(one["truncated"]))
            return [one["text"] for one in answers]

        def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
            pairs = [request.args for request in requests]
            answers = desk.ask([{**_context(context), "continuation": continuation} for context, continuation in pairs])
            return [(float(one["logprob"]), bool(one["greedy"])) for one in answers]

        def loglikelihood_rolling(self, requests: Any) -> list[float]:
            answers = desk.ask([{"rolling": request.args[0]} for request in requests])
            return [float(one["logprob"]) for one in answers]

        def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
            if not add_generation_prompt:
                raise Refused("it begins the model's answer itself: stage it with --set chat=none")
            return TURNS + json.dumps(chat_history)

        @property
        def tokenizer_name(self) -> str:
            return "autorl"

    return Asking()


def _context(text: str) -> dict[str, Any]:
    return {"messages": json.loads(text.removeprefix(TURNS))} if text.startswith(TURNS) else {"text": text}


if __name__ == "__main__":
    sys.exit(main())
