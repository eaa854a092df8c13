"""rl-smith folders: tasks in the form of the reference's custom benchmarks, loaded as they are.

    config.yaml       name, description, eval_mode (per_sample), expose_files
    eval.py           evaluate(question, model_answer, reference, **row) -> float
    data/train.jsonl  rows with `question`, `answer` and whatever else; or download_data.py, which makes it
    description.md    optional

The reference (RD-Agent, benchmarks/smith) shows agents all rows and scores on the same ones. Here `stage` cuts them: 60 % for
training, 20 % feedback, 20 % report, by the hash of the question. So the order of the rows does not matter, and equal
questions fall into one split. What was staged is what is pinned: `with_staged_pins`.

A folder `NAME` is the task `smith-NAME`, as in the reference. Recipe as there: the bare question, greedy, 2,048 tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.files.hashing import file_sha256, walk_files
from autorl_hpc.files.layout import Root
from autorl_hpc.files.store import read_manifest
from autorl_hpc.files.yaml import read_yaml
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.exchange import StoreManifest
from autorl_hpc.records.task import SplitPin, TaskFile
from autorl_hpc.states import Fault
from autorl_hpc.tasks.own_files import DATA_FOLDER, EVALUATE_FILE, OWN_SCORER

PREFIX = "smith-"
CONFIG, EVALUATE, DATA, DOWNLOAD = "config.yaml", "eval.py", "data/train.jsonl", "download_data.py"
EVAL_MODE = "per_sample"

SALT = "autorl-hpc rl-smith split 1"
"""Another salt is another split."""

SHARES: dict[Literal["train", "feedback", "report"], int] = {"train": 60, "feedback": 20, "report": 20}
"""Percent of the distinct questions."""

MIN_QUESTIONS = 5
"""Fewer leave a split empty."""

MAX_DATA_BYTES = 1024 * 1024 * 1024
TRAIN_FILE = "train/train.jsonl"
MAX_NEW_TOKENS = 2048

Row = dict[str, Any]


@dataclass(frozen=True)
class SmithFolder:
    """What a folder's config.yaml says."""

    folder: Path
    config: Mapping[str, Any]

    @property
    def exposed(self) -> list[str]:
        """Files that agents get beside the data.

        Raises:
            AutorlError: one is missing, lies outside, or among the data.
        """
        given = self.config.get("expose_files") or []
        names = [given] if isinstance(given, str) else [str(name) for name in given]
        for name in names:
            path = self.folder / name
            outside = Path(name).is_absolute() or ".." in Path(name).parts
            if outside or name.startswith(DATA_FOLDER) or not path.is_file():
                reason = "agents get training rows alone" if name.startswith(DATA_FOLDER) else "no file of this folder"
                raise self.wrong(f"field `expose_files`: {name}: {reason}", "correct the field")
        return names

    @property
    def description(self) -> str:
        """description.md, else the field `description`; and how it is scored here."""
        own = self.folder / "description.md"
        text = own.read_text(encoding="utf-8") if own.is_file() else str(self.config.get("description") or "")
        beside = "".join(f" `data/{name}` belongs to the task." for name in self.exposed)
        return (
            f"{text.strip()}\n\n`data/train.jsonl` holds the training rows. Answers are scored by the function `evaluate` of "
            f"the task's {EVALUATE}, from 0 to 1, on rows that are not among them.{beside}\n"
        )

    def wrong(self, what: str, next_step: str) -> AutorlError:
        """An error in this folder's config.yaml."""
        return AutorlError(what, where=self.folder / CONFIG, next_step=next_step)


def is_smith(folder: Path) -> bool:
    """Whether a folder is in that form, and not a task of our own."""
    return not (folder / "task.yaml").exists() and (folder / CONFIG).is_file() and (folder / EVALUATE).is_file()


def smith_names(parent: Path) -> set[str]:
    """Tasks of that form among the folders of `parent`; folders that begin with `_` are templates."""
    found = {path.parent for path in parent.glob(f"*/{CONFIG}") if not path.parent.name.startswith("_")}
    return {PREFIX + folder.name.removeprefix(PREFIX) for folder in found if is_smith(folder)}


