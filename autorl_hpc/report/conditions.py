"""What must be equal for two runs to be comparable (`comparables`, `cell_key`), and how two of them differ, in words.

All of it comes from what was requested (run.json) and from what the ledger says, never from a run's fate.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from autorl_hpc.records import canonical_json
from autorl_hpc.records.experiment import Budget
from autorl_hpc.records.run import Science
from autorl_hpc.report import format as fmt
from autorl_hpc.report.summary import UNTRIED, BoardRow, CellSummary, Comparable, Conditions, RunSummary

LIMITS = ("max_submissions", "gpu_hours", "tokens", "cost_usd", "memory_gib", "disk_gib", "processes")
"""Limits of a budget besides time: an agent with twice as many submissions has another budget."""

LEDGERED = ("network", "sandbox", "gpus", "gpu_model", "engine_hash")
"""Conditions that the ledger tells, if the run came so far. Where it doesn't, the run joins its like: it must not leave its agent's mean."""

Told = dict[str, str | None]  # what a run's ledger tells of LEDGERED

MAX_WORDS = 120  # longest settings of a driver in an agent's name

CellKey = tuple[str, str, str, str, str]
"""What identifies an agent within a group: agent, driver, mode, hash of the agent's files, settings of the driver."""


def limits_of(science: Science) -> dict[str, float]:
    """Return what was requested of a budget besides its time. What has its default is left out if runs had it before it was a field."""
    budget, plain = science.budget, Budget(wall_clock_s=science.budget.wall_clock_s)
    found = {name: float(value) for name in LIMITS if (value := getattr(budget, name)) is not None}
    found["given_back_at_most_s"] = budget.given_back_at_most_s
    for name, value, usual in (
        ("give_back_after_s", budget.give_back_after_s, plain.give_back_after_s),
        ("grace_s", budget.last_grace_s, plain.last_grace_s),
        ("reprompts", science.reprompts, 0),
        ("evaluate_script", science.evaluate_script, False),
    ):
        if value != usual:
            found[name] = float(value)
    return found


def driver_settings(science: Science) -> dict[str, str]:
    """Return the settings of a driver that were requested, each in words; empty without a driver."""
    told = {} if science.driver_spec is None else science.driver_spec.model_dump(mode="json")
    return {
        name: value if isinstance(value, str) else canonical_json(value).decode()
        for name, value in told.items()
        if value not in (None, {}, [])
    }


def cell_key(one: RunSummary | CellSummary | BoardRow) -> CellKey:
    """Return what identifies the agent of a run, cell or row within a group."""
    settings = "; ".join(f"{name} {value}" for name, value in sorted(one.driver_settings.items()))
    return one.agent, one.driver, one.mode, one.agent_hash, settings


def label(key: CellKey, keys: Sequence[CellKey]) -> str:
    """Return the name of a cell that tells it from all cells of `keys`: of agents or drivers of one name what differs, too."""
    agent, driver, mode, agent_hash, settings = key
    parts = [agent, *([driver] if driver != "none" else []), *([mode] if mode != "free" else [])]
    same = [other for other in keys if other[:3] == key[:3]]
    if any(other[3] != agent_hash for other in same):  # the agent's files changed between runs: two agents
        parts.append(agent_hash[:8])
    if any(other[4] != settings for other in same):
        shared = set.intersection(*(set(other[4].split("; ")) for other in same))
        own = "; ".join(one for one in settings.split("; ") if one not in shared)
        cut = f" {hashlib.sha256(own.encode()).hexdigest()[:8]}" if len(own) > MAX_WORDS else ""
        parts.append(f"{fmt.clean(own, MAX_WORDS) or 'the driver by default'}{cut}")
    return " · ".join(parts)


# --- comparable runs


def comparables(runs: Sequence[RunSummary]) -> list[Comparable]:
    """Return, for each run, what decides which runs it is compared with. What its ledger doesn't tell it takes from its
    like: of the otherwise equal runs those of its experiment, its agent's before others', the most frequent value; else
    that of its agent's in other experiments, or of all, if they all have the same. A kept base model fits every engine. A
    base model is known by its content; all of its names are listed."""
    keys = _with_one_name([_comparable(run) for run in runs])
    rest = [str([value for name, value in key if name not in LEDGERED]) for key in keys]
    told = [_told(run, key) for run, key in zip(runs, keys, strict=True)]
    homes = [(run.experiment, cell_key(run)) for run in runs]
    for name in LEDGERED:
        known: dict[str, Counter[tuple[Any, ...]]] = defaultdict(Counter)
        for home, same, one in zip(homes, rest, told, strict=True):
            if name in one:
                known[same][home, tuple(one.items())] += 1
        for home, same, one in zip(homes, rest, told, strict=True):
            if name not in one and (like := _of_like(name, home, one, known[same])) is not None:
                one[name] = like[0]
    return [key.model_copy(update=one) for key, one in zip(keys, told, strict=True)]


def _with_one_name(keys: Sequence[Comparable]) -> list[Comparable]:
    """Give all runs of one base model the same name; of imported runs, whose content nobody told, the name is the model."""
    names: dict[Any, set[str]] = defaultdict(set)
    content = [(k.base_model_content_hash, k.base_model_prompting_hash, k.imported and k.base_model) for k in keys]
    for known, key in zip(content, keys, strict=True):
        names[known].add(key.base_model)
    found = (" = ".join(sorted(names[known])) for known in content)
    return [key.model_copy(update={"base_model": name}) for key, name in zip(keys, found, strict=True)]


