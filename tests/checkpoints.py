"""Checkpoints made from the tiny model, right and wrong, and a real intake desk that takes them."""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from weights import Tensors, read_safetensors, write_safetensors

from autorl_hpc.errors import Refused
from autorl_hpc.files.checkpoint import INDEX_NAME, folder_content_hash
from autorl_hpc.files.layout import Root, share
from autorl_hpc.files.ledger import Ledger, now_text
from autorl_hpc.files.run_view import RunView
from autorl_hpc.records.experiment import Budget
from autorl_hpc.records.run import RunRecord, Science
from autorl_hpc.states import Protocol
from autorl_hpc.supervise import model_config
from autorl_hpc.supervise.attempt_ledger import LedgerWriter
from autorl_hpc.supervise.budget import BudgetClock
from autorl_hpc.supervise.copy import Copied, copy_checkpoint
from autorl_hpc.supervise.intake import Intake, ResultWriter, lint_folder
from autorl_hpc.supervise.lint import BaseModel
from autorl_hpc.supervise.workspace import FOLDERS
from autorl_hpc.tasks.loader import Task, load_task

TINY = share("templates") / "models" / "tiny"
SINGLE = "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ZERO = "0" * 64


def ask_transformers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask in this process what transformers makes of two configs; a child needs seconds for each. What it can't read goes to one."""
    ask_child = model_config._meaning

    def ask(both: str) -> Any:
        mine, theirs = map(model_config.read, json.loads(both))
        readable = isinstance(mine, dict) and isinstance(theirs, dict)
        return (model_config.told(mine), model_config.told(theirs)) if readable else ask_child(both)

    monkeypatch.setattr(model_config, "_meaning", ask)


def science_of(task: Task, **changes: Any) -> Science:
    """A run of a task with the tiny model, by no agent; `recipe`: fields that differ from its first recipe's."""
    recipe = task.file.recipes[0].model_copy(update=changes.pop("recipe", {}))
    fields: dict[str, Any] = {"agent": "null", "driver": "none", "base_model": "autorl/tiny", "mode": "free", "seed": 0}
    fields |= {"budget": Budget(wall_clock_s=3600.0), "protocol": Protocol.TWO_SPLIT, "base_model_content_hash": ZERO}
    splits = {str(split): pin for split, pin in task.file.splits.items()}
    return Science(**{**fields, "task": task.name, "recipe": recipe, "splits": splits, **changes})


def record_of(science: Science) -> RunRecord:
    """Its run.json."""
    hashes = {"recipe_hash": science.recipe.hash(), "task_hash": ZERO, "agent_hash": ZERO, "code_hash": ZERO}
    which = {"run_id": science.run_id(), "experiment": "exp", "index": 0, "created_at": now_text()}
    return RunRecord(science=science, **which, **hashes)


def tiny_tensors() -> Tensors:
    """The tiny model's tensors, fp32."""
    return read_safetensors(TINY / SINGLE)


def tiny_config() -> dict[str, Any]:
    """The tiny model's config."""
    value: dict[str, Any] = json.loads((TINY / "config.json").read_text())
    return value


def tiny_base() -> BaseModel:
    """The tiny model as the lint sees a base."""
    return BaseModel.read(TINY, folder_content_hash(TINY))


def changed(tensors: Tensors, scale: float = 1e-3) -> Tensors:
    """The same tensors after a little training."""
    rng = np.random.default_rng(0)
    return {
        name: (dtype, (values + scale * rng.standard_normal(values.shape)).astype(values.dtype))
        for name, (dtype, values) in tensors.items()
    }


def save(folder: Path, tensors: Tensors | None = None, config: Mapping[str, Any] | None = None) -> Path:
    """A checkpoint of one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or tiny_config()))
    write_safetensors(folder / SINGLE, tensors or changed(tiny_tensors()))
    return folder


def save_shards(folder: Path, count: int, tensors: Tensors | None = None) -> Path:
    """The same in `count` shards with an index."""
    save(folder, tensors)
    (folder / SINGLE).unlink()
    tensors = tensors or changed(tiny_tensors())
    names = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
    index = {name: names[number % count] for number, name in enumerate(tensors)}
    for shard in names:
        write_safetensors(folder / shard, {name: tensors[name] for name in tensors if index[name] == shard})
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def write_raw(path: Path, header: object, data: bytes = b"") -> None:
    """A safetensors file with whatever header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def raw_parts(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return header, data[8 + length :]


def take(folder: Path, target: Path, base: BaseModel | None = None, dtype: str = "float32") -> Copied:
    """Lint and copy, as the intake does them.

    Raises:
        Refused: see there.
    """
    base = base or tiny_base()
    target.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, fd)
        return copy_checkpoint(lint_folder(fd, base, stack), base, target, dtype)


