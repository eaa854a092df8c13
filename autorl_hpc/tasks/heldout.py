"""Held-out items out of the vault. Called by graders, and by the scanner that looks for them in workspaces."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import reading
from autorl_hpc.files.layout import Root
from autorl_hpc.files.ledger import sha256_hex
from autorl_hpc.records.task import Recipe, SplitPin
from autorl_hpc.states import Fault
from autorl_hpc.tasks.item_rows import BadRow, NotUtf8, read_items
from autorl_hpc.tasks.staged import JUDGE_PROMPT, JUDGE_PROMPT_SHA256, MAX_ITEMS_BYTES


@dataclass(frozen=True)
class Item:
    """One held-out item."""

    id: str
    question: str
    answer: str
    data: dict[str, Any] = field(default_factory=dict)  # whatever else the row holds
    raw: dict[str, Any] = field(default_factory=dict)  # of the three above, those that are no text in the row


def load_items(root: Root, task: str, split: str, pin: SplitPin) -> list[Item]:
    """The items of a split, after their file's hash was checked against the run's pin.

    Raises:
        AutorlError: not staged, changed after staging, or a row is no item.
    """
    path = root.task_vault(task) / (pin.folder or split) / "items.jsonl"
    data = _read_pinned(path, pin.sha256, task)
    try:
        return [_item(row) for row in read_items(data)]
    except (BadRow, NotUtf8) as error:
        words = f"it is not in UTF-8: {error}" if isinstance(error, NotUtf8) else str(error)
        raise AutorlError(
            f"held-out items of task {task}, {split} split: {words}",
            where=path,
            fault=Fault.GRADER,
            next_step="correct the task, stage it again and launch under another name; no checkpoint is to blame",
            exit_code=Exit.FAILED,
        ) from None


def _item(row: dict[str, Any]) -> Item:
    own: dict[str, Any] = {name: row[name] for name in ("id", "question", "answer") if name in row}
    rest = {name: value for name, value in row.items() if name not in own}
    raw = {name: value for name, value in own.items() if not isinstance(value, str)}
    return Item(str(row["id"]), _text(own.get("question", "")), _text(own.get("answer", "")), rest, raw)


def _text(value: Any) -> str:
    """A table or a list as JSON: it is asked as it was written."""
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def load_shots(root: Root, task: str, recipe: Recipe) -> list[dict[str, str]]:
    """The recipe's worked examples as chat messages, none where it has none.

    A message that holds `{question}` is the file's template for the question itself; the recipe's prompt stands for it.
    """
    if recipe.shots_file is None:
        return []
    path = root.task_vault(task) / recipe.shots_file
    value: Any = json.loads(_read_pinned(path, recipe.shots_sha256 or "", task))
    return [
        {"role": str(m["role"]), "content": str(m["content"])}
        for m in value["messages"]
        if "{question}" not in m["content"]
    ]


def load_judge_prompt(root: Root, task: str, recipe: Recipe) -> str:
    """The text that the recipe's judge is asked with, "" where the recipe names no file.

    Raises:
        AutorlError: not staged, or changed after staging.
    """
    if JUDGE_PROMPT not in recipe.options:
        return ""
    path = root.task_vault(task) / str(recipe.options[JUDGE_PROMPT])
    return _read_pinned(path, str(recipe.options.get(JUDGE_PROMPT_SHA256, "")), task).decode("utf-8")


def _read_pinned(path: Path, sha256: str, task: str) -> bytes:
    command = f"autorl-hpc stage {task}"
    try:
        data = reading.read_bytes(path, max_bytes=MAX_ITEMS_BYTES)
    except (OSError, ValueError) as error:
        raise AutorlError(
            f"held-out data of task {task} can't be read: {error}",
            where=path,
            fault=Fault.CLUSTER,
            next_step=f"run: {command}",
        ) from None
    if sha256_hex(data) != sha256:
        raise AutorlError(
            f"held-out data of task {task} were changed after staging",
            where=path,
            fault=Fault.CLUSTER,
            next_step=f"put the original back or run: {command} --again",
            exit_code=Exit.FAILED,
        )
    return data
