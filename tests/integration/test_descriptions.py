"""What the descriptions of interactive tasks tell agents to run is run, in a workspace's folder as agents find it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import needs
import pytest
from helpers import PATIENCE_S

from autorl_hpc.files.layout import Root
from autorl_hpc.stage.tasks import stage_task
from autorl_hpc.supervise.workspace import ROLLOUTS, ROLLOUTS_COPY
from autorl_hpc.tasks.loader import load_task

REPO = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

TASKS = {
    "alfworld-mini": "alfworld-mini",
    "webshop-mini": "webshop-mini",
    "deepsearchqa-mini": "deepsearchqa-mini",
    "webshop": "webshop-mini",  # the same files in another size
    "deepsearchqa": "deepsearchqa-mini",  # its own questions are not here
    "alfworld": "alfworld",
}
"""Whose data each description's code is run on."""

BEFORE = """
import random

class Engine:
    def encode(self, text):
        return list(text.encode())

    def chat(self, messages):
        return None

    def generate(self, prompts, sampling, seed):
        from autorl_rollouts.engine import Answer
        assert sampling == {"temperature": 1.0}
        return [Answer(random.choice(["look", "search[hat]", "click[back to search]", "answer[x]"]), 3, False) for _ in prompts]

engine, sampling = Engine(), {"temperature": 1.0}
"""
AFTER = """
import sys
assert len(episodes) >= 8 and all(episode.reward is not None and 0 <= episode.reward <= 1 for episode in episodes), episodes
assert all(episode.steps >= 1 and episode.completions and episode.goal for episode in episodes)
assert "autorl_hpc" not in sys.modules
print("played", len(episodes))
"""


def workspace(folder: Path, name: str, data: Path) -> Path:
    """What of a workspace the code uses, laid as the supervisor does it."""
    task = load_task(name)
    room = REPO / "autorl_hpc" / "rollouts"
    files = {"environment/environment.py": task.folder / "environment.py"}
    files |= {f"environment/{ROLLOUTS_COPY}/{path.relative_to(room)}": path for path in room.rglob("*.py")}
    for place, path in files.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes(path.read_bytes().replace(ROLLOUTS.encode(), ROLLOUTS_COPY.encode()))
    recipe = load_task(TASKS[name]).file.recipes[0]
    meta = {"recipe": {"max_steps": recipe.max_steps, "options": recipe.options}}
    (folder / "run_meta.json").write_text(json.dumps(meta))
    (folder / "data").symlink_to(data)
    return folder


@pytest.mark.parametrize("name", TASKS)
def test_the_code_of_a_description_runs_as_it_stands(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    task, source = load_task(TASKS[name]) if name != "deepsearchqa" else load_task("deepsearchqa-mini"), None
    if name == "alfworld":
        source = request.getfixturevalue("data") / "alfworld"
        if importlib.util.find_spec("fast_downward") is None:
            needs.skip("alfworld", "ALFWorld's games need TextWorld: pip install 'autorl-hpc[alfworld]'")
    root = Root(tmp_path / "root")
    root.path.mkdir()
    stage_task(root, task, source)
    folder = REPO / "tasks" / name
    blocks = BLOCK.findall((folder / "description.md").read_text(encoding="utf-8"))
    assert blocks, "nothing shows how to train"
    text = "\n".join(blocks)
    for part in ("autorl_rollouts", "run_episodes(", '"Environment"', "max_steps="):
        assert part in text, part
    text = text.replace(", 64)", ", 8)").replace("max_steps=50", "max_steps=2")  # the real games take seconds each
    place = (
        workspace(tmp_path / "ws", name, root.task_train(task.name))
        if name != "deepsearchqa"
        else _searching(tmp_path, root)
    )
    (tmp_path / "train.py").write_text(f"{BEFORE}\n{text}\n{AFTER}")
    env = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "AUTORL"))},
        "WORKSPACE": str(place),
        "DATA_PATH": str(place / "data"),
        "PYTHONPATH": str(place / "environment"),
    }
    done = subprocess.run(
        [sys.executable, "../train.py"],
        cwd=place,
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "played" in done.stdout


def _searching(tmp_path: Path, root: Root) -> Path:
    """deepsearchqa's environment over the small world's questions."""
    place = workspace(tmp_path / "ws", "deepsearchqa-mini", root.task_train("deepsearchqa-mini"))
    text = (REPO / "tasks" / "deepsearchqa" / "environment.py").read_text().replace(ROLLOUTS, ROLLOUTS_COPY)
    (place / "environment" / "environment.py").write_text(text)
    return place
