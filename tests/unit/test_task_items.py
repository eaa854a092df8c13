"""Items and prepare.py of a task: what is wrong is named by file and line before anything is queued."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import Root
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.tasks.heldout import verify_staged_task
from autorl_hpc.tasks.loader import PATH_VARIABLE, load_task

GOOD = '{"id": "a", "question": "1?", "answer": "1"}\n{"id": 2, "question": "2?", "answer": "2"}\n'
PREPARE = """from pathlib import Path

def prepare(source, out):
    for split in ("feedback", "report"):
        (out / split).mkdir()
        (out / split / "items.jsonl").write_bytes((Path(__file__).parent / f"{split}.bytes").read_bytes())
"""


class Folder:
    """A task folder whose items a test gives."""

    def __init__(self, parent: Path) -> None:
        self.path = parent / "mine"
        self.path.mkdir(parents=True)
        self.scorer = "gsm8k-marked"
        (self.path / "description.md").write_text("x\n")
        (self.path / "prepare.py").write_text(PREPARE)

    def write(self, feedback: bytes, report: bytes = GOOD.encode(), n: int | None = None, **more: Any) -> None:
        pins = {}
        for split, data in (("feedback", feedback), ("report", report)):
            (self.path / f"{split}.bytes").write_bytes(data)
            pins[split] = {"n": max(1, data.count(b"\n")), "sha256": hashlib.sha256(data).hexdigest()}
        pins["feedback"]["n"] = n or pins["feedback"]["n"]
        recipe = {"name": "default", "version": 1, "prompt": "{question}", "sampling": {"max_new_tokens": 4}}
        recipe |= {"scorer": self.scorer, "scorer_version": "4" if "gsm8k" in self.scorer else "1", **more}
        value = {"name": "mine", "title": "t", "source": "s", "licence": "l", "train_files": {}, "splits": pins}
        (self.path / "task.yaml").write_text(yaml.safe_dump({**value, "recipes": [recipe]}))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setenv(PATH_VARIABLE, str(tmp_path / "tasks"))
    return Folder(tmp_path / "tasks")


@pytest.fixture
def root(tmp_path: Path) -> Root:
    (tmp_path / "root").mkdir()
    return Root(tmp_path / "root")


def stage(root: Root) -> None:
    stage_task(root, load_task("mine"), None)


BAD = [
    (b'{"question": "1?", "answer": "1"}\n', "line 1 has no `id`"),
    (GOOD.encode() + b'{"id": true, "question": "1?", "answer": "1"}\n', "line 3 has no `id`"),
    (GOOD.encode() + b'{"id": "2", "question": "3?", "answer": "3"}\n', "line 3: the id '2' is in line 2 already"),
    (GOOD.encode() + b"[1]\n", "line 3 is not an object"),
    (GOOD.encode() + b"{'id': 3}\n", "line 3 is not JSON"),
    (GOOD.encode() + b'{"id": 3, "answer": "3"}\n', "line 3 has no `question`"),
    (GOOD.encode() + b'{"id": 3, "question": "3?"}\n', "line 3 has no `answer`"),
    (GOOD.encode("utf-16"), "line 1 is not UTF-8"),
    (GOOD.encode() + b'{"id": "\xff"}\n', "line 3 is not UTF-8: it holds the byte 0xff"),
]


@pytest.mark.parametrize(("data", "words"), BAD, ids=[words for _, words in BAD])
def test_an_item_that_can_t_be_used(folder: Folder, root: Root, data: bytes, words: str) -> None:
    folder.write(data)
    with pytest.raises(AutorlError) as caught:
        stage(root)
    assert f"feedback/items.jsonl of task mine: {words}" in caught.value.what
    assert caught.value.where == str(folder.path / "prepare.py") and caught.value.next_step
    assert not list(root.path.rglob("items.jsonl"))


@pytest.mark.parametrize("pinned", [1, 3])
def test_another_number_of_items_than_is_pinned(folder: Folder, root: Root, pinned: int) -> None:
    folder.write(GOOD.encode(), n=pinned)
    with pytest.raises(
        AutorlError, match=rf"`splits\.feedback\.n` is {pinned}, feedback/items\.jsonl holds 2"
    ) as caught:
        stage(root)
    assert caught.value.where == str(folder.path / "task.yaml")
    folder.write(GOOD.encode())
    stage(root)
    folder.write(GOOD.encode(), n=pinned)  # after the staging: the hash is the same
    with pytest.raises(AutorlError, match="holds 2 items"):
        verify_staged_task(root, load_task("mine"))