def refusal(folder: Path, target: Path, base: BaseModel | None = None) -> Refused:
    """The refusal of a folder that must not be accepted."""
    try:
        copied = take(folder, target, base)
    except Refused as refused:
        return refused
    raise AssertionError(f"accepted, as {copied}")


def with_strange_names(folder: Path) -> None:
    """Files whose names are no text, or would act on a terminal."""
    for name in (b"\xff\xfe.txt", b"new\nline", b"\x1b[2J", b"a" * 255):
        with open(os.path.join(os.fsencode(folder), name), "wb"):
            pass


@contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """Does `action` over and over while the body runs; it has been done once before that begins."""
    stop, once = threading.Event(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            action()
            once.set()
            time.sleep(0.002)

    thread = threading.Thread(target=work)
    thread.start()
    once.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def write_at(path: Path, position: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(data)


class Desk:
    """A run's folder, a workspace and a real intake between them.

    Args:
        base: another base model than the tiny one.
        dtype: what its recipe computes in.
        budget: fields of the budget beside its time.
    """

    def __init__(self, path: Path, base: BaseModel | None = None, dtype: str = "float32", **budget: Any) -> None:
        self.experiment = Root(path).experiment("exp")
        for folder in self.experiment.folders():
            folder.mkdir(parents=True)
        base, limits = base or tiny_base(), Budget(wall_clock_s=3600.0, **budget)
        own: dict[str, Any] = {
            "budget": limits,
            "recipe": {"dtype": dtype},
            "base_model_content_hash": base.content_hash,
        }
        self.record = record_of(science_of(load_task("arithmetic"), **own))
        self.run = self.experiment.run(self.record.run_id)
        self.run.ledger.mkdir(parents=True)
        self.run.record.write_bytes(self.record.canonical())
        self.base = base
        self.workspace = path / "workspace"
        for name in FOLDERS:
            (self.workspace / name).mkdir(parents=True)
        self.intake = self.next_attempt()

    def next_attempt(self) -> Intake:
        """The intake of a new attempt on the same ledger: what a killed supervisor is followed by."""
        chain = LedgerWriter(self.run)
        attempt = chain.begin(0.0, str(self.workspace))
        clock = BudgetClock(self.run.clock, self.record.science.budget, attempt)
        answers = ResultWriter(self.record, self.experiment.baselines, self.workspace)
        self.intake = Intake(self.experiment, self.record, self.base, clock, chain, answers, retry_s=0.0)
        return self.intake

    def drop(self, name: str, value: object) -> Path:
        """A manifest, whatever it is: bytes as they are, else JSON."""
        path = self.workspace / "submissions" / f"{name}.json"
        path.write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
        return path

    def submit(self, name: str, model_path: str, **fields: object) -> dict[str, Any]:
        """Drops a manifest, has it taken in and returns the answer."""
        self.drop(name, {"model_path": model_path, **fields})
        self.intake.poll()
        return self.answer(name)

    @property
    def checkpoint(self) -> Path:
        """Where tests save what they submit; not made yet."""
        return self.workspace / "output" / "v1"

    def accepted(self) -> dict[str, Any]:
        """The answer to what lies at `checkpoint`, which must be accepted, with its artifact as the hash says."""
        answer = self.submit("v1", "output/v1")
        assert answer["status"] == "accepted" and answer["error"] is None, answer
        assert len(self.queued()) == 1
        return answer

    def refused(self) -> dict[str, Any]:
        """The answer to what lies at `checkpoint`, which must be refused and leave nothing behind."""
        answer = self.submit("v1", "output/v1")
        assert answer["status"] == "refused", answer
        assert self.artifacts() == [] and self.queued() == []
        (kept,) = self.view().refused()
        assert (kept.code, kept.message, kept.advice) == (answer["code"], answer["error"], answer["advice"])
        return answer

    def artifact(self, answer: dict[str, Any]) -> Path:
        """The accepted copy."""
        return self.experiment.artifacts / str(answer["content_hash"])

    def answer(self, name: str) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.workspace / "results" / f"{name}.json").read_bytes())
        return value

    def view(self) -> RunView:
        return RunView.of(Ledger(self.run).read())

    def artifacts(self) -> list[str]:
        """Names under artifacts/, unfinished ones included."""
        return sorted(os.listdir(self.experiment.artifacts))

    def queued(self) -> list[str]:
        return sorted(os.listdir(self.experiment.queue))
