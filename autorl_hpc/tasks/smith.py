"""rl-smith folders: custom benchmarks of RD-Agent (benchmarks/smith), loaded unchanged as tasks `smith-NAME`. RD-Agent scores
on the rows that agents see; here `stage` splits them by the question's hash, 60 % training, 20 % feedback, 20 % report."""

from __future__ import annotations

import contextlib
import hashlib
import json
import posixpath
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading
from autorl_hpc.files.checkpoint import file_sha256, walk_files
from autorl_hpc.files.layout import Root
from autorl_hpc.files.reading import read_yaml
from autorl_hpc.files.store import read_manifest
from autorl_hpc.records.base import parse_record
from autorl_hpc.records.task import SplitPin, TaskFile
from autorl_hpc.states import Fault
from autorl_hpc.tasks.folders import (
    CONFIG,
    DATA_FOLDER,
    EVALUATE,
    EVALUATE_FILE,
    OWN_SCORER,
    BadRow,
    code_files,
    is_smith,
    json_rows,
)

SALT = "autorl-hpc rl-smith split 2"
"""Another salt gives other splits. Version 1 hashed the exact text, so that spellings of one question were separated."""
Split = Literal["train", "feedback", "report"]
SHARES: dict[Split, int] = {"train": 60, "feedback": 20, "report": 20}  # percent of the distinct questions
MIN_QUESTIONS = 5  # With fewer questions a split would be empty
MAX_DATA_BYTES = 1024 * 1024 * 1024
Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of data/train.jsonl. Raises AutorlError: names the first line that is not an object with a `question`
    and an `answer`."""
    rows = []
    try:
        for number, row in json_rows(reading.read_bytes(path, max_bytes=MAX_DATA_BYTES)):
            missing = "question" if not row.get("question") else "answer" if row.get("answer") is None else None
            if missing:
                raise BadRow(f"line {number} has no `{missing}`")
            rows.append(row)
    except BadRow as error:
        raise AutorlError(str(error), where=path, next_step="correct the line, or remove it") from None
    return rows


def split_rows(rows: Iterable[Row], name: str, where: Path) -> dict[Split, list[Row]]:
    """Return the rows of each split, in an order that does not depend on the file's. Raises AutorlError: too few rows."""
    ranked: dict[str, list[Row]] = {}
    for row in sorted(rows, key=canonical):
        ranked.setdefault(question_key(row["question"]), []).append(row)
    if len(ranked) < MIN_QUESTIONS:
        what = f"{len(ranked)} distinct questions are too few for training, feedback and report"
        advice = f"at least {MIN_QUESTIONS} are needed, some hundred make a score that says something"
        raise AutorlError(what, where=where, next_step=advice)
    found: dict[Split, list[Row]] = {}
    keys, edge = sorted(ranked), 0
    for split, percent in SHARES.items():
        own = keys[len(keys) * edge // 100 : len(keys) * (edge + percent) // 100]
        edge += percent
        found[split] = [row for key in own for row in ranked[key]]
    return {split: rows if split == "train" else _with_ids(rows, name) for split, rows in found.items()}


def question_key(question: Any) -> str:
    """Return the hash that decides a question's split. Unicode form (NFKC), case and whitespace are ignored, also in the texts of
    a table, so that spellings of one question share a split."""
    return hashlib.sha256(f"{SALT}\n{canonical(_plain(question))}".encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        # Case folding can undo the normal form, so normalise again.
        return " ".join(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", value).casefold()).split())
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {_plain(name): _plain(part) for name, part in value.items()}
    return value


def questions_in(data: bytes) -> Iterator[Any]:
    """Yield the field `question` of every object in a JSON or JSON lines file; nothing for other files."""
    waiting: list[Any] = []
    for part in (data, *data.split(b"\n")):
        with contextlib.suppress(ValueError, RecursionError):
            waiting.append(json.loads(part))
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if value.get("question"):
                yield value["question"]
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _with_ids(rows: list[Row], name: str) -> list[Row]:
    """Return the rows with unique ids: their own if all are unique, otherwise from their hashes."""
    own = [row.get("id") for row in rows]
    usable = all(isinstance(one, (str, int)) and not isinstance(one, bool) and one != "" for one in own)
    if usable and len({str(one) for one in own}) == len(own):
        return rows
    seen: Counter[str] = Counter()
    named = []
    for row in rows:
        digest = hashlib.sha256(canonical(row).encode()).hexdigest()[:12]
        seen[digest] += 1
        again = "" if seen[digest] == 1 else f"-{seen[digest]}"
        named.append({**row, "id": f"{name}-{digest}{again}"})
    return named


def canonical(row: Any) -> str:
    """Return canonical JSON in ASCII, so that no character of a question counts as a line's end."""
    return json.dumps(row, sort_keys=True)


# --- files that agents get, and the search for copies of held-out rows in them

TRAIN_NAME = "train.jsonl"  # Name of the training rows in the workspace's data/
GZIP_MARK = b"\x1f\x8b"


def _not_exposed(folder: Path, name: str) -> str | None:
    parts, path = name.lower().split("/"), folder / name
    # Compare names (some file systems take DATA/ for data/) and resolved paths.
    if parts[0] == DATA_FOLDER.rstrip("/") or path.resolve().is_relative_to((folder / DATA_FOLDER).resolve()):
        return "agents get training rows alone"
    if parts[0] == TRAIN_NAME:
        return "it would take the place of the training rows"
    if name.startswith("/") or not path.is_file() or path.resolve() != folder.resolve() / name:
        return "no file of this folder (links are not followed)"
    return None


def refuse_held_out(folder: Path, held_out: Iterable[Any]) -> None:
    """Search for held-out rows in all files of the folder that are frozen or given to agents: JSON and JSON lines, plain or
    gzipped. Raises AutorlError: names the file."""
    wanted = {question_key(question) for question in held_out}
    for name in code_files(folder):
        data = reading.read_bytes(folder / name, max_bytes=MAX_DATA_BYTES)
        if data.startswith(GZIP_MARK):
            try:
                data = zlib.decompressobj(wbits=31).decompress(data, MAX_DATA_BYTES)
            except zlib.error:
                continue
        if any(question_key(question) in wanted for question in questions_in(data)):
            where = f"files outside {DATA_FOLDER} are frozen with each experiment, and may be given to agents"
            what = f"{name} holds held-out rows with their questions: {where}"
            raise AutorlError(what, where=folder / name, next_step=f"move it into {DATA_FOLDER} or out of the folder")


PREFIX = "smith-"
DATA, DOWNLOAD = "data/train.jsonl", "download_data.py"
EVAL_MODE = "per_sample"
TRAIN_FILE = "train/train.jsonl"
MAX_NEW_TOKENS = 2048


@dataclass(frozen=True)
class SmithFolder:
    """The content of a folder's config.yaml."""

    folder: Path
    config: Mapping[str, Any]

    @property
    def exposed(self) -> list[str]:
        """The files of `expose_files`, which agents get in addition to the data, as normalised paths below the folder. Raises
        AutorlError: it is not a list of names, or a name is missing in the folder, in data/, or behind a link."""
        given = self.config.get("expose_files") or []
        given = [given] if isinstance(given, str) else given
        if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
            what = f"field `expose_files`: a list of file names is expected, not {given!r:.100}"
            raise self.wrong(what, "correct the field")
        names = list(dict.fromkeys(map(posixpath.normpath, given)))
        for name in names:
            if problem := _not_exposed(self.folder, name):
                raise self.wrong(f"field `expose_files`: {name}: {problem}", "correct the field")
        return names

    @property
    def description(self) -> str:
        """description.md or the field `description`, with how it is scored here."""
        own = self.folder / "description.md"
        text = read_description(own) if own.is_file() else str(self.config.get("description") or "")
        beside = "".join(f" `data/{name}` belongs to the task." for name in self.exposed)
        scored = f"by the function `evaluate` of the task's {EVALUATE}, from 0 to 1, on rows that are not among them"
        return f"{text.strip()}\n\n`data/train.jsonl` holds the training rows. Answers are scored {scored}.{beside}\n"

    def wrong(self, what: str, next_step: str) -> AutorlError:
        """Return an error about this folder's config.yaml."""
        return AutorlError(what, where=self.folder / CONFIG, next_step=next_step)


def read_description(path: Path) -> str:
    """Read a description.md, which agents see. Raises AutorlError: it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        what = f"{path.name} is not in UTF-8 (byte {error.start})"
        raise AutorlError(what, where=path, next_step="save it as UTF-8") from None


def smith_name(folder: Path) -> str:
    """Return the task's name from the field `name`, or from the folder's name if that is unreadable."""
    try:
        config = read_yaml(folder / CONFIG)
    except AutorlError:
        config = None
    return PREFIX + (_plain_name(config) or folder.name).removeprefix(PREFIX)


def smith_names(parent: Path) -> set[str]:
    """Return the rl-smith tasks among the folders of `parent`; folders that begin with `_` are templates."""
    return {smith_name(folder) for folder in _smith_folders(parent)}


def find_smith(parent: Path, name: str) -> Path | None:
    """Return the folder of task `name` below `parent`: the one whose config.yaml has that name, else the one called so.
    Raises AutorlError: several have the name."""
    if not name.startswith(PREFIX):
        return None
    folders = _smith_folders(parent)
    found = [folder for folder in folders if smith_name(folder) == name]
    if len(found) > 1:
        what = f"field `name`: {' and '.join(folder.name for folder in found)} are both the task {name}"
        raise AutorlError(what, where=found[1] / CONFIG, next_step="give one of them another name")
    called = [folder for folder in folders if folder.name in (name, name.removeprefix(PREFIX))]
    return next(iter(found or called), None)


def _smith_folders(parent: Path) -> list[Path]:
    folders = sorted({path.parent for path in parent.glob(f"*/{CONFIG}") if not path.parent.name.startswith("_")})
    return [folder for folder in folders if is_smith(folder)]


def _plain_name(config: Any) -> str:
    return str(config.get("name") or config.get("id") or "") if isinstance(config, dict) else ""


def read_smith(folder: Path, name: str) -> tuple[SmithFolder, TaskFile]:
    """Read the folder as a task without pins, which are known after `stage`. Raises AutorlError: config.yaml is not a
    table, or has settings that are not supported."""
    config = read_yaml(folder / CONFIG)
    if not isinstance(config, dict):
        raise AutorlError("a table of fields is expected", where=folder / CONFIG, next_step="see docs/adding-a-task.md")
    found = SmithFolder(folder, config)
    plain = _plain_name(config)
    if plain.removeprefix(PREFIX) != name.removeprefix(PREFIX):
        own = f"is {plain}: this folder is the task {smith_name(folder)}" if plain else "is missing"
        raise found.wrong(f"field `name` {own}", f"ask for {smith_name(folder)}, or correct the field")
    mode = config.get("eval_mode") or config.get("eval_type") or EVAL_MODE
    if mode != EVAL_MODE:
        what = f"field `eval_mode` is {mode}; understood is {EVAL_MODE}: {EVALUATE} with evaluate(question, model_answer, reference)"
        raise found.wrong(what, "write a task.yaml for this task: docs/adding-a-task.md")
    options = config.get("options") or {}
    if not isinstance(options, dict):
        raise found.wrong(f"field `options`: a table is expected, not {options!r:.100}", "correct the field")
    recipe = {
        **{"name": "default", "version": 1, "dtype": "bfloat16", "scorer": OWN_SCORER, "scorer_version": "1"},
        "prompt": str(config.get("prompt") or "{question}"),
        "system": config.get("system"),
        "sampling": {"temperature": 0.0, "max_new_tokens": config.get("max_new_tokens") or MAX_NEW_TOKENS},
        "options": {EVALUATE_FILE: EVALUATE, **options},
    }
    value = {
        **{"name": name, "source": f"rl-smith folder {folder.name}", "train_files": {}, "splits": {}},
        "title": str(config.get("title") or config.get("description") or plain).split("\n")[0][:200],
        "licence": str(config.get("licence") or config.get("license") or "not stated"),
        "recipes": [recipe],
    }
    return found, parse_record(TaskFile, value, folder / CONFIG)


def write_splits(folder: SmithFolder, data: Path, name: str, out: Path) -> None:
    """Write train/, feedback/ and report/ under `out`, as a prepare.py does. Raises AutorlError: before anything is
    written: the rows are invalid, or held-out rows are elsewhere in the folder."""
    splits = split_rows(read_rows(data), name, data)
    exposed = folder.exposed
    refuse_held_out(folder.folder, [row["question"] for split in ("feedback", "report") for row in splits[split]])
    for split, rows in splits.items():
        path = out / (TRAIN_FILE if split == "train" else f"{split}/items.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(canonical(row) + "\n" for row in rows), encoding="utf-8")
    for file in exposed:
        target = out / "train" / file
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "xb") as copy:  # never over what is there
            copy.write((folder.folder / file).read_bytes())


def pinned(file: TaskFile, data_sha256: str, out: Path) -> TaskFile:
    """Return the task file with the pins of the output of `write_splits`."""
    train = {name: file_sha256(out / name) for name in walk_files(out) if name.startswith("train/")}
    splits: dict[str, SplitPin] = {}
    for split in ("feedback", "report"):
        path = out / split / "items.jsonl"
        splits[split] = SplitPin(n=path.read_bytes().count(b"\n"), sha256=file_sha256(path))
    source = f"{file.source}; {DATA} sha256 {data_sha256}"
    return file.model_copy(update={"train_files": train, "splits": splits, "source": source})


def staged_pins(root: Root, file: TaskFile, folder: Path) -> TaskFile:
    """Return the task file with the pins of what was staged. Raises AutorlError: it is not staged, the folder's rows have
    changed, or held-out rows are outside of data/."""
    command = f"autorl-hpc stage {file.name}"
    store = read_manifest(root.task_store(file.name), name=f"task {file.name}", stage_command=command)
    vault = read_manifest(root.task_vault(file.name), name=f"held-out data of task {file.name}", stage_command=command)
    data = folder / DATA
    if data.is_file() and not vault.source.endswith(file_sha256(data)):
        what = f"the rows of task {file.name} are not those that were staged"
        advice = f"put them back, or run: {command} --again"
        raise AutorlError(what, where=data, fault=Fault.CLUSTER, next_step=advice)
    splits: dict[str, SplitPin] = {}
    held_out: list[Any] = []
    for each in vault.files:
        rows = reading.read_bytes(root.task_vault(file.name) / each.path, max_bytes=MAX_DATA_BYTES)
        splits[each.path.partition("/")[0]] = SplitPin(n=rows.count(b"\n"), sha256=each.sha256)
        held_out += questions_in(rows)
    refuse_held_out(folder, held_out)  # again here, because the folder is frozen in its current state
    train = {each.path: each.sha256 for each in store.files}
    return file.model_copy(update={"train_files": train, "splits": splits, "source": vault.source})
