"""The programs of agents on this host: most people have some of them, so one that is not here is no problem yet."""

from __future__ import annotations

from functools import partial

from autorl_hpc.agents import agent_names, load_agent
from autorl_hpc.agents.checks import PROGRAM_LIMIT_S, Looked, has_checks, look
from autorl_hpc.agents.where import SETUP_LIMIT_S, Where, where_agents_run
from autorl_hpc.doctor.finding import Check, Finding, examine, note, ok, warning
from autorl_hpc.errors import AutorlError
from autorl_hpc.records.cluster import ClusterProfile

GROUP = "Agents"


def everything(profile: ClusterProfile | None) -> list[Finding]:
    """One finding or more for each agent that has a program."""
    where: list[Where] = []

    def jobs() -> Finding:
        where.append(where_agents_run(profile))
        if where[0].doubt:
            return warning("PATH of jobs", where[0].doubt, "agents are looked for on this host's PATH", "correct them")
        return ok("PATH of jobs", where[0].path)

    found = examine(GROUP, [Check("PATH of jobs", jobs, SETUP_LIMIT_S + 5)])
    if not where:
        return found
    return found + examine(
        GROUP, [Check(name, partial(_one, name, where[0]), 2 * PROGRAM_LIMIT_S + 5) for name in agent_names()]
    )


def _one(name: str, where: Where) -> list[Finding]:
    try:
        agent = load_agent(name)
    except AutorlError as error:
        return [warning(name, error.what, "an experiment with it can't be launched", error.next_step or "")]
    return [_finding(looked) for looked in look(agent, where)] if has_checks(agent.file) else []


def _finding(looked: Looked) -> Finding:
    if looked.state == "ok":
        return ok(looked.agent, looked.value)
    if looked.state == "note":
        return note(looked.agent, looked.value, "it may work", looked.do_this)
    return note(looked.agent, looked.value, "an experiment with it is refused", looked.do_this)
