"""Starts benchmarks/lib/gpubench/reference.py, a program of its own, and reads what it tells line by line into a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpubench.figures import Figures
from gpubench.usage import wait_until_free
from gpubench.world import REPO, World

PROGRAM = Path(__file__).with_name("reference.py")


@dataclass
class Started:
    """One process of the reference's way.

    Attributes:
        wall_s: from its start to its end; None: it failed or was ended.
        parts: seconds of its parts, by name.
        told: of each job its lines, in the order given.
    """

    wall_s: float | None = None
    parts: dict[str, Any] = field(default_factory=dict)
    told: list[list[dict[str, Any]]] = field(default_factory=list)
    problem: str | None = None


def start(world: World, figures: Figures, name: str, jobs: list[dict[str, Any]]) -> Started:
    """Runs the jobs, which are of one dtype, in one process with one engine."""
    options = world.options
    given, told, log = (options.work / f"{name}.{kind}" for kind in ("json", "told", "log"))
    given.write_text(
        json.dumps(
            {
                "backend": options.reference,
                "device": options.device,
                "model": str(world.base),
                "dtype": jobs[0]["dtype"],
                "jobs": jobs,
                "told": str(told),
            }
        )
    )
    path = os.pathsep.join(part for part in (str(REPO), os.environ.get("PYTHONPATH", "")) if part)
    found = Started()
    free = wait_until_free()
    memory = "" if free is None else f", {100 * free:.0f} % of the GPU's memory is free"
    figures.say(f"starting the reference's way: {name}{memory}")
    with open(log, "wb") as out:
        started = time.monotonic()
        process = subprocess.Popen(
            [_python(options.reference), str(PROGRAM), str(given)],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(options.reference_limit_s)
            wall = time.monotonic() - started
            if code == 0:
                found.wall_s = wall
            else:
                found.problem = f"exit code {code}: {_last_words(log)}"
        except subprocess.TimeoutExpired:
            found.problem = f"ended after {options.reference_limit_s:g} s"
        finally:
            try:  # its children too: what is left of an engine would hold the GPU's memory
                os.killpg(process.pid, signal.SIGKILL)
            except OSError:
                pass
            process.wait()
    found.told = [[] for _ in jobs]
    for line in _lines(told):
        if line["job"] is None:
            found.parts[line["event"]] = line["seconds"]
        else:
            found.told[line["job"]].append(line)
    if found.problem:
        figures.say(f"{name}: {found.problem}")
    return found


def _python(backend: str) -> str:
    """The one beside `$AUTORL_VLLM`, where vLLM lives apart; else this one."""
    program = os.environ.get("AUTORL_VLLM")
    return str(Path(program).with_name("python")) if program and backend == "vllm" else sys.executable


def _lines(path: Path) -> list[dict[str, Any]]:
    """What was told; a line that was cut off is left out."""
    found: list[dict[str, Any]] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-3:])[:600]
