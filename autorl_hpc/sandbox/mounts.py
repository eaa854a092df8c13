"""A plan as mounts in the order in which they are made: parents first, so that what lies deeper wins."""

from __future__ import annotations

import os
from typing import Literal, NamedTuple

from autorl_hpc.sandbox.plan import HOSTS_NAME, INSIDE, Plan, below, inside_script
from autorl_hpc.states import Network


class Step(NamedTuple):
    """One mount: `source` outside under `target` inside; an empty folder has no source; of a link the source is its text."""

    kind: Literal["readable", "writable", "empty", "link"]
    source: str
    target: str


def steps(plan: Plan) -> list[Step]:
    """The mounts of a plan. /proc, /dev and the root itself are the level's own."""
    made = [
        Step("link", os.readlink(path), path)
        if os.path.islink(path) and os.path.dirname(path) == "/"
        else Step("readable", path, path)
        for path in plan.readable
    ]
    shown = [step.target for step in made]
    for path in plan.hidden:
        if os.path.isdir(path) and _shown(path, shown):
            made.append(Step("empty", "", path))
    made += [Step("readable", "/dev/null", path) for path in plan.masked if _shown(path, shown)]
    made += [Step("writable", plan.workspace, plan.workspace), Step("writable", plan.tmp, "/tmp")]
    made += [Step("readable", source, target) for source, target in plan.placed]
    if plan.socket_folder is not None:
        made.append(Step("readable", plan.socket_folder, INSIDE))
        if plan.network is not Network.OPEN and os.path.isfile("/etc/hosts"):
            made.append(Step("readable", f"{plan.socket_folder}/{HOSTS_NAME}", "/etc/hosts"))
    made.append(Step("readable", inside_script(), f"{INSIDE}-inside.py"))
    order = {"readable": 0, "link": 0, "empty": 1, "writable": 2}
    return sorted(made, key=lambda step: (step.target.rstrip("/").count("/"), order[step.kind]))


def _shown(path: str, shown: list[str]) -> bool:
    return any(below(path, each) for each in shown)
