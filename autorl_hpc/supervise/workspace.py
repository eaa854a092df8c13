"""Create the agent's workspace: `Prompts`, `lay` (folders, tools, instructions, data), and the agent's environment variables. An earlier
attempt's agent may have written here, so everything is written by descriptor and no link is followed."""

from __future__ import annotations

import json
import os
import secrets
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, Literal

from autorl_hpc.agents import Agent, AgentFile
from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import PACKAGE, Root, share
from autorl_hpc.files.processes import ALLOWED, MARK_VARIABLE
from autorl_hpc.files.redact import site_variables
from autorl_hpc.files.run_view import RunView
from autorl_hpc.files.safe_open import OWNERS, WRITE_FLAGS, Folder
from autorl_hpc.files.store import IMAGE, MANIFEST_NAME, PYTHON_ON_EVERY_NODE, VENV, find_environment
from autorl_hpc.recorder.observed import OBSERVED
from autorl_hpc.records.driver import NO_DRIVER, DriverSpec
from autorl_hpc.records.experiment import Budget
from autorl_hpc.records.run import RunRecord, Science
from autorl_hpc.records.task import HARNESSES, Recipe
from autorl_hpc.sandbox.sandbox_plan import program_folders
from autorl_hpc.states import Fault, Network, Protocol, Split
from autorl_hpc.supervise.budget import WORDS, BudgetLimits, amount
from autorl_hpc.tasks.folders import OWN_SCORER, code_files
from autorl_hpc.tasks.loader import Task

# --- prompts: what an LLM agent reads on its standard input at its first start and at a restart

PROMPT_NAME = "prompt.md"
INTERRUPTED = "Your work was interrupted from outside, and every process that you had started was ended."
ENDED_EARLY = "You ended your work before your budget was used."


@dataclass
class Prompts:
    """The prompts of one run, for agents with `prompt: true`."""

    record: RunRecord
    workspace: Path
    limits: BudgetLimits
    look: Callable[[], RunView]

    def first(self) -> str:
        """Return prompt.md: the task, the mode, the budget, how to submit. It is the same in every attempt."""
        science = self.record.science
        lines = budget_lines(science.budget, driver=self.limits.has_driver)
        return Template(_template("prompt.md")).substitute(
            _common(self.record, self.workspace),
            budget="\n".join(f"- {line}" for line in lines),
            internet="" if science.network is Network.OPEN else "There is no internet. ",
        )

    def again(self, why: str, *, goes_on: bool) -> str:
        """Return the prompt for a restart. `goes_on`: the agent's program continues its session; else it gets the task again."""
        view = self.look()
        best = view.best()
        score = None if best is None else view.score_of(best)
        so_far = f"{len(view.accepted())} submissions were accepted."
        if best is not None and score is not None and score.evaluation.score is not None:
            so_far += f" The best, `{best.model_path}`, scored {score.evaluation.score:.2f}."
        left = [
            f"- {WORDS[part.name]}: {amount(part.name, part.left)} of {amount(part.name, part.limit or 0.0)}"
            for part in self.limits.parts()
            if part.left is not None
        ]
        facts = {"why": why, "left": "\n".join(left), "so_far": so_far, "task": self.record.science.task}
        text = Template(_template("reprompt.md")).substitute(facts)
        return text if goes_on else f"{self.first()}\n{text}"


def _template(name: str) -> str:
    return (share("templates") / "workspace" / name).read_text(encoding="utf-8")


def _common(record: RunRecord, workspace: Path) -> dict[str, str]:
    science, budget = record.science, record.science.budget
    most = f"At most {budget.max_submissions} checkpoints of different content are accepted; "
    most += "an answer tells how many are left (`submissions_left`)."
    grace = f"When a part of it is used up, {budget.last_grace_s:.0f} s are left for a last submission."
    return {
        "task": science.task,
        "base_model": science.base_model,
        "workspace": str(workspace),
        "mode": _template(f"mode-{science.mode}.md").strip(),
        "grace": "" if budget.last_grace_s < 1 else grace,
        "most": "You may submit as often as you like." if budget.max_submissions is None else most,
    }


