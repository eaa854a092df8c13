"""The agent's workspace. It belongs to the agent, so the supervisor touches it by directory descriptors alone and follows
no link in it: whatever the agent puts in the place of `results/`, nothing outside the workspace is ever written."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from pathlib import Path
from string import Template
from typing import Any

from autorl_hpc.agents import Agent
from autorl_hpc.errors import Refused
from autorl_hpc.files.faults import again, is_cluster_error
from autorl_hpc.files.layout import Root
from autorl_hpc.files.share import PACKAGE, share
from autorl_hpc.files.store import MANIFEST_NAME
from autorl_hpc.records.canonical import readable_json
from autorl_hpc.records.run import RunRecord
from autorl_hpc.records.task import Recipe
from autorl_hpc.supervise.folders import DIR_FLAGS, FILE_FLAGS, Folder
from autorl_hpc.tasks.loader import Task

FOLDERS = ("code", "data", "models", "output", "submissions", "results")
PRIVATE_FOLDERS = (".home", ".tmp", ".agent")
TOOLS = ("submit", "time", "scores")
"""Names of one file, templates/workspace/submit, which looks at how it was called. `results` is taken by the folder."""

NOT_LAID = frozenset({MANIFEST_NAME})

ROLLOUTS, ROLLOUTS_COPY = "autorl_hpc.rollouts", "autorl_rollouts"
"""Agents play episodes with a copy of that room under a name of its own, which hides no installed `autorl_hpc`."""


def lay(path: Path, root: Root, record: RunRecord, task: Task, agent: Agent) -> None:
    """Makes the workspace, or completes one whose making was interrupted. Files that stand are left as they are.

    An earlier attempt's agent may have been here: everything is written by descriptor, and no link is followed.
    """
    science = record.science
    path.mkdir(parents=True, exist_ok=True)
    with Folder.open(path) as top:
        for name in (*FOLDERS, *PRIVATE_FOLDERS):
            top.folder(name).close()
        with top.folder("data") as data:
            data.lay_tree(root.task_train(science.task), NOT_LAID)
        _lay_model(top, root, science.base_model)
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


def _lay_rollouts(target: Folder, source: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.is_dir() and path.name != "__pycache__":
            with target.folder(path.name) as inner:
                _lay_rollouts(inner, path)
        elif path.is_file():
            target.lay_file(path.name, _renamed(path) if path.suffix == ".py" else path)


def _renamed(path: Path) -> bytes:
    return path.read_bytes().replace(ROLLOUTS.encode(), ROLLOUTS_COPY.encode())


def _lay_model(top: Folder, root: Root, name: str) -> None:
    """A copy that the agent may write to; hard links would let it write into the store."""
    org, _, last = name.rpartition("/")
    with top.folder("models") as models:
        if not org:
            models.lay_whole(last, root.model(name), NOT_LAID)
            return
        with models.folder(org) as of_org:
            of_org.lay_whole(last, root.model(name), NOT_LAID)


def instructions(record: RunRecord, path: Path) -> str:
    """instructions.md, from its template."""
    science = record.science
    text = (share("templates") / "workspace" / "instructions.md").read_text(encoding="utf-8")
    mode = (share("templates") / "workspace" / f"mode-{science.mode}.md").read_text(encoding="utf-8").strip()
    return Template(text).safe_substitute(
        task=science.task,
        base_model=science.base_model,
        workspace=str(path),
        hours=f"{science.budget.wall_clock_s / 3600:.2f}",
        mode=mode,
        most=_most(science.budget.max_submissions),
        asked=_asked(science.recipe),
    )


def _most(most: int | None) -> str:
    """The limit of submissions, for instructions.md."""
    if most is None:
        return "You may submit as often as you like."
    return f"At most {most} checkpoints of different content are accepted; an answer tells how many are left (`submissions_left`)."


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


class Workspace:
    """An open workspace, by descriptor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, DIR_FLAGS)

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self._fd)

    def open_folder(self, name: str) -> int | None:
        """A descriptor of a first-level folder, made again if the agent removed it; None if something else is there.

        Raises:
            OSError: the file system failed: nothing is said about what is there.
        """

        def look() -> int:
            return os.open(name, DIR_FLAGS, dir_fd=self._fd)

        try:
            try:
                return again(look)
            except FileNotFoundError:
                os.mkdir(name, 0o755, dir_fd=self._fd)
                return again(look)
        except OSError as error:
            if is_cluster_error(error):
                raise
            return None

    def open_model_folder(self, given: str) -> tuple[int, str]:
        """Opens the folder that a manifest names, part by part, following no link; (descriptor, relative path).

        Raises:
            Refused: the path leaves the workspace, meets a link, or is no folder.
            OSError: the file system failed.
        """
        parts = self._relative_parts(given)
        fd = os.dup(self._fd)
        done: list[str] = []
        for part in parts:
            try:
                following = os.open(part, DIR_FLAGS, dir_fd=fd)
            except OSError as error:
                here = "/".join([*done, part])[:200]
                os.close(fd)
                if is_cluster_error(error):
                    raise
                if error.errno == errno.ELOOP or _is_link(self._fd, [*done, part]):
                    raise Refused(
                        "symlink", f"model_path: {here} is a symbolic link", "submit a real folder of the workspace"
                    ) from None
                if error.errno == errno.ENOTDIR:
                    raise Refused(
                        "not_a_folder", f"model_path: {here} is no folder", "give the folder, not a file in it"
                    ) from None
                raise Refused(
                    "no_such_folder",
                    f"model_path: {here}: {error.strerror}",
                    "check the path; it is relative to the workspace",
                ) from None
            os.close(fd)
            fd = following
            done.append(part)
        return fd, "/".join(done)

    def _relative_parts(self, given: str) -> list[str]:
        text = given
        if text.startswith("/"):
            for prefix in {str(self.path), str(self.path.resolve())}:
                if text == prefix or text.startswith(prefix + "/"):
                    text = text[len(prefix) :].lstrip("/")
                    break
            else:
                raise Refused(
                    "path_outside",
                    "model_path is an absolute path outside the workspace",
                    "give a folder of the workspace, such as output/v1",
                )
        parts = [part for part in text.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise Refused("path_outside", "model_path holds `..`", "give a folder of the workspace, such as output/v1")
        if not parts:
            raise Refused(
                "path_outside",
                "model_path is the workspace itself",
                "give a folder of the workspace, such as output/v1",
            )
        if parts[0] in ("submissions", "results", *PRIVATE_FOLDERS):
            raise Refused("path_outside", f"model_path lies in {parts[0]}/", "save checkpoints under output/")
        return parts

    def write(self, folder: str | None, name: str, value: Any) -> bool:
        """Writes a JSON file whole or not at all into a first-level folder (or the workspace); False if it can't."""
        data = memoryview(readable_json(value))
        try:
            fd = os.dup(self._fd) if folder is None else self.open_folder(folder)
        except OSError:
            return False
        if fd is None:
            return False
        # Not synced: an attempt that follows a lost node tells everything again.
        temporary = f".tmp-{secrets.token_hex(8)}"
        try:
            out = os.open(temporary, FILE_FLAGS, 0o644, dir_fd=fd)
            try:
                while data:
                    data = data[os.write(out, data) :]
            finally:
                os.close(out)
            os.rename(temporary, name, src_dir_fd=fd, dst_dir_fd=fd)
            return True
        except OSError:
            try:
                os.unlink(temporary, dir_fd=fd)
            except OSError:
                pass
            return False
        finally:
            os.close(fd)


def _is_link(root_fd: int, parts: list[str]) -> bool:
    try:
        return stat.S_ISLNK(os.stat("/".join(parts), dir_fd=root_fd, follow_symlinks=False).st_mode)
    except OSError:
        return False
