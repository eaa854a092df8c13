"""The engine of an experiment's graders, looked for before anything is queued."""

from __future__ import annotations

from pathlib import Path

from autorl_hpc.agents.where import where_agents_run
from autorl_hpc.cluster.vllm import Seen, look_for_engine
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.records.cluster import ClusterProfile
from autorl_hpc.records.experiment import ExperimentSpec
from autorl_hpc.states import Fault


def look_at_engine(spec: ExperimentSpec, profile: ClusterProfile | None) -> Seen | None:
    """What there is to know; None where graders need nothing but this package's own environment."""
    if spec.grader.engine != "vllm":
        return None
    where = where_agents_run(profile)
    return look_for_engine(profile, where.environ, where.doubt)


def refuse_without_engine(seen: Seen | None, where: Path) -> None:
    """Raises:
    AutorlError: no grader would start.
    """
    if seen is not None and seen.state == "problem":
        raise AutorlError(
            f"field `grader.engine`: `vllm` can't start: {seen.value}",
            where=where,
            fault=Fault.CLUSTER,
            next_step=f"{seen.do_this}; or add --unchecked, if it is on the nodes and not here",
            exit_code=Exit.ENVIRONMENT,
        )


def lines(seen: Seen | None) -> list[str]:
    """For people."""
    if seen is None:
        return []
    sign = "PROBLEM" if seen.state == "problem" else seen.state
    return [f"engine vllm: {sign}: {seen.value}" + (f" ({seen.do_this})" if seen.do_this else "")]
