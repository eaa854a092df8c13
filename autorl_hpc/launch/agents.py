"""The agents of an experiment before anything is queued: do they have the driver they need, and are their programs here?"""

from __future__ import annotations

from collections.abc import Sequence

from autorl_hpc.agents import load_agent
from autorl_hpc.agents.checks import Looked, look
from autorl_hpc.agents.where import where_agents_run
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.environments import VENV
from autorl_hpc.files.layout import Root
from autorl_hpc.launch.expand import Cell
from autorl_hpc.records.cluster import ClusterProfile
from autorl_hpc.records.driver import NO_DRIVER
from autorl_hpc.records.experiment import ExperimentSpec
from autorl_hpc.states import Fault


def idle_drivers(cells: Sequence[Cell]) -> list[Looked]:
    """Agents that are given a driver and call none."""
    pairs = sorted({(cell.science.agent, cell.science.driver) for cell in cells})
    return [
        Looked(agent, "note", f"it calls no driver, so its runs with {driver} differ from those with none in name only",
               f"exclude: [{{agent: {agent}, driver: {driver}}}]")
        for agent, driver in pairs
        if driver != NO_DRIVER and load_agent(agent).file.driver is None
    ]  # fmt: skip


def look_at_agents(
    root: Root, spec: ExperimentSpec, cells: Sequence[Cell], profile: ClusterProfile | None
) -> list[Looked]:
    """What there is to know about the agents of an experiment, programs run to learn it; nothing is raised."""
    environment = cells[0].environment  # one for all
    image = environment is not None and environment.kind == "image"
    venv = None if environment is None or image else root.environment(environment.name, environment.content_hash) / VENV
    where = where_agents_run(profile, spec.sandbox.readable, level=spec.sandbox.level, image=image, venv=venv)
    found = idle_drivers(cells)
    for name in spec.matrix.agent:
        found += look(load_agent(name), where)
    return found


def refuse_problems(found: Sequence[Looked]) -> None:
    """Raises:
    AutorlError: the first problem.
    """
    for looked in found:
        if looked.state == "problem":
            raise AutorlError(
                f"agent {looked.agent} can't run: {looked.value}",
                where=load_agent(looked.agent).folder,
                fault=Fault.CLUSTER,
                next_step=f"{looked.do_this}; or add --unchecked, if it is on the nodes and not here",
                exit_code=Exit.ENVIRONMENT,
            )


def lines(found: Sequence[Looked]) -> list[str]:
    """For people."""
    signs = {"ok": "ok", "note": "note", "problem": "PROBLEM"}
    return [
        f"agent {looked.agent}: {signs[looked.state]}: {looked.value}"
        + (f" ({looked.do_this})" if looked.do_this else "")
        for looked in found
    ]