def budget_lines(budget: Budget, *, driver: bool) -> list[str]:
    """Return the limited parts of the budget, one line each, for people."""
    limits = {
        "wall_clock_s": budget.wall_clock_s,
        "gpu_hours": budget.gpu_hours,
        "tokens": budget.tokens if driver else None,
        "cost_usd": budget.cost_usd if driver else None,
        "submissions": budget.max_submissions,
    }
    lines = [f"{WORDS[name]}: {amount(name, value)}" for name, value in limits.items() if value is not None]
    lines[0] = f"time: {budget.wall_clock_s / 3600:.2f} hours of wall clock"
    return lines


def feedback_text(science: Science) -> str:
    """Return which items a feedback score is computed on, as a sentence."""
    own = " `./evaluate output/v1` scores a checkpoint on training rows as the grader does on held-out ones; it is no submission."
    own = own if science.evaluate_script else ""
    part, split = science.feedback_part, Split.REPORT if science.protocol is Protocol.PAPER else Split.FEEDBACK
    chance = "`standard_error` beside it says how far chance may move it, in points"
    if part is None:
        return f"A score is of {science.asked(split)} items; {chance}.{own}"
    of = f"{part.n} of {science.splits[split].n} items, the same ones each time, for the base model too"
    text = f"To answer sooner, a feedback score is of a part of the feedback split: {of}. {chance}: a smaller gain may be none. "
    return f"{text}The final score is of a whole other split.{own}"


# --- layout: folders, tools, instructions, base model, training data, the agent's own scripts

# How base model and training data come into the workspace: mounted read-only by the sandbox; as links into the store, which it makes
# read-only; as copies, if nothing else keeps the agent from writing into the store.
Placing = Literal["mounted", "linked", "copied"]

FOLDERS = ("code", "models", "output", "submissions", "results")
OBSERVER = PACKAGE / "recorder" / "observer"  # of the module that runs in the agent's own Python processes
PRIVATE_FOLDERS = (".home", ".tmp", ".agent", ".observer", OBSERVED)
TOOLS = ("submit", "time", "scores")  # names of one program, templates/workspace/submit
SUITE, EVALUATE = ".suite", "evaluate"  # `./evaluate`, and the code and recipe that it scores with
FILES = ("description.md", "instructions.md", "run_meta.json", "time.json", "budget.log", PROMPT_NAME)
LAID = frozenset({*FOLDERS, *PRIVATE_FOLDERS, *TOOLS, *FILES, "data", "environment", SUITE, EVALUATE})  # by the suite
NOT_LAID = frozenset({MANIFEST_NAME})
PROBE_BYTES = 1 << 16

# Agents play episodes with a copy of the rollouts package under another name, which doesn't hide an installed `autorl_hpc`.
ROLLOUTS, ROLLOUTS_COPY = "autorl_hpc.rollouts", "autorl_rollouts"


def lay_folders(path: Path, root: Root, record: RunRecord) -> None:
    """Create the workspace's folders, and repair those that an agent replaced or closed, mount points too: a sandbox that starts would
    follow a link there, with the supervisor's rights. Raises OSError: see `try_writing`."""
    path.mkdir(parents=True, exist_ok=True)
    if (mode := stat.S_IMODE(path.stat().st_mode)) & OWNERS != OWNERS:
        path.chmod(mode | OWNERS)
    with Folder.open(path) as top:
        for name in (*FOLDERS, *PRIVATE_FOLDERS, *(where for _, where in placed(root, record))):
            _place(top, path, name, "mounted")
        try_writing(top)


def try_writing(workspace: Folder) -> None:
    """Write a file and remove it. Raises OSError: this file system takes none (full, over quota, out of inodes, read-only)."""
    name = f".{secrets.token_hex(8)}"
    fd = os.open(name, WRITE_FLAGS, 0o600, dir_fd=workspace.fd)
    try:
        os.write(fd, os.urandom(PROBE_BYTES))
        os.fsync(fd)  # quotas of some file systems are told here
    finally:
        os.close(fd)
        os.unlink(name, dir_fd=workspace.fd)


