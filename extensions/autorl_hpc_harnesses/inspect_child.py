"""Process that runs one Inspect task: once to load its samples (`stage`), then for each evaluation. Solvers, scorers and metrics are
Inspect's; its models are the suite's engine and judge, asked through the parent in batches as large as all samples that wait."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import json
import math
import os
import queue
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autorl_hpc.rollouts.child import Answering, hide_memory, serve
from autorl_hpc_harnesses.evaluations import MAX_WORDS, Evaluations, Refused, read_from, words_of

LOADERS = ("hf_dataset", "json_dataset", "csv_dataset", "file_dataset", "example_dataset")
QUIET_S = (
    0.2  # without a further request, those that wait are asked; for judges, and samples that ended before their solver
)


def main() -> int:
    """Run until stdin ends; return the exit code."""
    return serve(_begin, shown=False)


def _begin(first: dict[str, Any]) -> tuple[dict[str, Any], Answering]:
    hide_memory()
    work = tempfile.mkdtemp(prefix="autorl-inspect-")
    for variable in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "INSPECT_CACHE_DIR"):
        os.environ[variable] = work  # answers of other weights are not found in a cache
    os.environ["INSPECT_LOG_DIR"] = work
    import importlib.metadata as installed

    import dotenv

    # Inspect reads every installed package's list of files for each evaluation: half a second of CPU.
    installed.packages_distributions = functools.cache(installed.packages_distributions)
    dotenv.find_dotenv = lambda *_, **__: ""  # Inspect would take a .env of this folder or one above it
    os.chdir(first["home"] if first["load"] else work)
    try:
        datasets = Datasets(Path(first["vault"]), first["load"], first.get("from"))
        task, module, loaded = _load(first, datasets)
        _check(task)
    except Refused as error:
        return {"error": str(error)}, lambda _: {}
    except BaseException as error:
        return {"error": words_of(error)}, lambda _: {}
    if first["load"]:
        return {"ready": True}, lambda _: _described(first, task, module, loaded, datasets)
    return {"ready": True}, Evaluation(task, work).answer


# --- loading


class Datasets:
    """Inspect's dataset loaders. While staging, what they return is kept; later it is returned again and no loader runs."""

    def __init__(self, vault: Path, load: bool, source: str | None) -> None:
        import inspect_ai.dataset as place

        self._load, self._inside = load, False
        self.kept: list[Any] = [] if load else json.loads((vault / "datasets.json").read_text(encoding="utf-8"))
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []
        self._next = 0
        for name in LOADERS:
            setattr(place, name, self._keeping(getattr(place, name)))
        if load and source is not None:
            read_from(Path(source))

    def _keeping(self, loader: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            from inspect_ai.dataset import MemoryDataset, Sample

            if not self._load:
                if self._next >= len(self.kept):
                    raise Refused("it loads another dataset than when it was staged")
                kept, self._next = self.kept[self._next], self._next + 1
                return MemoryDataset([Sample.model_validate(one) for one in kept["samples"]], name=kept["name"])
            if self._inside:
                return loader(*given, **named)
            self._inside = True
            try:
                found = loader(*given, **named)
            finally:
                self._inside = False
            self.calls.append((loader, given, named, found))
            return found

        return call

    def to_keep(self, samples: Any, shown: Any) -> list[Any]:
        """Return what is kept of each call; of the task's own samples one of `shown` alone, because rows take their place."""
        return [
            {"name": found.name, "samples": [_sample(one) for one in (shown[:1] if found is samples else found)]}
            for _, _, _, found in self.calls
        ]

    def train(self, samples: Any) -> list[Any]:
        """Return the samples of the split `train` where the task's own come from another split of the same dataset; else none."""
        for loader, given, named, found in self.calls:
            if found is samples and str(named.get("split", "train")) != "train":
                try:
                    return list(loader(*given, **{**named, "split": "train"}))
                except Exception:
                    return []
        return []


def _load(first: Mapping[str, Any], datasets: Datasets) -> tuple[Any, Any, Any]:
    """Return the task, the module that defines it, and its dataset. Raises Refused: there is no such task."""
    import importlib

    from inspect_ai import Task

    name, args, file = first["task"], first["args"], Path(first["vault"]) / "task.py"
    if file.is_file():
        import importlib.util

        spec = importlib.util.spec_from_file_location("autorl_inspect_task", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        wanted = name.rpartition("@")[2]
    else:
        package, _, wanted = name.partition("/")
        module = importlib.import_module(package.replace("-", "_"))
        from inspect_ai._util.entrypoints import ensure_entry_points
        from inspect_ai._util.registry import registry_lookup

        ensure_entry_points()
        function = registry_lookup("task", name)
        if function is None:
            raise Refused(f"{package} has no task {wanted}")
        module = sys.modules[function.__module__]
    function = getattr(module, wanted, None)
    if function is None:
        raise Refused(f"{file.name if file.is_file() else name} has no task {wanted}")
    task = function(**args)
    if not isinstance(task, Task):
        raise Refused(f"{wanted} returns no Task")
    return task, module, task.dataset


def _check(task: Any) -> None:
    """Raise Refused for what needs Docker, tools, or several models."""
    samples = list(task.dataset)
    if task.sandbox is not None or any(one.sandbox or one.setup or one.files for one in samples):
        kind = getattr(task.sandbox, "type", task.sandbox) or "a sandbox"
        raise Refused(
            f"it needs a sandbox ({kind}), in which a model's code runs; the suite's own task may do (autorl-hpc list tasks)"
        )
    if task.model is not None or (task.model_roles and set(task.model_roles) - {"grader"}):
        raise Refused("it names models of its own: several models are not run here")
    if not task.scorer:
        raise Refused("it has no scorer")


def _sample(sample: Any) -> dict[str, Any]:
    kept: dict[str, Any] = sample.model_dump(mode="json", exclude_none=True)
    return kept


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "\n".join(str(getattr(one, "text", None) or getattr(one, "content", one)) for one in value)


def _described(first: Mapping[str, Any], task: Any, module: Any, samples: Any, datasets: Datasets) -> dict[str, Any]:
    try:
        rows = []
        for number, one in enumerate(samples, start=1):
            one.id = number if one.id is None else one.id
            row = {"id": str(one.id), "question": _text(one.input), "answer": _text(one.target), "sample": _sample(one)}
            rows.append(row)
        train = datasets.train(samples)
        name = first["task"].rpartition("@")[2].rpartition("/")[2]
        if not train and (function := getattr(module, f"{name}_train", None)):
            train = list(function().dataset)
        for number, one in enumerate(train, start=1):
            one.id = number if one.id is None else one.id
        config = task.config
        wanted = {"temperature": config.temperature, "max_new_tokens": config.max_tokens}
        package = first["task"].partition("/")[0].replace("-", "_")
        found = {
            **{"rows": rows, "name": first["task"], "title": name, "description": (module.__doc__ or "").strip()},
            "train": [
                {"question": _text(one.input), "answer": _text(one.target), "sample": _sample(one)} for one in train
            ],
            "open": any(found is samples for *_, found in datasets.calls),
            "files": {"datasets.json": json.dumps(datasets.to_keep(samples, train or samples), sort_keys=True)},
            "sampling": {key: value for key, value in wanted.items() if value is not None},
            "packages": [] if (Path(first["vault"]) / "task.py").is_file() else [package],
        }
        Path(first["found"]).write_text(json.dumps(found), encoding="utf-8")  # too long for a line
        return {}
    except Refused as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": words_of(error)}


# --- one evaluation

SOLVING: contextvars.ContextVar[bool] = contextvars.ContextVar("solving", default=False)


class Asker:
    """Gathers requests of all samples, and asks the parent when every sample that is not finished waits for an answer."""

    def __init__(self, unfinished: int, out: queue.Queue[Any], back: queue.Queue[Any]) -> None:
        self.unfinished = unfinished
        self._out, self._back = out, back
        self._waiting: list[tuple[str, Any, asyncio.Future[Any]]] = []
        self._under_way = self._watched = False
        self._news = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    async def ask(self, kind: str, request: Any) -> Any:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((kind, request, future))
        self._news += 1
        self.look()
        if not self._watched:
            self._watched = True
            self._start(self._when_quiet())
        return await future

    def finished(self) -> None:
        """Note that a sample's solver is over."""
        self.unfinished -= 1
        self.look()

    def look(self) -> None:
        """Ask if nothing more can come."""
        if not self._under_way and sum(kind == "ask" for kind, _, _ in self._waiting) >= max(1, self.unfinished):
            self._start(self._flush())

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _flush(self) -> None:
        if self._under_way or not self._waiting:
            return
        self._under_way = True
        batch, self._waiting = self._waiting, []
        asked: dict[str, list[Any]] = {"ask": [], "judge": []}
        for kind, request, _ in batch:
            asked[kind].append(request)
        self._out.put(asked)
        answer = await asyncio.to_thread(self._back.get)
        given = {"ask": iter(answer["answers"]), "judge": iter(answer["verdicts"])}
        for kind, _, future in batch:
            if not future.done():
                future.set_result(next(given[kind]))
        self._under_way = False
        self.look()

    async def _when_quiet(self) -> None:
        while True:
            seen = self._news
            await asyncio.sleep(QUIET_S)
            if self._news == seen and self._waiting and not self._under_way:
                await self._flush()


class Evaluation(Evaluations):
    """Evaluations of one task, one after the other."""

    def __init__(self, task: Any, work: str) -> None:
        self._task, self._work, self._number = task, work, 0
        super().__init__()
        # The engine's pace is not the task's, and a limit would count as a wrong answer.
        task.time_limit = task.working_limit = None
        task.config = task.config.model_copy(update={"timeout": None, "attempt_timeout": None})
        self._solver = task.solver

    def _scores(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        from inspect_ai import eval as run
        from inspect_ai.dataset import MemoryDataset, Sample
        from inspect_ai.model import get_model

        task = self._task
        self._number += 1
        task.dataset = MemoryDataset([Sample.model_validate(row["sample"]) for row in rows], name="rows")
        epochs = task.epochs or 1
        samples = len(rows) * epochs
        asker = Asker(samples, self._out, self._back)
        SEEN.clear()
        refusals: list[str] = []
        task.solver = _gathered()(self._solver, asker)
        # A new name each time: Inspect keeps models and cached answers by name, and these weights are others.
        name = f"{os.getpid()}-{self._number}"
        model = get_model(f"autorl/{name}", asker=asker, refusals=refusals, memoize=False)
        judge = get_model(f"autorl-judge/{name}", asker=asker, refusals=refusals, memoize=False)
        quiet: dict[str, Any] = {
            "log_realtime": False,
            "log_model_api": False,
            "log_samples": False,
            "ctl_server": False,
        }
        logs = run(
            task,
            model=model,
            model_roles={"grader": judge},
            log_dir=self._work,
            display="none",
            fail_on_error=False,  # a sample that failed has no score here, and counts neither way
            max_samples=samples,
            max_connections=samples,  # else a batch is as large as Inspect's own guess
            max_retries=0,
            **quiet,
        )
        if refusals:
            return {"error": refusals[0]}
        log = logs[0]
        if log.error is not None and not SEEN:
            return {"error": str(log.error.message)[:MAX_WORDS]}
        found = {"rows": _outcomes(rows, log, SEEN), "metrics": _metrics(log)}
        Path(log.location.removeprefix("file://")).unlink(missing_ok=True)  # read until here
        return found


SEEN: dict[str, list[Any]] = {}
"""What the hook below saw of each sample, in the present evaluation."""


def _outcomes(rows: Sequence[Mapping[str, Any]], log: Any, seen: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    from inspect_ai.scorer import value_to_float

    number = value_to_float()
    reduced = {str(one.sample_id): one for one in log.reductions[0].samples} if log.reductions else {}
    found = []
    for row in rows:
        key = str(row["sample"]["id"])
        ended, score = seen.get(key, []), reduced.get(key)
        failed = next((str(one.error.message) for one in ended if one.error is not None), "")
        outcome, why = None, failed or "its scorer gave nothing"
        if score is not None and not failed:
            outcome, why = _outcome(score.value, number)
        usage = [use for one in ended for use in one.model_usage.items() if use[0].startswith("autorl/")]
        found.append(
            {
                **{
                    "outcome": outcome,
                    "why": why[:MAX_WORDS],
                    "text": "\0".join(one.output.completion for one in ended),
                },
                "tokens": sum(use.output_tokens for _, use in usage),
                "truncated": any(one.output.stop_reason == "max_tokens" for one in ended),
            }
        )
    return found


def _outcome(value: Any, number: Callable[[Any], float]) -> tuple[float | None, str]:
    if not isinstance(value, (str, int, float, bool)):
        return None, f"its scorer gave {type(value).__name__}, not a number"
    result = number(value)
    if not math.isfinite(result) or not 0.0 <= result <= 1.0:
        return None, f"its scorer gave {value!r:.80}, not a number from 0 to 1"
    return result, ""


def _metrics(log: Any) -> dict[str, float]:
    scores = log.results.scores if log.results is not None else []
    found = {f"{one.name}/{name}": metric.value for one in scores for name, metric in one.metrics.items()}
    return {
        name: float(value) for name, value in found.items() if isinstance(value, (int, float)) and math.isfinite(value)
    }


@functools.cache
def _gathered() -> Any:
    """Return the solver around a task's own, after the providers and the hook are registered. Classes are made here, because Inspect
    takes a second to import."""
    from inspect_ai.hooks import Hooks, SampleEnd, hooks
    from inspect_ai.model import ChatCompletionChoice, ChatMessageAssistant, ModelAPI, ModelOutput, ModelUsage, modelapi
    from inspect_ai.solver import solver

    class Provider(ModelAPI):
        kind, model_under_test = "ask", True

        def __init__(self, model_name: str, asker: Asker, refusals: list[str], **given: Any) -> None:
            super().__init__(model_name, config=given["config"])
            self._asker, self._refusals = asker, refusals

        def max_connections(self) -> int:
            return 1 << 20

        def _refuse(self, words: str) -> None:
            self._refusals.append(words)
            raise Refused(words)

        async def generate(self, input: Any, tools: Any, tool_choice: Any, config: Any) -> Any:
            if tools:
                self._refuse("it gives the model tools, which are not run here")
            if self.model_under_test and not SOLVING.get():
                self._refuse("its scorer asks the model under test: a judge must be the role `grader`")
            turns = [{"role": one.role, "content": one.text} for one in input]
            wanted = {"temperature": config.temperature, "top_p": config.top_p, "stop": config.stop_seqs}
            wanted = {**wanted, "max_new_tokens": config.max_tokens}
            request = {"messages": turns, "max_tokens": config.max_tokens}
            if self.model_under_test:
                request = {"messages": turns, "sampling": {k: v for k, v in wanted.items() if v is not None}}
            answer = await self._asker.ask(self.kind, request)
            if "refused" in answer:
                raise RuntimeError(f"the judge refused this conversation: {answer['refused']}")
            message = ChatMessageAssistant(content=answer["text"], model=self.model_name, source="generate")
            reason: Any = "max_tokens" if answer.get("truncated") else "stop"
            tokens = int(answer.get("tokens", 0))
            return ModelOutput(
                model=self.model_name,
                choices=[ChatCompletionChoice(message=message, stop_reason=reason)],
                usage=ModelUsage(output_tokens=tokens, total_tokens=tokens),
            )

    class JudgeProvider(Provider):
        kind, model_under_test = "judge", False

    modelapi(name="autorl")(Provider)
    modelapi(name="autorl-judge")(JudgeProvider)

    @hooks(name="autorl", description="what became of each sample")
    class Ended(Hooks):
        async def on_sample_end(self, data: SampleEnd) -> None:
            SEEN.setdefault(str(data.sample.id), []).append(data.sample)

    @solver
    def gathered(inner: Any, asker: Any) -> Any:
        async def solve(state: Any, generate: Any) -> Any:
            token = SOLVING.set(True)
            try:
                return await inner(state, generate)
            finally:
                SOLVING.reset(token)
                asker.finished()

        return solve

    return gathered


if __name__ == "__main__":
    sys.exit(main())
