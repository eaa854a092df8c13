"""Runs many programs at once, each in a checker of its own, confined by what works on this host."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.scoring.programs.crew import GRACE_S, Crew
from autorl_hpc.scoring.programs.limits import Isolation, Limits, Program, Verdict
from autorl_hpc.scoring.programs.probe import isolation
from autorl_hpc.states import Fault


def run_programs(
    programs: Sequence[Program],
    *,
    workers: int = 2,
    limits: Limits = Limits(),  # noqa: B008  frozen
    layers: Sequence[str] | None = None,
    unconfined: bool = False,
) -> list[Verdict]:
    """Runs each program against its test, `workers` at once, and says what became of it, in order.

    Args:
        workers: at most; never more than this process may use cores.
        layers: put on these instead of all that work here.
        unconfined: run them even where they could write the files of this process's user.

    Raises:
        AutorlError: this host can't confine them, a checker can't be started, or a test is defective.
    """
    found = isolation() if layers is None else Isolation(tuple(layers), frozenset())
    if "write" in found.open_to and not unconfined:
        raise AutorlError(
            "this host has nothing that keeps a model's programs from writing its user's files: no user namespaces, no "
            "Landlock, no seccomp filters",
            fault=Fault.CLUSTER,
            next_step="grade on nodes with a newer kernel, or set the option `unconfined: true` in the recipe",
            exit_code=Exit.ENVIRONMENT,
        )
    with Crew(limits) as crew:
        return crew.run(programs, found, _at_once(workers))


def longest_s(programs: int, workers: int, limits: Limits) -> float:
    """How long `run_programs` may take with programs that use all of their time. Finding out what confines them here, at first, takes
    seconds."""
    return math.ceil(programs / _at_once(workers)) * (limits.wall_s + GRACE_S)


def _at_once(workers: int) -> int:
    return max(1, min(workers, len(os.sched_getaffinity(0))))