def placed(root: Root, record: RunRecord) -> list[tuple[Path, str]]:
    """Return what agents only read, as (folder of the store, path in the workspace)."""
    science = record.science
    model = f"models/{science.base_model}"
    found = [(root.task_train(science.task), "data"), (root.model(science.base_model), model), (OBSERVER, ".observer")]
    if science.evaluate_script:
        code = (PACKAGE, PACKAGE.parent / "autorl_hpc_harnesses")
        found += [(folder, f"{SUITE}/{folder.name}") for folder in code if folder.is_dir()]
    return found


def lay(
    path: Path,
    root: Root,
    record: RunRecord,
    task: Task,
    agent: Agent,
    placing: Placing = "copied",
    prompt: str | None = None,
) -> None:
    """Create the workspace, or complete an unfinished one. Existing files are not changed. `prompt`: for the agent's standard input."""
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
        if record.science.evaluate_script:
            top.lay_file(EVALUATE, share("templates") / "workspace" / EVALUATE, 0o755)
            with top.folder(SUITE) as suite:
                suite.lay_file("recipe.json", record.science.recipe.model_dump_json().encode())
                if record.science.recipe.scorer == OWN_SCORER:
                    with suite.folder("task") as own:
                        for name in code_files(task.folder):
                            own.lay_file(name, task.folder / name)
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
        top.folder(name).close()  # a real folder: a mount must not follow an agent's link
    elif placing == "linked":
        top.lay_link(name, source)
    else:
        top.lay_whole(name, source, NOT_LAID)


def instructions(record: RunRecord, path: Path) -> str:
    science = record.science
    return Template(_template("instructions.md")).safe_substitute(
        _common(record, path),
        budget="; ".join(budget_lines(science.budget, driver=science.driver != NO_DRIVER)),
        asked=_asked(science.recipe),
        feedback=feedback_text(science),
    )


def _asked(recipe: Recipe) -> str:
    sampling = recipe.sampling
    if recipe.scorer in HARNESSES:
        return f"As {recipe.options['harness_versions']} asks it; where that names no limit, {sampling.max_new_tokens} new tokens at most."
    how = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature}"
    limit = f"at most {sampling.max_new_tokens} new tokens; {how}"
    if recipe.max_steps:
        where = "`description.md` shows the prompt; `environment/` holds the code that plays them."
        return f"By episodes of at most {recipe.max_steps} actions, each {limit}. {where}"
    prompt = json.dumps(recipe.prompt, ensure_ascii=False)
    today = f" Today is {recipe.date} for a chat template that writes the date." if recipe.chat == "auto" else ""
    return f"Prompt: {prompt} with the question in place of `{{question}}`; {limit}.{today}"


def run_meta(record: RunRecord) -> dict[str, Any]:
    """Return the content of run_meta.json, which is information for the agent and never read back."""
    science, budget, recipe = record.science, record.science.budget, record.science.recipe
    return {
        **{name: getattr(science, name) for name in ("task", "base_model", "agent", "mode", "seed")},
        "protocol": str(science.protocol),
        "timeout_s": int(budget.wall_clock_s),
        "max_submissions": budget.max_submissions,
        "feedback_part": science.feedback_part and science.feedback_part.n,
        "budget": {
            **{name: getattr(budget, name) for name in ("gpu_hours", "tokens", "cost_usd")},
            "grace_s": budget.last_grace_s,
        },
        "recipe": {
            **{name: getattr(recipe, name) for name in ("name", "prompt", "chat", "system", "max_steps")},
            "date": recipe.date.isoformat(),
            "max_new_tokens": recipe.sampling.max_new_tokens,
            "temperature": recipe.sampling.temperature,
            "stop": list(recipe.sampling.stop),
            "options": dict(recipe.options),
        },
    }


# --- environment variables of the agent: the reference's, an allow-list, and nothing else


