"""vLLM for graders: most experiments do without, so one that is not here is no problem yet."""

from __future__ import annotations

from functools import partial

from autorl_hpc.agents.where import SETUP_LIMIT_S, where_agents_run
from autorl_hpc.cluster.vllm import PYTHON_LIMIT_S, look_for_engine
from autorl_hpc.doctor.finding import Check, Finding, examine, note, ok
from autorl_hpc.records.cluster import ClusterProfile

GROUP = "Graders"


def everything(profile: ClusterProfile | None) -> list[Finding]:
    """One finding."""
    return examine(GROUP, [Check("vLLM", partial(_one, profile), SETUP_LIMIT_S + 2 * PYTHON_LIMIT_S + 5)])


def _one(profile: ClusterProfile | None) -> Finding:
    where = where_agents_run(profile)
    seen = look_for_engine(profile, where.environ, where.doubt)
    if seen.state == "ok":
        return ok("vLLM", seen.value)
    so_what = "an experiment with `grader: {engine: vllm}` " + (
        "is refused" if seen.state == "problem" else "may find none"
    )
    return note("vLLM", seen.value, so_what, seen.do_this)
