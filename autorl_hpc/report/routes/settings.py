"""Collect the key settings of a training as values (`settings`): observed, else logged, else literals of the code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autorl_hpc.records.recorded import ObservedFact, TrainingPoint
from autorl_hpc.report.format import clean
from autorl_hpc.report.routes.planned import Planned
from autorl_hpc.report.routes.stages import numbers, processes_of, shown
from autorl_hpc.report.routes.trainers import key_of
from autorl_hpc.report.story_records import RouteSource, Setting


def settings(observed: Sequence[ObservedFact], training: Sequence[TrainingPoint], plan: Planned) -> tuple[Setting, ...]:
    """Return the key settings of a window as values; the code's literals only for names that nothing else tells."""
    found: dict[tuple[str, str, str], RouteSource | None] = {}
    for process in processes_of(observed):
        where, given = f"process at {process.elapsed_s:.0f} s", dict[str, object]()
        for stage in process.stages:
            arguments = stage.facts.get("arguments")
            arguments = arguments if isinstance(arguments, Mapping) else {}
            given |= {k: v for k, v in arguments.items() if v not in (None, "")}
            rates = [rate for block in stage.blocks for rate in numbers(block.get("rates"))]
            if rates and not stage.trainer:
                given["learning_rate"] = max(rates)
        for facts in (*process.of("lora"), *({"seed": seed.get("value")} for seed in process.of("seed"))):
            given |= {name: value for name, value in facts.items() if value is not None}
        found |= {(k, shown(v), where): "observed" for k, v in given.items() if not isinstance(v, dict)}
    points = [p for p in training if p.learning_rate]
    if points and not any(name == "learning_rate" for name, _, _ in found):
        best = max(points, key=lambda p: p.learning_rate or 0.0)
        found[("learning_rate", shown(best.learning_rate), f"{best.source}, {best.elapsed_s:.0f} s")] = "logged"
    aliases = {"lr": "learning_rate"}
    known = {aliases.get(name, name) for name, _, _ in found}
    rest = [s for s in plan.settings if aliases.get(last := s.name.rsplit(".", 1)[-1], last) not in known]
    own = {key: (clean(key[1], 120) or "", clean(key[2], 200) or "") for key in found}
    made = [Setting(name=key[0], value=own[key][0], where=own[key][1], source=s) for key, s in found.items()]
    told = [(order, each) for each in (*made, *rest) if each.value and (order := key_of(each.name)) is not None]
    return tuple(each for _, each in sorted(told, key=lambda one: one[0]))
