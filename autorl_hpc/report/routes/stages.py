"""Order observed facts by process (`processes_of`): stages of training, and the processes that a checkpoint comes from."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autorl_hpc.records.recorded import ObservedFact, ProcessSeen, TraceEvent
from autorl_hpc.report.routes.commands import commands_in
from autorl_hpc.states import Route

Commanded = ProcessSeen | TraceEvent  # A command line: of a process, or of a tool call in a trace


@dataclass
class Stage:
    """Optimizer steps of one trainer, or of a program's own loop (`trainer` empty)."""

    trainer: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    begin_s: float = -math.inf
    end_s: float = math.inf
    blocks: list[dict[str, Any]] = field(default_factory=list)
    route: Route = Route.UNKNOWN
    why: str = ""

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps; 0 if all had learning rate 0."""
        if not self.blocks:
            return whole(self.facts.get("steps"))
        idle = all(rates and not any(rates) for rates in (numbers(block.get("rates")) for block in self.blocks))
        return 0 if idle else sum(whole(block.get("count")) for block in self.blocks)

    @property
    def first(self) -> int:
        """Return the number of the process's first step in this stage."""
        return min((whole(b.get("first")) for b in self.blocks), default=0)

    @property
    def last(self) -> float:
        """Return the number of the process's last step in this stage; infinite if none was observed."""
        return max((whole(b.get("last")) for b in self.blocks), default=math.inf)


@dataclass
class ObservedProcess:
    """The facts of one process, in their order."""

    program: str
    elapsed_s: float
    facts: list[ObservedFact] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)

    def of(self, what: str) -> list[dict[str, Any]]:
        return [fact.facts for fact in self.facts if fact.what == what]

    def paths(self, what: str) -> list[str]:
        """Return the paths of models that were loaded or saved."""
        return list(dict.fromkeys(str(each["path"]) for each in self.of(what) if each.get("path")))


MAX_ORIGINS = 200  # bound on the steps back from a checkpoint


def numbers(value: object) -> list[float]:
    """Return the numbers of a list; empty for anything else."""
    return [float(v) for v in value if isinstance(v, (int, float))] if isinstance(value, list) else []


def whole(value: object) -> int:
    return int(value) if isinstance(value, (int, float)) and math.isfinite(value) and value > 0 else 0


def _time(value: object, default: float) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else default


def processes_of(facts: Iterable[ObservedFact]) -> list[ObservedProcess]:
    """Return the processes in the order of their first facts, without the further ranks of a distributed training."""
    found: dict[tuple[int, int], ObservedProcess] = {}
    done: list[ObservedProcess] = []
    for fact in facts:
        key = (fact.attempt, fact.pid)
        if key not in found or fact.what == "start":
            found[key] = ObservedProcess(fact.program, fact.elapsed_s)
            done.append(found[key])
        found[key].facts.append(fact)
    kept = [p for p in done if not any(whole(start.get("rank")) for start in p.of("start"))]
    for process in kept:
        process.stages = _stages(process)
    return kept


def _stages(process: ObservedProcess) -> list[Stage]:
    made: list[Stage] = []
    for fact in process.facts:
        name = str(fact.facts.get("name", ""))
        if fact.what != "trainer" or name.startswith("accelerate."):  # an own loop that uses accelerate
            continue
        if fact.facts.get("phase") == "ended" and made and made[-1].trainer == name and made[-1].end_s == math.inf:
            made[-1].end_s = _time(fact.at_s, math.inf)
            made[-1].facts |= {k: v for k, v in fact.facts.items() if v not in (None, {}, [])}
        else:
            made.append(Stage(name, dict(fact.facts), _time(fact.at_s, -math.inf)))
    own: dict[int, Stage] = {}
    for block in process.of("steps"):
        at_s = _time(block.get("from_s"), 0.0)
        last = next((n for n, s in reversed(list(enumerate(made))) if s.begin_s <= at_s), -1)
        inside = last >= 0 and at_s <= made[last].end_s
        (made[last] if inside else own.setdefault(last, Stage(begin_s=at_s))).blocks.append(block)
    return sorted([*made, *own.values()], key=lambda s: s.begin_s)


def steps_observed(observed: Sequence[ObservedFact]) -> int | None:
    """Return the optimizer steps of all processes, each distributed training once; None if none was observed."""
    return sum(stage.steps for process in processes_of(observed) for stage in process.stages) or None


def rows_observed(observed: Sequence[ObservedFact]) -> int | None:
    """Return the rows of the last training; None if its trainer told none."""
    trained = [stage for process in processes_of(observed) for stage in process.stages if stage.steps]
    return (whole(trained[-1].facts.get("rows")) or None) if trained else None


# --- from a checkpoint back to what it was made of


def same(path: str, other: str) -> bool:
    one, two = (posixpath.normpath(p).strip("/") for p in (path, other))
    return f"/{one}".endswith(f"/{two}") or f"/{two}".endswith(f"/{one}")


def ancestors(path: str, processes: Sequence[ObservedProcess], copies: Mapping[str, str]) -> list[ObservedProcess]:
    """Return the processes that made a checkpoint, the first one first; empty if nobody was seen to save it."""
    found, waiting, seen = set[int](), [(path, len(processes))], set[tuple[str, int]]()
    while waiting and len(seen) < MAX_ORIGINS:
        wanted, before = step = waiting.pop()
        makers = [n for n in range(before) if any(same(wanted, saved) for saved in processes[n].paths("saved"))]
        if step in seen or not makers:
            source = next((source for target, source in copies.items() if same(wanted, target)), None)
            waiting += [(source, before)] if source is not None and step not in seen else []
            seen.add(step)
            continue
        seen.add(step)
        place, maker = makers[-1], processes[makers[-1]]
        found.add(place)
        origins = [s.get("origin") for s in maker.of("saved") if same(wanted, str(s.get("path")))]
        origins += [*maker.paths("loaded"), *(stage.facts.get("model") for stage in maker.stages)]
        waiting += [(str(origin), place) for origin in dict.fromkeys(map(str, filter(None, origins)))]
    return [processes[place] for place in sorted(found)]


def copies_in(commands: Sequence[Commanded]) -> dict[str, str]:
    """Return targets and sources of `cp` and `mv` of folders."""
    found: dict[str, str] = {}
    for each in (one.command for line in commands for one in commands_in(line.command or "")):
        words = [word for word in each.args if not word.startswith("-")]
        if each.target in ("cp", "mv", "rsync") and len(words) == 2:
            found[words[1].rstrip("/")] = words[0].rstrip("/")
    return found


def averages(process: ObservedProcess) -> bool:
    """Return whether a process loaded several models, made no step and saved one."""
    whole = [m for m in process.of("loaded") if "Peft" not in str(m.get("class")) and m.get("path")]
    several = len({str(m["path"]) for m in whole}) > 1
    return several and bool(process.paths("saved")) and not any(s.steps for s in process.stages)


def shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