def find_smith(parent: Path, name: str) -> Path | None:
    """The folder of task `name` below `parent`: `smith-x` is `x/`, or `smith-x/` in frozen code."""
    if not name.startswith(PREFIX):
        return None
    places = (parent / name, parent / name.removeprefix(PREFIX))
    return next((place for place in places if is_smith(place)), None)


def read_smith(folder: Path, name: str) -> tuple[SmithFolder, TaskFile]:
    """The folder as a task that pins nothing yet: what `stage` makes of it decides.

    Raises:
        AutorlError: config.yaml is no table, or asks for what is not understood here.
    """
    config = read_yaml(folder / CONFIG)
    if not isinstance(config, dict):
        raise AutorlError("a table of fields is expected", where=folder / CONFIG, next_step="see docs/adding-a-task.md")
    found = SmithFolder(folder, config)
    plain = str(config.get("name") or config.get("id") or "")
    if plain.removeprefix(PREFIX) != name.removeprefix(PREFIX):
        raise found.wrong(
            f"field `name` is {plain or 'missing'}, the folder is {folder.name}",
            "make them equal: the task is smith-NAME",
        )
    mode = config.get("eval_mode") or config.get("eval_type") or EVAL_MODE
    if mode != EVAL_MODE:
        raise found.wrong(
            f"field `eval_mode` is {mode}; understood is {EVAL_MODE}: eval.py with evaluate(question, model_answer, reference)",
            "write a task.yaml for this task: docs/adding-a-task.md",
        )
    value = {
        "name": name,
        "title": str(config.get("title") or config.get("description") or plain).split("\n")[0][:200],
        "source": f"rl-smith folder {folder.name}",
        "licence": str(config.get("licence") or config.get("license") or "not stated"),
        "train_files": {},
        "splits": {},
        "recipes": [
            {
                "name": "default",
                "version": 1,
                "prompt": str(config.get("prompt") or "{question}"),
                "system": config.get("system"),
                "sampling": {"temperature": 0.0, "max_new_tokens": config.get("max_new_tokens") or MAX_NEW_TOKENS},
                "dtype": "bfloat16",
                "scorer": OWN_SCORER,
                "scorer_version": "1",
                "options": {EVALUATE_FILE: EVALUATE, **(config.get("options") or {})},
            }
        ],
    }
    return found, parse_record(TaskFile, value, folder / CONFIG)


def code_files(folder: Path) -> list[str]:
    """Files of a task folder that are frozen and hashed. Rows of an rl-smith folder stay out: most of them are held out."""
    names = walk_files(folder)
    return [name for name in names if not name.startswith(DATA_FOLDER)] if is_smith(folder) else names


