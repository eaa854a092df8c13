"""Tell a person that an experiment finished, failed or is stuck, as `~/.config/autorl-hpc/notify.yaml` says.

That file is the user's own: nothing of a bundle, an experiment or an agent's folder can name a command or an address.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import field_validator

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import atomic
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.reading import read_yaml
from autorl_hpc.records.base import Record, parse_record

Event = Literal["finished", "failed", "stuck"]

FILE = Path("~/.config/autorl-hpc/notify.yaml")
TOLD = "notified"  # folder of the experiment: one empty file per event that was told
LIMIT_S = 60


class NotifyFile(Record):
    """~/.config/autorl-hpc/notify.yaml. A field that is left out tells nobody."""

    on: tuple[Event, ...] = ("finished", "failed", "stuck")
    command: tuple[str, ...] = ()  # gets the message on standard input, and AUTORL_EVENT, AUTORL_EXPERIMENT
    mail: str | None = None  # an address, for the program `mail`
    webhook: str | None = (
        None  # https; gets JSON with `text`, `event`, `experiment`. The address is a secret and never printed
    )

    @field_validator("mail")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None and (value.startswith("-") or "@" not in value or any(c.isspace() for c in value)):
            raise ValueError("give one address")
        return value

    @field_validator("webhook")
    @classmethod
    def _https(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith("https://"):
            raise ValueError("give an address that begins with https://")
        return value


def read_file() -> NotifyFile | None:
    """Return what the user's file says, None if there is none. Raises AutorlError: it is wrong, or others may write it."""
    path = FILE.expanduser()
    try:
        info = path.stat()
    except FileNotFoundError:
        return None
    if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise AutorlError("others may write this file", where=path, next_step=f"chmod 600 {path}")
    return parse_record(NotifyFile, read_yaml(path), path, next_step="see docs/clusters.md, Notifications")


def after_job(experiment: ExperimentDir) -> None:
    """Tell what has come of the experiment, once for each event. Called when a grader's or the report's job ends; never raises."""
    try:
        found = event_of(experiment)
        asked = read_file() if found is not None else None
        if found is None or asked is None or found[0] not in asked.on:
            return
        event, text = found
        mark = experiment.path / TOLD / event
        if mark.exists():
            return
        failed = send(asked, event, experiment.path.name, text)
        if failed:
            print(f"notify: not told by {', '.join(failed)}", flush=True)
        if len(failed) < len(ways(asked)):
            mark.parent.mkdir(exist_ok=True)
            atomic.publish_bytes(mark, b"")
    except Exception as error:
        print(f"notify: {type(error).__name__}: nobody was told", flush=True)  # not its words: an address is in some


def event_of(experiment: ExperimentDir) -> tuple[Event, str] | None:
    """Return what is worth telling of an experiment, in words; None: it goes on."""
    from autorl_hpc.report.status import collect, nobody_grades

    name = experiment.path.name
    stuck = nobody_grades(experiment, ask=True)  # what the watcher saw last ended with this job's grader
    if stuck is not None:
        return "stuck", f"{name}: {stuck}"
    runs = [run for one in collect([experiment.path]) for run in one["runs"]]
    if not runs or any(run["state"] not in ("finished", "damaged") for run in runs):
        return None
    lost = [run["run_id"] for run in runs if run["state"] == "damaged" or run.get("fault") in ("cluster", "grader")]
    if lost:
        return "failed", f"{name}: {len(lost)} of {len(runs)} runs were lost: {', '.join(lost[:5])}"
    return "finished", f"{name}: {len(runs)} runs are finished; the report: {experiment.report / 'index.html'}"


def ways(asked: NotifyFile) -> dict[str, Callable[[Event, str, str], object]]:
    """Return the ways that the file names; each is called with event, experiment and text, and raises if it does not take it."""
    found: dict[str, Callable[[Event, str, str], object]] = {}
    if asked.command:
        found["command"] = lambda event, experiment, text: subprocess.run(
            asked.command,
            input=text,
            text=True,
            env={**os.environ, "AUTORL_EVENT": event, "AUTORL_EXPERIMENT": experiment},
            timeout=LIMIT_S,
            check=True,
        )
    if (address := asked.mail) is not None:
        found["mail"] = lambda event, experiment, text: subprocess.run(
            ["mail", "-s", f"autorl-hpc: {experiment} {event}", address],
            input=text + "\n",
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
    if (hook := asked.webhook) is not None:
        found["webhook"] = lambda event, experiment, text: urllib.request.urlopen(
            urllib.request.Request(
                hook,
                json.dumps({"text": text, "event": event, "experiment": experiment}).encode(),
                {"Content-Type": "application/json"},
            ),
            timeout=LIMIT_S,
        ).close()
    return found


def send(asked: NotifyFile, event: Event, experiment: str, text: str) -> list[str]:
    """Send one message by every way that the file names; return the ways that did not take it, each with the kind of its error, whose
    words may hold an address."""
    failed: list[str] = []
    for way, tell in ways(asked).items():
        try:
            tell(event, experiment, text)
        except Exception as error:
            failed.append(f"{way} ({type(error).__name__})")
    return failed


def notify(
    event: Annotated[str, typer.Argument(help="finished, failed or stuck.")] = "finished",
) -> None:
    """Send a test message by the ways of ~/.config/autorl-hpc/notify.yaml.

    Example: autorl-hpc notify stuck
    """
    asked = read_file()
    if asked is None:
        what = "there is no such file: nobody is told anything"
        raise AutorlError(what, where=FILE, next_step="see docs/clusters.md, Notifications", exit_code=Exit.USAGE)
    if event not in ("finished", "failed", "stuck"):
        raise typer.BadParameter("finished, failed or stuck")
    failed = send(asked, event, "test", f"a test of `autorl-hpc notify {event}`")  # type: ignore[arg-type]
    if failed:
        raise AutorlError(
            f"not told by {', '.join(failed)}", where=FILE, next_step="correct that line", exit_code=Exit.FAILED
        )
