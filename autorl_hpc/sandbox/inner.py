"""The command that runs first inside: the forwarder's script, or the agent's own where nothing is to be forwarded."""

from __future__ import annotations

import json
from collections.abc import Sequence

from autorl_hpc.sandbox.plan import INSIDE, Plan
from autorl_hpc.states import Network


def inner_command(plan: Plan, command: Sequence[str], python: str) -> list[str]:
    """`command` behind inside.py, run by `python`, which must be there inside."""
    if plan.network is Network.OPEN or plan.socket_folder is None:
        return list(command)
    job = {"command": list(command), "ways": [(port, f"{INSIDE}/{name}") for port, name in plan.ways]}
    return [python, "-I", f"{INSIDE}-inside.py", json.dumps(job)]
