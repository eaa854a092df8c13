"""The pages under docs/ and the code say the same: every option, field and refusal of one stands in the other."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import NOT_HERE, commands
from pages import PAGES as PAGES_TYPED
from pydantic import BaseModel
from typer.main import get_command

from autorl_hpc.agents.definition import AgentDriver, AgentFile
from autorl_hpc.cli import app
from autorl_hpc.records import experiment
from autorl_hpc.records.driver import DriverSpec
from autorl_hpc.records.experiment import ExperimentSpec
from autorl_hpc.records.task import Recipe, Sampling, TaskFile
from autorl_hpc.supervise.workspace import ALLOWED

REPO = Path(__file__).resolve().parents[2]
DOCS = REPO / "docs"
EVERYWHERE = {"--help", "--json", "--root"}
"""Options that docs/commands.md explains once, not in each row."""

OTHERWISE = {"--figures": "--no-figures"}
"""Options that are on by themselves, and the way they stand in the docs."""

PARTS = ("Matrix", "Budget", "GraderSpec", "JudgeSpec", "SandboxSpec", "FeedbackSpec", "Retention", "ExperimentSpec")
PAGES: dict[str, list[type[BaseModel]]] = {
    "experiments.md": [getattr(experiment, name) for name in PARTS],
    "drivers.md": [DriverSpec],
    "adding-an-agent.md": [AgentFile, AgentDriver],
    "adding-a-task.md": [TaskFile, Recipe, Sampling],
}
FIELDS = [(name, model) for name, models in PAGES.items() for model in models]


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def rows_and_blocks(name: str) -> set[str]:
    """Words of the first cells of the page's tables, of its code spans and of its YAML blocks' keys."""
    text = page(name)
    blocks = re.findall(r"^```.*?^```$", text, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    words = {word for span in re.findall(r"`([^`\n]+)`", prose) for word in re.findall(r"[a-z0-9_]+", span)}
    return words | {key for block in blocks for key in re.findall(r"([a-z_]+):", block)}


def spellings(model: type[BaseModel], name: str) -> set[str]:
    """A field's name, and those by which users may write it."""
    alias = model.model_fields[name].validation_alias
    return {name, *(choice for choice in getattr(alias, "choices", ()) if isinstance(choice, str))}


@pytest.mark.parametrize(("name", "model"), FIELDS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_every_field_is_on_its_page(name: str, model: type[BaseModel]) -> None:
    words = rows_and_blocks(name)
    missing = [
        field for field in model.model_fields if field != "schema_version" and not spellings(model, field) & words
    ]
    assert not missing, f"not in docs/{name}: {missing}"


def test_every_option_is_in_the_table_of_commands_and_no_other() -> None:
    rows = [line for line in page("commands.md").splitlines() if line.startswith("| `autorl-hpc ")]
    group: Any = get_command(app)
    commands = {name: group.get_command(None, name) for name in group.list_commands(None)}
    groups = {name: one for name, one in commands.items() if hasattr(one, "commands")}
    commands |= {f"{name} {part}": one for name, group in groups.items() for part, one in group.commands.items()}
    for command, definition in commands.items():
        if command in groups:
            continue
        if definition.hidden:
            continue
        said = {
            option
            for row in rows
            if re.search(rf"`autorl-hpc {command}[` ]", row)
            for option in re.findall(r"--[a-z][a-z-]+", row.split(" | ")[0])
        }
        if command == "submit":  # its options are those of the file ./submit
            own = set(re.findall(r'"(--[a-z]+)"', (REPO / "templates" / "workspace" / "submit").read_text()))
        else:
            own = {
                OTHERWISE.get(option, option)
                for parameter in definition.params
                for option in parameter.opts
                if option.startswith("--")
            }
        assert own - EVERYWHERE == said - EVERYWHERE, f"autorl-hpc {command}"


def refusals() -> set[str]:
    """Codes with which intake refuses, as they stand in its code."""
    found = set()
    for folder in ("supervise", "files"):
        for path in (REPO / "autorl_hpc" / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if (
                    isinstance(node, ast.Call)
                    and getattr(node.func, "id", "") in ("Refused", "_refused", "_broken")
                    and node.args
                ):
                    found |= {
                        each.value
                        for each in ast.walk(node.args[0])
                        if isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value
                    }
    return found


def test_every_refusal_is_on_the_page_of_checkpoints_and_no_other() -> None:
    cells = [line.split(" | ")[0] for line in page("checkpoints.md").splitlines() if line.startswith("| `")]
    said = set(re.findall(r"`([a-z_]+)`", " ".join(cells)))
    assert said == refusals()


def test_every_variable_that_agents_inherit_is_named() -> None:
    words = set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", page("file-protocol.md")))
    assert set(ALLOWED) <= words


def test_versions_in_the_docs_are_those_that_are_pinned() -> None:
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (REPO / "constraints.txt").read_text(), re.MULTILINE))
    for path in DOCS.glob("*.md"):
        for package, version in re.findall(r"\b(torch|mini-swe-agent)==([\d.]+\d)", path.read_text(encoding="utf-8")):
            assert version == pins[package], f"docs/{path.name}: {package}"