def agent_environment(
    record: RunRecord,
    agent: AgentFile,
    workspace: Path,
    url: str,
    mark: str,
    attempt: int,
    venv: Path | None,
    readable: Sequence[str],
    site: Sequence[str] = (),
) -> dict[str, str]:
    """Return the variables of the agent's process; see docs/file-protocol.md. `site`: names that the cluster's profile passes on, as
    `NCCL_*`; `agent`: with its secrets and variables, which ours override; `venv`: its programs come first, in place of the suite's
    own; `readable`: folders whose programs come last."""
    science = record.science
    env = {**site_variables(site, os.environ), **agent.env}
    env |= {name: os.environ[name] for name in (*ALLOWED, *agent.secrets) if name in os.environ}
    ours, path = str(Path(sys.executable).parent), env.get("PATH", os.defpath)
    if venv is None:
        env["PATH"] = os.pathsep.join([ours, path])
    else:
        others = [part for part in path.split(os.pathsep) if part != ours or sys.prefix == sys.base_prefix]
        env["PATH"] = os.pathsep.join([str(venv / "bin"), *others])
        env["VIRTUAL_ENV"] = str(venv)
    env["PATH"] = os.pathsep.join([env["PATH"], *program_folders(readable)])
    env.setdefault("LANG", "C.UTF-8")
    env.setdefault("OMP_NUM_THREADS", "1")
    env.update(
        TASK=science.task,
        BASE_MODEL=science.base_model,
        WORKSPACE=str(workspace),
        MODEL_PATH=str(workspace / "models" / science.base_model),
        DATA_PATH=str(workspace / "data"),
        OUTPUT_DIR=str(workspace / "output"),
        GRADING_SERVER_URL=url,
        AUTORL_SEED=str(science.seed),
        AUTORL_MODE=science.mode,
        AUTORL_ATTEMPT=str(attempt),
        HOME=str(workspace / ".home"),
        TMPDIR=str(workspace / ".tmp"),
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        HF_HOME=str(workspace / ".home" / "huggingface"),
        TOKENIZERS_PARALLELISM="false",
        PYTHONUNBUFFERED="1",
    )
    modules = [str(workspace / ".observer"), agent.env.get("PYTHONPATH", "")]
    if science.recipe.max_steps:  # interactive tasks come with their environment's code
        modules.insert(1, str(workspace / "environment"))
    env["PYTHONPATH"] = os.pathsep.join(each for each in modules if each)
    env.setdefault("AUTORL_OBSERVED", str(workspace / OBSERVED))  # an agent's definition may turn it off
    env[MARK_VARIABLE] = mark
    return env


def driver_environment(spec: DriverSpec, url: str, token: str) -> dict[str, str]:
    """Return the variables with which the agent reaches its driver: by the gateway's `url`, with the run's own token as the key."""
    env = {
        **dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), f"{url}/v1"),
        **dict.fromkeys(("ANTHROPIC_BASE_URL", "GOOGLE_GEMINI_BASE_URL"), url),
        **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"), token),
        "AUTORL_DRIVER_MODEL": spec.model,
        "AUTORL_DRIVER_PARAMETERS": json.dumps(spec.parameters),
        "AUTORL_DRIVER_TOOLS": ",".join(spec.tools),
    }
    if spec.context_tokens is not None:
        env["AUTORL_DRIVER_CONTEXT_TOKENS"] = str(spec.context_tokens)
    if spec.max_output_tokens is not None:
        env["AUTORL_DRIVER_MAX_OUTPUT_TOKENS"] = str(spec.max_output_tokens)
    return env


def environment_of(root: Root, record: RunRecord) -> tuple[Path | None, Path | None]:
    """Return (venv, image) of the environment that run.json names. Raises AutorlError: it is missing, or its Python here."""
    if record.environment is None:
        return None, None
    name = record.environment.name
    folder = find_environment(root, name, record.environment.content_hash)[0]
    if record.environment.kind == "image":
        return None, folder / IMAGE
    if not os.access(python := folder / VENV / "bin" / "python", os.X_OK):
        what, advice = f"environment {name} has no Python on this node", PYTHON_ON_EVERY_NODE
        raise AutorlError(what, where=python, fault=Fault.CLUSTER, next_step=advice, passes=True)
    return folder / VENV, None
