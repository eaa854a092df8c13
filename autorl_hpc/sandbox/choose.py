"""Chooses the sandbox of an attempt: what is demanded, else the strongest level that works here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.records.experiment import SandboxSpec
from autorl_hpc.records.ledger import SandboxUsed
from autorl_hpc.sandbox.levels import LEVELS, Level
from autorl_hpc.sandbox.plan import Plan
from autorl_hpc.sandbox.probing import Findings, probe
from autorl_hpc.states import Fault, Network, SandboxLevel

AUTO = "auto"


@dataclass(frozen=True)
class Chosen:
    """The level that an agent runs in."""

    level: Level
    plan: Plan
    record: SandboxUsed


def choose(
    spec: SandboxSpec,
    plan: Plan,
    env: Mapping[str, str],
    *,
    wanted: Network,
    secret: Sequence[str] = (),
    programs: Sequence[str] = (),
    try_level: Callable[..., Findings] = probe,
) -> Chosen:
    """The sandbox for `plan`.

    Args:
        spec: what the experiment demands.
        wanted: the network where the spec names none: kept where a level can, left open at level none.

    Raises:
        AutorlError: what is demanded can't be had on this node.
    """
    network = spec.network or wanted
    refused: dict[str, str] = {}
    for level in LEVELS:
        if spec.level not in (AUTO, level.name) or (
            plan.image is not None and level.name is not SandboxLevel.APPTAINER
        ):
            continue
        open_anyway = level.name is SandboxLevel.NONE and spec.network is None
        candidate = plan.with_network(Network.OPEN if open_anyway else network)
        found = try_level(level, candidate, env, secret=secret, programs=programs)
        if not found.failures:
            record = SandboxUsed(
                level=level.name,
                network=candidate.network,
                holes=found.holes,
                start_s=found.start_s,
                refused=refused,
            )
            return Chosen(level, candidate, record)
        refused[level.name] = "; ".join(found.failures)[:500]
    demanded = (
        "an image" if plan.image else f"sandbox level {spec.level}" if spec.level != AUTO else f"network {network}"
    )
    raise AutorlError(
        f"{demanded} can't be had on this node: " + "; ".join(f"{name}: {why}" for name, why in refused.items()),
        fault=Fault.CLUSTER,
        next_step="see what this node can do: autorl-hpc doctor; or demand less in the experiment's `sandbox`",
        exit_code=Exit.ENVIRONMENT,
    )
