"""Tasks of Inspect AI and lm-evaluation-harness as tasks of this suite. The library runs in a process of its own, which loads no model,
reads no dataset and sees no secret: rows come from the vault, answers from the grader's engine, verdicts from the experiment's judge."""

from __future__ import annotations

import hmac
import itertools
import json
import os
import re
import secrets
import shutil
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.checkpoint import file_sha256, tree_sha256, walk_files
from autorl_hpc.files.layout import Root
from autorl_hpc.files.redact import without_secrets
from autorl_hpc.files.store import MANIFEST_NAME
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.task import Recipe, Sampling, TaskFile, task_name
from autorl_hpc.rollouts.child import Child, ChildFailed
from autorl_hpc.rollouts.engine import Answer, ServingEngine
from autorl_hpc.scoring.harness import encoded
from autorl_hpc.scoring.outcome import Context, JudgeFailed
from autorl_hpc.tasks.heldout import StagedTask, verify_staged_task
from autorl_hpc.tasks.loader import Task, load_task

CODE_VERSION = "1"  # of this package: another one where a change can change a score
BESIDE = "harness"
"""Folder of the vault with what the library reads when it scores: the task's file, and the datasets that it loaded."""
START_S, CALL_S = 300.0, 1800.0
SPLIT_SALT: Final = "autorl-hpc harness split 1"
OWN_SETTINGS = frozenset(("feedback", "report", "secret", "chat", "dtype", "max_new_tokens", "temperature", "samples"))
"""Values of `--set` that are the suite's; others are arguments of the task."""
MAX_NEW_TOKENS = 1024
QUIET = {"TQDM_DISABLE": "1", "LOGLEVEL": "ERROR", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


class Harness:
    """One library. `package`: its distribution; `module`: what runs in the child."""

    def __init__(self, kind: str, package: str, module: str) -> None:
        self.kind, self._package, self._module = kind, package, module
        self._children: dict[str, Child] = {}
        self._lock = threading.Lock()

    @property
    def version(self) -> str:
        """The library's version and this code's. Raises AutorlError: it is not installed."""
        return f"{self._version(self._package)}-{CODE_VERSION}"

    def _version(self, package: str) -> str:
        if self.kind == "inspect" and sys.version_info < (3, 11):
            raise self._missing("Inspect tasks need Python 3.11 or newer", "use a newer Python for autorl-hpc")
        try:
            return version(package)
        except PackageNotFoundError:
            advice = f"pip install 'autorl-hpc[{self.kind}]'"
            raise self._missing(f"the Python package {package} is not installed", advice) from None

    def _missing(self, what: str, advice: str) -> AutorlError:
        return AutorlError(what, next_step=advice, exit_code=Exit.ENVIRONMENT)

    # --- staging

    def stage(
        self,
        root: Root,
        asked: str,
        source: Path | None,
        settings: Mapping[str, str],
        *,
        again: bool,
        say: Callable[[str], None],
    ) -> StagedTask:
        """See `scoring.harness.Library`. Raises AutorlError: the task can't be loaded, or asks for what is refused."""
        from autorl_hpc.stage.sources import work_folder
        from autorl_hpc.stage.tasks import install_task

        name, own = task_name(asked), asked.partition(":")[2]
        file = Path(own.partition("@")[0]).expanduser()
        own_file = file.suffix in (".py", ".yaml")
        if own_file and not file.is_file():
            what = "give inspect:FILE.py@TASK or lm-eval:FILE.yaml"
            raise AutorlError("there is no such file", where=file, next_step=what)
        folders = (root.task_store(name), root.task_vault(name))
        if not again and all((folder / MANIFEST_NAME).exists() for folder in folders):
            say(f"{name}: staged already; verifying")
            task, kept = load_task(name, root=root), root.task_vault(name) / BESIDE / f"task{file.suffix}"
            same = (
                kept.is_file() and kept.read_bytes() == file.read_bytes()
                if own_file
                else f"{asked}, " in task.file.source
            )
            if not same:
                advice = f"autorl-hpc stage {asked} --again, and launch under another name"
                raise AutorlError(f"{name} was staged from something else than this {asked}", next_step=advice)
            return verify_staged_task(root, task)
        versions = self.version
        root.vault.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(root.vault, 0o700)
        with work_folder(root.vault, name, mode=0o700) as work:
            (work / BESIDE).mkdir()
            if own_file:
                (work / BESIDE / f"task{file.suffix}").write_bytes(file.read_bytes())
            arguments = {key: _value(text) for key, text in settings.items() if key not in OWN_SETTINGS}
            first = {
                **{"task": own.rpartition("/")[2] if own_file else own, "args": arguments},
                **{"vault": str(work / BESIDE), "from": str(source.absolute()) if source else None, "load": True},
                **{"home": str(file.absolute().parent if own_file else Path.cwd()), "found": str(work / "found.json")},
            }
            say(f"{name}: running its dataset loader, with your rights and network")
            loader = Child(self._module, {**os.environ, **QUIET}, first, START_S, CALL_S)
            try:
                found = loader.call({"load": True})
                found = found if "error" in found else json.loads((work / "found.json").read_text(encoding="utf-8"))
            except ChildFailed as error:
                raise self._refused(asked, str(error)) from None
            finally:
                loader.end()
            if "error" in found:
                raise self._refused(asked, found["error"])
            task = self._write(root, name, asked, arguments, settings, found, versions, work)
            say(f"{name}: trying two items")
            task = self._tried(task, found["rows"][:2], work)
            done = install_task(root, task, work, [f"{name}/{file}" for file in ("task.yaml", "description.md")])
        splits = ", ".join(f"{split} {pin.n}" for split, pin in task.file.splits.items())
        say(f"{name}: {len(done.store.files) - 2} training files, splits {splits}")
        return done

    def _refused(self, asked: str, words: str) -> AutorlError:
        return AutorlError(f"{asked} can't be a task here: {words}", next_step="see docs/harnesses.md")

    def _write(
        self,
        root: Root,
        name: str,
        asked: str,
        arguments: Mapping[str, Any],
        settings: Mapping[str, str],
        found: dict[str, Any],
        versions: str,
        work: Path,
    ) -> Task:
        """Write rows, splits and the task's folder below `work`; return the task."""
        rows = found["rows"]
        ids = [str(row["id"]) for row in rows]
        if len(set(ids)) < len(ids):
            raise self._refused(asked, "two of its samples have the same id")
        chosen = _split(ids, settings, _secret(root) if settings.get("secret") == "true" else None, asked)
        pins = {}
        for split, names in chosen.items():
            _rows(work / split / "items.jsonl", [row for row in rows if str(row["id"]) in names])
            pins[split] = {"n": len(names), "sha256": file_sha256(work / split / "items.jsonl")}
        if found.get("train"):
            _rows(work / "train" / "train.jsonl", found["train"])
        for file, text in found.get("files", {}).items():
            (work / BESIDE / file).write_text(text, encoding="utf-8")
        if found.get("train") and found["open"]:  # for `./evaluate`: nothing in these files is held out
            shutil.copytree(work / BESIDE, work / "train" / BESIDE)
        packages = ", ".join(f"{package} {self._version(package)}" for package in [self._package, *found["packages"]])
        options = {
            **{"harness_task": found["name"]},
            **{"harness_args": json.dumps(arguments, sort_keys=True), "harness_versions": packages},
            "harness_sha256": tree_sha256(work / BESIDE),
        }
        recipe = {
            **{
                "name": "default",
                "version": 1,
                "prompt": "{question}",
                "scorer": self.kind,
                "scorer_version": versions,
            },
            **{"chat": settings.get("chat", "auto"), "dtype": settings.get("dtype", "float32"), "options": options},
            "sampling": {
                "temperature": float(settings.get("temperature", found["sampling"].get("temperature", 0.0))),
                "max_new_tokens": int(
                    settings.get("max_new_tokens", found["sampling"].get("max_new_tokens", MAX_NEW_TOKENS))
                ),
            },
        }
        value = {
            **{"name": name, "title": f"{found['title']} ({self.kind})", "licence": found.get("licence", "not stated")},
            "source": f"{asked}, loaded by {packages}"
            + (", split by a secret of this installation" if settings.get("secret") == "true" else ""),
            "train_files": {one: file_sha256(work / one) for one in walk_files(work) if one.startswith("train/")},
            "vault_files": {one: file_sha256(work / one) for one in walk_files(work) if one.startswith(f"{BESIDE}/")},
            **{"splits": pins, "needs": [self._package.replace("-", "_")], "recipes": [recipe]},
        }
        folder = work / name
        folder.mkdir()
        file = parse_record(TaskFile, value, folder / "task.yaml")
        trained = (
            "`data/train.jsonl` holds training rows."
            if found.get("train")
            else "There are no training rows: bring your own."
        )
        text = f"# {found['title']}\n\n{found.get('description', '')}\n\n{trained} Answers are scored by {packages}, on items that are not among them.\n"
        (folder / "description.md").write_text(text, encoding="utf-8")
        return Task(folder, file)

    def _tried(self, task: Task, rows: Sequence[Mapping[str, Any]], work: Path) -> Task:
        """Score two items as a grader does, with an engine that says nothing; write task.yaml. Raises AutorlError: the task asks for
        what is refused, or fails on both."""
        judged = False
        first = self._first(task.file.recipes[0], work)
        child = Child(self._module, self._environment(), first, START_S, CALL_S)
        try:
            answer = child.call({"rows": rows})
            while "ask" in answer or "judge" in answer:
                judged = judged or bool(answer.get("judge"))
                given = [_probe(one) for one in answer.get("ask", ())]
                answer = child.call(
                    {"answers": given, "verdicts": [{"text": "GRADE: C"} for _ in answer.get("judge", ())]}
                )
        except ChildFailed as error:
            raise self._refused(task.name, str(error)) from None
        finally:
            child.end()
        words = answer.get("error") or next((row["why"] for row in answer["rows"] if row["outcome"] is None), "")
        if "error" in answer or all(row["outcome"] is None for row in answer["rows"]):
            raise self._refused(task.name, words)
        file = task.file
        if judged:
            recipe = file.recipes[0].model_copy(update={"judge": "discrete"})
            file = file.model_copy(update={"recipes": (recipe,)})
        import yaml

        text = yaml.safe_dump(file.model_dump(mode="json", exclude_defaults=True), sort_keys=False, allow_unicode=True)
        (task.folder / "task.yaml").write_text(text, encoding="utf-8")
        return Task(task.folder, file)

    # --- grading

    def _environment(self) -> dict[str, str]:
        return {
            **without_secrets(os.environ),
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
        }

    def _first(self, recipe: Recipe, vault: Path) -> dict[str, Any]:
        options = recipe.options
        return {
            **{"task": options["harness_task"], "args": json.loads(str(options["harness_args"]))},
            **{"vault": str(vault / BESIDE), "load": False, "chat": recipe.chat == "auto"},
        }

    def play(
        self,
        rows: Sequence[Mapping[str, Any]],
        recipe: Recipe,
        vault: Path,
        engine: ServingEngine,
        context: Context,
        *,
        order: Sequence[int] | None,
    ) -> tuple[list[Answer], list[list[int]]]:
        """See `scoring.harness.Library`. Raises AutorlError: the files in the vault or the library are not those of the launch; JudgeFailed,
        ChildFailed."""
        key = recipe.hash() + str(vault)
        if key not in self._children:
            if tree_sha256(vault / BESIDE) != recipe.options["harness_sha256"]:
                what = "the files of this task are not those that were staged"
                raise AutorlError(what, where=vault / BESIDE, next_step="stage it again", exit_code=Exit.FAILED)
            self._children[key] = Child(self._module, self._environment(), self._first(recipe, vault), START_S, CALL_S)
        child, desk = self._children[key], Desk(engine, recipe, context, order is not None)
        with self._lock:  # rows in their own order, because worked examples are drawn in it
            try:
                answer = child.call({"rows": list(rows)})
                while "ask" in answer or "judge" in answer:
                    given, verdicts = desk.answers(answer.get("ask", ())), desk.verdicts(answer.get("judge", ()))
                    answer = child.call({"answers": given, "verdicts": verdicts})
                if "error" in answer:
                    raise ChildFailed(answer["error"])
            except BaseException:
                child.end()  # the next evaluation begins with a new one
                raise
        rows = answer["rows"]
        told = [
            encoded(row["outcome"], row["text"], row["why"], answer["metrics"] if number == 0 else None)
            for number, row in enumerate(rows)
        ]
        answers = [Answer(text, row["tokens"], row["truncated"]) for text, row in zip(told, rows, strict=True)]
        return answers, sorted(desk.asked)


INSPECT = Harness("inspect", "inspect_ai", "autorl_hpc_harnesses.inspect_child")
LM_EVAL = Harness("lm-eval", "lm_eval", "autorl_hpc_harnesses.lm_eval_child")


class Desk:
    """Answers what the library asks, by the engine and the judge. `reverse`: in another order, for another composition of batches."""

    def __init__(self, engine: ServingEngine, recipe: Recipe, context: Context, reverse: bool) -> None:
        self._engine, self._recipe, self._context, self._reverse = engine, recipe, context, reverse
        self.asked: list[list[int]] = []

    def answers(self, asked: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return an answer for each request: `{text, tokens, truncated}`, or `{logprob, greedy}`. Requests are asked in one order however
        they came in, so that one checkpoint always gets the same batches."""
        groups: dict[str, list[int]] = defaultdict(list)
        for place in sorted(
            range(len(asked)), key=lambda i: json.dumps(asked[i], sort_keys=True), reverse=self._reverse
        ):
            groups[json.dumps(asked[place].get("sampling"), sort_keys=True)].append(place)
        found: dict[int, dict[str, Any]] = {}
        for key, places in sorted(groups.items()):
            if key == "null":
                found |= zip(places, self._likelihoods([asked[place] for place in places]), strict=True)
                continue
            prompts = [self._prompt(asked[place]) for place in places]
            self.asked += prompts
            answers = self._engine.generate(prompts, self._sampling(json.loads(key)), self._context.seed)
            found |= {place: answer._asdict() for place, answer in zip(places, answers, strict=True)}
        return [found[place] for place in range(len(asked))]

    def _sampling(self, wanted: Mapping[str, Any]) -> Sampling:
        own = self._recipe.sampling
        given = {name: value for name, value in wanted.items() if value is not None}
        most = min(int(given.pop("max_new_tokens", own.max_new_tokens)), 32768)
        return own.model_copy(update={**given, "stop": tuple(given.get("stop", own.stop)), "max_new_tokens": most})

    def _prompt(self, asked: Mapping[str, Any]) -> list[int]:
        if "text" in asked:
            return self._engine.encode(asked["text"])
        tokens = self._chat(asked["messages"])
        return self._engine.encode(_conversation(asked["messages"])) if tokens is None else tokens

    def _likelihoods(self, asked: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the log-likelihood of each continuation, or of a whole text in windows that each begin with all that fits (`rolling`)."""
        pairs: list[list[tuple[list[int], list[int]]]] = []
        first = (self._engine.encode("") or self._engine.encode("\n"))[:1]
        for one in asked:
            if "rolling" in one:
                text, most = [*first, *self._plain(one["rolling"])], self._engine.context_tokens
                bounds = [1, *range(most, len(text), most - 1), len(text)]
                spans = itertools.pairwise(bounds)
                pairs.append(
                    [(text[max(0, end - most) : begin], text[begin:end]) for begin, end in spans if begin < end]
                )
                continue
            context, continuation = one.get("text", ""), one["continuation"]
            if "messages" in one and (told := self._chat(one["messages"])) is not None:
                pairs.append([(told, self._plain(continuation))])
                continue
            if "messages" in one:
                context = _conversation(one["messages"])
            kept = context.rstrip()  # as lm-eval does, so that both are cut between words
            before = self._engine.encode(kept) if kept else first
            whole = self._engine.encode(context + continuation)
            after = whole[len(before) :] if kept else self._plain(context + continuation)
            pairs.append([(before, after)])
        self.asked += [[*context, *continuation] for each in pairs for context, continuation in each]
        answers = iter(self._engine.loglikelihood([pair for each in pairs for pair in each]))
        found = [[next(answers) for _ in each] for each in pairs]
        return [{"logprob": sum(a.logprob for a in each), "greedy": all(a.is_greedy for a in each)} for each in found]

    def _plain(self, text: str) -> list[int]:
        """Return the tokens of a text without those that begin a prompt."""
        return self._engine.encode(text)[len(self._engine.encode("")) :]

    def _chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        return self._engine.chat(messages) if self._recipe.chat == "auto" else None

    def verdicts(self, asked: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return `{text}` or `{refused}` for each request to the judge. Raises JudgeFailed."""
        if not asked:
            return []
        judge = self._context.judge
        if judge is None:
            raise JudgeFailed("the task asks a judge, and its recipe names none")
        most = max(int(one.get("max_tokens") or 1024) for one in asked)
        replies = judge.ask([one["messages"] for one in asked], max_tokens=most)
        return [{"refused": reply.refused} if reply.refused else {"text": reply.text} for reply in replies]


def _conversation(messages: Sequence[Mapping[str, str]]) -> str:
    """Return a conversation for a model without a chat template, as Inspect's own provider writes it."""
    return "".join(f"{one['role']}: {one['content']}\n" for one in messages)


def _probe(asked: Mapping[str, Any]) -> dict[str, Any]:
    return {"text": "", "tokens": 0, "truncated": False} if "sampling" in asked else {"logprob": -1.0, "greedy": False}


def _split(ids: Sequence[str], settings: Mapping[str, str], secret: bytes | None, asked: str) -> dict[str, set[str]]:
    """Return the ids of both splits: sizes as numbers or shares (`0.3`); without them one half each. Ordered by hashes, so that every
    installation draws the same; with a secret, only this one does."""
    key = secret or SPLIT_SALT.encode()
    ordered = sorted(ids, key=lambda one: hmac.digest(key, one.encode(), "sha256"))
    sizes = {}
    for split in ("feedback", "report"):
        text = settings.get(split, "0.5")
        if not re.fullmatch(r"\d+|0?\.\d+", text):
            raise AutorlError(f"--set {split}={text}: a number of items or a share such as 0.3 is expected")
        sizes[split] = int(text) if text.isdigit() else int(float(text) * len(ids))
    if min(sizes.values()) < 1 or sum(sizes.values()) > len(ids):
        what = f"{asked} has {len(ids)} samples: {sizes['feedback']} for feedback and {sizes['report']} for report can't be drawn"
        raise AutorlError(what, next_step="give other sizes: --set feedback=N --set report=N")
    first = sizes["feedback"]
    return {"feedback": set(ordered[:first]), "report": set(ordered[first : first + sizes["report"]])}


def _secret(root: Root) -> bytes:
    path = root.vault / ".split-secret"
    if not path.exists():
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
    return path.read_bytes()


def _rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows), encoding="utf-8")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