def test_images_are_made_from_the_one_list_of_versions() -> None:
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (REPO / "constraints.txt").read_text(), re.MULTILINE))
    names = re.findall(r"^([\w-]+)$", (REPO / "containers" / "agent-requirements.txt").read_text(), re.MULTILINE)
    assert names and {"torch", *names} <= pins.keys()
    for script in ("install-agent.sh", "install-grader.sh"):
        text = (REPO / "containers" / script).read_text()
        assert "constraints.txt" in text and not re.search(r"\b(torch|trl|transformers)==\d", text)
    installed = "".join(path.read_text() for path in (REPO / "templates" / "agents").glob("*/agent.yaml"))
    for program in (REPO / "containers" / "agent-npm.txt").read_text().split():
        assert program in installed, f"no agent.yaml installs {program}"


def test_the_smallest_experiment_is_one() -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", page("experiments.md"), re.DOTALL | re.MULTILINE)
    spec = ExperimentSpec.model_validate(yaml.safe_load(block))
    assert (spec.name, spec.matrix.mode, spec.matrix.driver) == ("first", ("free",), ("none",))


def test_tests_that_the_docs_name_are_there() -> None:
    for path in [REPO / "README.md", *DOCS.rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"tests/[\w/]+\.py", text):
            assert (REPO / name).is_file(), f"{path.name} names {name}"
        for name, word in re.findall(r"pytest [^`\n]*?(tests/[\w/]+\.py) -k (\w+)", text):
            found = re.findall(r"def (test_\w+)", (REPO / name).read_text(encoding="utf-8"))
            assert any(word in test for test in found), f"{path.name}: no test of {name} has {word!r} in its name"


@pytest.mark.parametrize("name", PAGES_TYPED)
def test_every_command_of_a_page_is_typed_by_a_test_or_says_why_not(name: str) -> None:
    """tests/pages.py types fenced blocks of bash: a command elsewhere would be typed by nobody."""
    text = (REPO / name).read_text(encoding="utf-8")
    typed = commands(name)
    assert typed
    for begin in NOT_HERE.get(name, {}):
        assert any(line.startswith(begin) for line in typed), f"{name} has no {begin!r} any more"
    fenced = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    shell = re.compile(r"(autorl-hpc|bin/[\w-]+|pip|python3?|git|apptainer|sbatch) \S")
    indented = [line.strip() for line in fenced.splitlines() if line.startswith("    ") and shell.match(line.strip())]
    assert not indented, "put these into a block of bash"


@pytest.mark.slow
def test_the_pages_build_as_a_site(tmp_path: Path) -> None:
    """A page or heading that was renamed leaves links that lead nowhere."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=REPO, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "tutorial" / "index.html").is_file()
