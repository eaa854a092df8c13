"""Agents' programs: from npm, installed once into a folder beside the tests, or where a variable says that they are."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import needs

from autorl_hpc.agents import load_agent

PACKAGES = {"claude-code": "@anthropic-ai/claude-code", "codex": "@openai/codex"}
CACHE = Path(__file__).resolve().parent / ".cache"
INSTALL_LIMIT_S = 300
ELSEWHERE = {"openhands": "AUTORL_TEST_OPENHANDS"}
"""Agents that are too large to install for a test (openhands: 230 packages), by the variable that names the folder of the program."""


def readable(agent: str) -> list[str]:
    """What a sandbox must show for its program: the virtual environment and the Python below it, which may lie in a home."""
    if agent not in ELSEWHERE:
        return []
    venv = folder_of(agent).parent
    return [str(venv), str((venv / "bin" / "python").resolve().parents[1])]


def folder_of(agent: str) -> Path:
    """The folder that holds an agent's program. Skips where it can't be had."""
    if agent not in ELSEWHERE:
        return installed() / "bin"
    given = os.environ.get(ELSEWHERE[agent])
    if not given:
        needs.skip(
            "npm", f"{agent} is not here: install it into a venv of its own, and name its bin in ${ELSEWHERE[agent]}"
        )
    return Path(given)


def installed(names: tuple[str, ...] = tuple(PACKAGES), which: int = 0) -> Path:
    """The npm prefix that holds these agents' programs, in the versions `which` of their definitions. Skips without npm or network.

    $AUTORL_TEST_AGENTS names a prefix where they stand already.
    """
    if given := os.environ.get("AUTORL_TEST_AGENTS"):
        return Path(given)
    if shutil.which("npm") is None:
        needs.skip("npm", "npm is not here: the programs of claude-code and codex can't be installed")
    wanted = [f"{PACKAGES[name]}@{load_agent(name).file.versions[which]}" for name in names]
    prefix = CACHE / "-".join(sorted(f"{name}-{load_agent(name).file.versions[which]}" for name in names))
    if not prefix.is_dir():
        new = prefix.with_name(f"{prefix.name}.{os.getpid()}")
        _npm("install", "--global", "--prefix", str(new), "--no-audit", "--no-fund", *wanted)
        # npm 11.19 runs no install scripts unasked; this one puts the program of this platform in its place.
        subprocess.run(
            ["node", "install.cjs"],
            cwd=new / "lib" / "node_modules" / PACKAGES["claude-code"],
            check=True,
            capture_output=True,
            timeout=INSTALL_LIMIT_S,
        )
        try:
            new.rename(prefix)
        except OSError:  # another worker was first
            shutil.rmtree(new)
    return prefix


def _npm(*arguments: str) -> None:
    try:
        done = subprocess.run(["npm", *arguments], capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        needs.skip("npm", f"npm did not install the agents' programs within {INSTALL_LIMIT_S} s")
    if done.returncode != 0:
        needs.skip("npm", f"npm can't install the agents' programs here: {done.stderr[-300:]}")