def _comparable(run: RunSummary) -> Comparable:
    same = {name: getattr(run, name) for name in Comparable.model_fields.keys() & RunSummary.model_fields.keys()}
    if weakened(run):  # the first attempt's: how a run went on must not move it to another leaderboard
        same |= {"sandbox": str(run.sandboxes[0].level), "network": str(run.sandboxes[0].network)}
    if (
        run.imported is not None
    ):  # how it was measured is unknown: two folders don't compare, nor two scores of the base model
        base = run.baseline_report
        same["imported"] = run.imported if run.site is None else f"{run.imported}, {run.site}"
        same["base_score"] = None if base is None else base.score
    return Comparable(**same)


def weakened(run: RunSummary) -> bool:
    """Return whether a later attempt had another sandbox or network than the first: such a run doesn't rank, nor its agent."""
    return len({(one.level, one.network) for one in run.sandboxes}) > 1


def _told(run: RunSummary, key: Comparable) -> Told:
    unknown = {"network", "sandbox"} if run.sandbox == UNTRIED else set()
    unknown |= {"gpus"} if key.gpus is None else set()
    unknown |= {"gpu_model"} if key.gpu_model is None and key.gpus != "0" else set()
    kept = run.improvement is not None and run.improvement.how == "base_kept"
    unknown |= {"engine_hash"} if kept or key.engine_hash is None else set()
    return {name: getattr(key, name) for name in LEDGERED if name not in unknown}


def _of_like(name: str, home: Any, one: Told, known: Counter[tuple[Any, ...]]) -> tuple[str | None] | None:
    """Return the value of one condition that a run's like have; None if there is no like, or none that agree."""
    found = [Counter[str | None]() for _ in range(4)]
    for (other, values), count in known.items():
        value = dict(values)
        if all(value.get(each, mine) == mine for each, mine in one.items()):
            near = 0 if other == home else 1 if other[0] == home[0] else 2 if other[1] == home[1] else 3
            found[near][value[name]] += count
    for near, values in enumerate(found):
        if values and (near < 2 or len(values) == 1):
            return (max(sorted(values, key=str), key=lambda value: values[value]),)
    return None


# --- in words

NAMES = {
    **{"imported": "where it comes from", "base_model_content_hash": "content of the base model"},
    **{"base_model_prompting_hash": "prompts of the base model", "environment_hash": "training environment"},
    **{"gpu_model": "GPU model", "gpus": "GPUs", "engine_hash": "engine", "recipe_hash": "recipe"},
    **{"split_hashes": "items", "budget_s": "budget", "base_score": "base score"},
}
"""What a condition is called, where its field's name is no word."""

LIMIT_NAMES = {
    **{"gpu_hours": "GPU-hours", "tokens": "tokens", "cost_usd": "USD", "max_submissions": "submissions"},
    **{"memory_gib": "GiB of memory", "disk_gib": "GiB of disk", "processes": "processes"},
    **{"reprompts": "starts again after an early end", "evaluate_script": "script that scores checkpoints"},
}
TIME_NAMES = {
    "given_back_at_most_s": "given back at most",
    "give_back_after_s": "given back after a wait of",
    "grace_s": "grace after the budget",
}


def _limit(name: str, value: float | None) -> str:
    if name in TIME_NAMES:
        return f"{TIME_NAMES[name]} {'by default' if value is None else fmt.duration(value)}"
    if value is None:
        return (
            f"no {LIMIT_NAMES[name]}"
            if name in ("reprompts", "evaluate_script")
            else f"no limit of {LIMIT_NAMES[name]}"
        )
    number = fmt.amount("count", value).replace(".0 ", " ") if name == "tokens" else f"{value:,.10g}"
    return f"{number} {LIMIT_NAMES[name]}"


def conditions_told(c: Conditions) -> str:
    """Return all conditions in words, limits of the budget as `24 GPU-hours, 20 M tokens, 60 USD`."""
    names = [name for name in (*LIMIT_NAMES, "give_back_after_s", "grace_s") if name in c.limits]
    limits = ", ".join(_limit(name, c.limits[name]) for name in names)
    parts = [
        c.base_model,
        f"budget {fmt.duration(c.budget_s)}{', ' * bool(limits)}{limits}",
        fmt.gpus(c.gpus, c.gpu_model),
    ]
    parts += [f"protocol {c.protocol}", f"network {c.network}", f"sandbox {c.sandbox}"]
    parts += [f"engine {fmt.short_hash(c.engine_hash)}"]
    parts += [] if c.environment_hash is None else [f"environment {fmt.short_hash(c.environment_hash)}"]
    return " · ".join(parts)


def unlike(a: Conditions, b: Conditions) -> list[tuple[str, str, str]]:
    """Return every condition that differs: its name and both values, in words."""
    found = []
    for name in type(a).model_fields:
        mine, its = getattr(a, name), getattr(b, name)
        if mine == its:
            continue
        if name == "limits":
            every = [each for each in (*LIMIT_NAMES, *TIME_NAMES) if mine.get(each) != its.get(each)]
            for each in every:
                called = "further starts" if each == "reprompts" else each.removesuffix("_s").replace("_", " ")
                found.append((called, _limit(each, mine.get(each)), _limit(each, its.get(each))))
        else:
            found.append((NAMES.get(name, name.replace("_", " ")), _value(name, mine), _value(name, its)))
    return found


def _value(name: str, value: Any) -> str:
    if value is None:
        return {"environment_hash": "the suite's own", "imported": "our own"}.get(name, "unknown")
    if name == "budget_s":
        return fmt.duration(value)
    if isinstance(value, dict):
        return " ".join(f"{each} {fmt.short_hash(one)}" for each, one in sorted(value.items()))
    return fmt.short_hash(value) if name.endswith("_hash") else fmt.clean(str(value)) or ""