def read_rows(path: Path) -> list[Row]:
    """The rows of data/train.jsonl.

    Raises:
        AutorlError: naming the line that is no object with a `question`.
    """
    rows = []
    for number, line in enumerate(reading.read_bytes(path, max_bytes=MAX_DATA_BYTES).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise AutorlError(f"line {number} is no JSON: {error}", where=path, next_step="correct the line") from None
        if not isinstance(row, dict) or not row.get("question"):
            raise AutorlError(
                f"line {number} is no object with a field `question`", where=path, next_step="correct the line"
            )
        rows.append(row)
    return rows


def split_rows(rows: Iterable[Row], name: str, where: Path) -> dict[Literal["train", "feedback", "report"], list[Row]]:
    """The rows of each split, in an order of their own: that of the file does not matter.

    Raises:
        AutorlError: there are too few.
    """
    ranked: dict[str, list[Row]] = {}
    for row in sorted(rows, key=_canonical):
        ranked.setdefault(_rank(row["question"]), []).append(row)
    if len(ranked) < MIN_QUESTIONS:
        raise AutorlError(
            f"{len(ranked)} distinct questions are too few for training, feedback and report",
            where=where,
            next_step=f"at least {MIN_QUESTIONS} are needed, some hundred make a score that says something",
        )
    found: dict[Literal["train", "feedback", "report"], list[Row]] = {}
    keys, start, edge = sorted(ranked), 0, 0
    for split, percent in SHARES.items():
        edge += percent
        end = len(keys) * edge // 100
        found[split] = [row for key in keys[start:end] for row in ranked[key]]
        start = end
    for split in ("feedback", "report"):
        found[split] = _with_ids(found[split], name)
    return found


def write_splits(folder: SmithFolder, data: Path, name: str, out: Path) -> None:
    """Writes train/, feedback/ and report/ under `out`, as a prepare.py does."""
    for split, rows in split_rows(read_rows(data), name, data).items():
        path = out / (TRAIN_FILE if split == "train" else f"{split}/items.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(_canonical(row) + "\n" for row in rows), encoding="utf-8")
    for exposed in folder.exposed:
        target = out / "train" / exposed
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((folder.folder / exposed).read_bytes())


def pinned(file: TaskFile, data_sha256: str, out: Path) -> TaskFile:
    """The task file with the pins of what `write_splits` made."""
    train = {name: file_sha256(out / name) for name in walk_files(out) if name.startswith("train/")}
    splits: dict[str, SplitPin] = {}
    for split in ("feedback", "report"):
        path = out / split / "items.jsonl"
        splits[split] = SplitPin(n=path.read_bytes().count(b"\n"), sha256=file_sha256(path))
    source = f"{file.source}; {DATA} sha256 {data_sha256}"
    return file.model_copy(update={"train_files": train, "splits": splits, "source": source})


def staged_pins(root: Root, file: TaskFile, folder: Path) -> TaskFile:
    """The task file with the pins of what was staged.

    Raises:
        AutorlError: it is not staged, or the folder's rows are other ones by now.
    """
    command = f"autorl-hpc stage {file.name}"
    store = read_manifest(root.task_store(file.name), name=f"task {file.name}", stage_command=command)
    vault = read_manifest(root.task_vault(file.name), name=f"held-out data of task {file.name}", stage_command=command)
    data = folder / DATA
    if data.is_file() and not vault.source.endswith(file_sha256(data)):
        raise AutorlError(
            f"the rows of task {file.name} are not those that were staged",
            where=data,
            fault=Fault.CLUSTER,
            next_step=f"put them back, or run: {command} --again",
        )
    splits: dict[str, SplitPin] = {}
    for path, digest in _hashes(vault).items():
        split = path.partition("/")[0]
        n = reading.read_bytes(root.task_vault(file.name) / path, max_bytes=MAX_DATA_BYTES).count(b"\n")
        splits[split] = SplitPin(n=n, sha256=digest)
    return file.model_copy(update={"train_files": _hashes(store), "splits": splits, "source": vault.source})


def _hashes(manifest: StoreManifest) -> dict[str, str]:
    return {file.path: file.sha256 for file in manifest.files}


def _with_ids(rows: list[Row], name: str) -> list[Row]:
    """Each row with an `id` of its own: the one it has where each stands once, else by its hash."""
    own = [row.get("id") for row in rows]
    if all(isinstance(one, (str, int)) and one != "" for one in own) and len({str(one) for one in own}) == len(own):
        return rows
    seen: dict[str, int] = {}
    named = []
    for row in rows:
        digest = hashlib.sha256(_canonical(row).encode()).hexdigest()[:12]
        seen[digest] = seen.get(digest, 0) + 1
        again = "" if seen[digest] == 1 else f"-{seen[digest]}"
        named.append({**row, "id": f"{name}-{digest}{again}"})
    return named


def _canonical(row: Any) -> str:
    """In ASCII, so that no character of a question is taken for a line's end."""
    return json.dumps(row, sort_keys=True)


def _rank(question: Any) -> str:
    return hashlib.sha256(f"{SALT}\n{_canonical(question)}".encode()).hexdigest()
