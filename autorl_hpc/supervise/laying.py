"""Lays what an agent finds in its workspace: folders, tools, instructions, base model, training data, its own scripts."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from string import Template
from typing import Any, Literal

from autorl_hpc.agents import Agent
from autorl_hpc.files.layout import Root
from autorl_hpc.files.share import PACKAGE, share
from autorl_hpc.files.store import MANIFEST_NAME
from autorl_hpc.records.driver import NO_DRIVER
from autorl_hpc.records.run import RunRecord
from autorl_hpc.records.task import Recipe
from autorl_hpc.supervise.folders import OWNERS, Folder
from autorl_hpc.supervise.prompts import PROMPT_NAME, budget_lines, feedback_text, grace_text, mode_text, most_text
from autorl_hpc.supervise.workspace import PRIVATE_FOLDERS
from autorl_hpc.tasks.loader import Task

Placing = Literal["mounted", "linked", "copied"]
"""How base model and training data come into the workspace: the sandbox places the store's own, read-only; as links into the
store, which the sandbox makes read-only; as copies, where nothing else keeps the agent from writing into the store."""

FOLDERS = ("code", "models", "output", "submissions", "results")
TOOLS = ("submit", "time", "scores")
"""Names of one file, templates/workspace/submit, which looks at how it was called. `results` is taken by the folder."""

NOT_LAID = frozenset({MANIFEST_NAME})

ROLLOUTS, ROLLOUTS_COPY = "autorl_hpc.rollouts", "autorl_rollouts"
"""Agents play episodes with a copy of that room under a name of its own, which hides no installed `autorl_hpc`."""


def lay_folders(path: Path, root: Root, record: RunRecord) -> None:
    """Makes the workspace's own folders; what an earlier attempt's agent put in their place, or closed, is put right.

    So are those where something will be mounted: a sandbox that is being made would follow a link there, out of the workspace,
    with the supervisor's rights.
    """
    path.mkdir(parents=True, exist_ok=True)
    if (mode := stat.S_IMODE(path.stat().st_mode)) & OWNERS != OWNERS:
        path.chmod(mode | OWNERS)
    with Folder.open(path) as top:
        for name in (*FOLDERS, *PRIVATE_FOLDERS, *(where for _, where in placed(root, record))):
            _lay_folder(top, name)


def _lay_folder(top: Folder, where: str) -> None:
    name, _, rest = where.partition("/")
    with top.folder(name) as inner:
        if rest:
            _lay_folder(inner, rest)


def placed(root: Root, record: RunRecord) -> list[tuple[Path, str]]:
    """What agents only read: (folder of the store, path in the workspace)."""
    science = record.science
    return [(root.task_train(science.task), "data"), (root.model(science.base_model), f"models/{science.base_model}")]


def lay(
    path: Path,
    root: Root,
    record: RunRecord,
    task: Task,
    agent: Agent,
    placing: Placing = "copied",
    prompt: str | None = None,
) -> None:
    """Makes the workspace, or completes one whose making was interrupted. Files that stand are left as they are.

    An earlier attempt's agent may have been here: everything is written by descriptor, and no link is followed.

    Args:
        prompt: what the agent is told on its standard input; None: it takes none.
    """
    lay_folders(path, root, record)
    with Folder.open(path) as top:
        for source, where in placed(root, record):
            _place(top, source, where, placing)
        with top.folder(".agent") as agents:
            for source in agent.folders():
                with agents.folder(source.name) as own:
                    own.lay_tree(source, NOT_LAID)
        for name in TOOLS:
            top.lay_file(name, share("templates") / "workspace" / "submit", 0o755)
        if task.file.environment is not None:
            with top.folder("environment") as place:
                file = task.file.environment.partition(":")[0]
                place.lay_file(file, _renamed(task.folder / file))
                with place.folder(ROLLOUTS_COPY) as copy:
                    _lay_rollouts(copy, PACKAGE / "rollouts")
        top.lay_file("description.md", task.description.encode())
        top.lay_file("instructions.md", instructions(record, path).encode())
        if prompt is not None:
            top.lay_file(PROMPT_NAME, prompt.encode())


def _lay_rollouts(target: Folder, source: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.is_dir() and path.name != "__pycache__":
            with target.folder(path.name) as inner:
                _lay_rollouts(inner, path)
        elif path.is_file():
            target.lay_file(path.name, _renamed(path) if path.suffix == ".py" else path)


def _renamed(path: Path) -> bytes:
    return path.read_bytes().replace(ROLLOUTS.encode(), ROLLOUTS_COPY.encode())


def _place(top: Folder, source: Path, where: str, placing: Placing) -> None:
    name, _, rest = where.partition("/")
    if rest:
        with top.folder(name) as inner:
            _place(inner, source, rest, placing)
    elif placing == "mounted":
        top.folder(name).close()  # a real folder: what is mounted must not land behind an agent's link
    elif placing == "linked":
        top.lay_link(name, source)
    else:
        top.lay_whole(name, source, NOT_LAID)


def instructions(record: RunRecord, path: Path) -> str:
    """instructions.md, from its template."""
    science = record.science
    text = (share("templates") / "workspace" / "instructions.md").read_text(encoding="utf-8")
    return Template(text).safe_substitute(
        task=science.task,
        base_model=science.base_model,
        workspace=str(path),
        mode=mode_text(science.mode),
        budget="; ".join(budget_lines(science.budget, driver=science.driver != NO_DRIVER)),
        grace=grace_text(science.budget),
        most=most_text(science.budget.max_submissions),
        asked=_asked(science.recipe),
        feedback=feedback_text(science),
    )


def _asked(recipe: Recipe) -> str:
    """How the model is asked, for instructions.md."""
    limit = f"at most {recipe.sampling.max_new_tokens} new tokens; " + (
        "greedy" if recipe.sampling.temperature == 0 else f"temperature {recipe.sampling.temperature}"
    )
    if recipe.max_steps:
        return (
            f"By episodes of at most {recipe.max_steps} actions, each {limit}. `description.md` shows the prompt; "
            "`environment/` holds the code that plays them."
        )
    prompt = json.dumps(recipe.prompt, ensure_ascii=False)
    return f"Prompt: {prompt} with the question in place of `{{question}}`; {limit}."


def run_meta(record: RunRecord) -> dict[str, Any]:
    """What run_meta.json tells the agent. Information only: nothing in it is ever read back."""
    science = record.science
    return {
        "task": science.task,
        "base_model": science.base_model,
        "agent": science.agent,
        "mode": science.mode,
        "seed": science.seed,
        "protocol": str(science.protocol),
        "timeout_s": int(science.budget.wall_clock_s),
        "max_submissions": science.budget.max_submissions,
        "feedback_part": None if science.feedback_part is None else science.feedback_part.n,
        "budget": {
            "gpu_hours": science.budget.gpu_hours,
            "tokens": science.budget.tokens,
            "cost_usd": science.budget.cost_usd,
            "grace_s": science.budget.last_grace_s,
        },
        "recipe": {
            "name": science.recipe.name,
            "prompt": science.recipe.prompt,
            "chat": science.recipe.chat,
            "system": science.recipe.system,
            "max_new_tokens": science.recipe.sampling.max_new_tokens,
            "temperature": science.recipe.sampling.temperature,
            "stop": list(science.recipe.sampling.stop),
            "max_steps": science.recipe.max_steps,
            "options": dict(science.recipe.options),
        },
    }
