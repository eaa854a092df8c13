"""Commands and files of a page under docs/, as somebody types them: blocks in order, what stands for a word here, what can't run here."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from helpers import SLURM_PATIENCE_S
from realdata import REPO

PAGES = ("README.md", "docs/tutorial.md", "docs/clusters.md", "docs/adding-an-agent.md", "docs/adding-a-task.md")
"""Every command of these is run by a test as typed, or stands in NOT_HERE."""

INSTALLS = "it needs PyPI and a GPU's torch; the suite runs from this checkout"
NOT_HERE: dict[str, dict[str, str]] = {
    "README.md": {},
    "docs/tutorial.md": {
        "python3 -m venv": INSTALLS,
        "pip install torch": INSTALLS,
        "pip wheel": INSTALLS,
        "$PROJECT/venvs/autorl/bin/pip install": INSTALLS,
        "$PROJECT/venvs/vllm/bin/pip install": INSTALLS,
    },
    "docs/clusters.md": {
        "python3 -m venv": INSTALLS,
        "pip install torch": INSTALLS,
        "cd autorl-hpc/containers && apptainer build": "Debian 12 has no package of apptainer; the scripts were run in a chroot",
        "autorl-hpc stage env:image": "it needs an image that apptainer built; tests/unit/test_stage.py stages a file of that form",
        "bin/slurm-sandbox": "the test is in a sandbox already, which tests/slurm/conftest.py started by the same commands",
    },
}
"""By page: how lines begin that are not run, and why."""

PART = re.compile(r"(?:^`([~\w./-]+)`\n\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block; with the path of a file where one stands before it."""

    name: str
    language: str
    text: str


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page in their order."""
    return [Block(*found) for found in PART.findall((REPO / page).read_text(encoding="utf-8"))]


def commands(page: str) -> list[str]:
    """Return the lines of a page that are typed into a shell."""
    typed = "".join(block.text for block in blocks(page) if block.language == "bash" and not block.name)
    return [line for line in typed.splitlines() if line]


def why_not(page: str, line: str) -> str:
    """Return why a line is not run here; empty if it is."""
    return next((why for begin, why in NOT_HERE.get(page, {}).items() if line.startswith(begin)), "")


def tools(folder: Path) -> str:
    """Return a PATH on which `autorl-hpc` is this checkout."""
    folder.mkdir(parents=True)
    for name, arguments in (("autorl-hpc", "-m autorl_hpc"), ("python3", ""), ("python", "")):
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def newcomer(folder: Path) -> dict[str, str]:
    """Return the environment of somebody who has never used the suite: an empty home, no variables of ours."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("AUTORL_", "HF_", "PIP_", "SLURM"))
    }
    (folder / "home").mkdir(parents=True)
    return {**kept, "PATH": tools(folder / "tools"), "PYTHONPATH": str(REPO), "HOME": str(folder / "home")}


IN_A_SHELL = 'cd "$1"; eval "$2"; pwd > "$3"; export -p > "$4"'


@dataclass
class Person:
    """Somebody at a shell, whose folder and variables last from line to line.

    Attributes:
        words: what is typed in place of a word of the page; a function is asked when the line is typed.
        after: what the test does once a line that begins so was typed.
        exits: exit codes other than 0 that lines which begin so may have here.
    """

    here: Path
    env: dict[str, str]
    words: Mapping[str, str | Callable[[], str]] = field(default_factory=dict)
    after: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    exits: Mapping[str, int] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)

    def here_for(self, text: str) -> str:
        """Return a line or file of the page with the words that stand for others here."""
        for word, other in self.words.items():
            if word in text:
                text = text.replace(word, other if isinstance(other, str) else other())
        return text

    def does(self, line: str) -> str:
        """Run a line; return its output, which is kept under the line."""
        typed = self.here_for(line)
        at, variables = Path(self.env["HOME"]).parent / ".at", Path(self.env["HOME"]).parent / ".variables"
        before = f". {shlex.quote(str(variables))}; " if variables.exists() else ""
        argv = ["bash", "-euo", "pipefail", "-c", before + IN_A_SHELL, "-", str(self.here), typed, str(at)]
        done = subprocess.run(
            [*argv, str(variables)],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=SLURM_PATIENCE_S,
            umask=0o027,  # of a group that shares its runs
            check=False,
        )
        allowed = {0, *(code for begin, code in self.exits.items() if line.startswith(begin))}
        assert done.returncode in allowed, f"{typed}\n{done.stdout}\n{done.stderr}"
        if done.returncode == 0:
            self.here = Path(at.read_text().strip())
        self.said[line] = done.stdout + done.stderr
        for begin, act in self.after.items():
            if line.startswith(begin):
                act()
        return self.said[line]

    def follows(self, page: str, *, until: str = "", since: str = "") -> None:
        """Type every command of a page and write its files, in order; those between two lines that begin so."""
        on = not since
        for name, language, text in blocks(page):
            if name:
                path = Path(name.replace("~", self.env["HOME"], 1)) if name.startswith("~") else self.here / name
                if on and not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(self.here_for(text), encoding="utf-8")
                continue
            if language != "bash":
                continue
            for line in filter(None, text.splitlines()):
                on = on or line.startswith(since)
                if until and line.startswith(until):
                    return
                if on and not why_not(page, line):
                    self.does(line)
