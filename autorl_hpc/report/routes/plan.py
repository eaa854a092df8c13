"""The planned route of one revision of an agent's code."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from autorl_hpc.report.format import clean
from autorl_hpc.report.routes import configs
from autorl_hpc.report.routes.commands import seen
from autorl_hpc.report.routes.decide import Decision, decided
from autorl_hpc.report.routes.events import Event
from autorl_hpc.report.routes.follow import Follower, followed
from autorl_hpc.report.routes.reading import Source, sources
from autorl_hpc.report.routes.told import Planned
from autorl_hpc.report.story_records import EvidenceLine
from autorl_hpc.states import Route

MAX_ENTRY_POINTS = 200
"""Command lines looked at, the last ones: a run has thousands of processes and few scripts."""

MAX_ALTERNATIVES = 6

_LAST = "last followed"
"""Key of a caller's cache; all others are digests."""


def planned(
    files: Mapping[str, str | bytes],
    entry_points: Sequence[str] = (),
    cache: MutableMapping[str, Any] | None = None,
) -> Planned:
    """The route that the code in `files` plans, following `entry_points` where they are of this code.

    `files`: text by path. Never raises for what stands in them. The same input gives the same answer.
    """
    known, notes = sources(files, cache)
    follower = follow(known, entry_points, cache)
    decision = decided(follower.events, ordered=not follower.guessed)
    if decision.route is Route.NONE and not decision.events:
        decision = _by_configs(known, follower) or decision
    return Planned(
        route=decision.route,
        evidence=_evidence(decision),
        confidence=round(decision.confidence, 2),
        alternatives=tuple(dict.fromkeys(decision.alternatives))[:MAX_ALTERNATIVES],
        scripts=tuple(follower.used),
        notes=(*decision.notes, *follower.notes, *notes),
    )


def follow(
    known: Mapping[str, Source], entry_points: Sequence[str], cache: MutableMapping[str, Any] | None = None
) -> Follower:
    """The code followed from command lines that were seen. The last answer is kept: settings are asked for after the route."""
    chosen = list(dict.fromkeys(entry_points))[-MAX_ENTRY_POINTS:]
    question = (tuple(source.digest for source in known.values()), tuple(chosen))
    kept = cache.get(_LAST) if cache is not None else None
    if isinstance(kept, tuple) and kept[0] == question and isinstance(kept[1], Follower):
        return kept[1]
    follower = followed(known, [seen(line) for line in chosen])
    if cache is not None:
        cache[_LAST] = (question, follower)
    return follower


def _by_configs(known: Mapping[str, Source], follower: Follower) -> Decision | None:
    """What trainers' configurations ask for, where no script runs anything."""
    for path, source in known.items():
        if path.endswith((".yaml", ".yml", ".json", ".toml")):
            asked = configs.asked(configs.items(source.text, path))
            if asked is not None and asked.route is not None:
                follower.used.setdefault(path)
                event = Event(
                    "train", path, asked.line, source.line(asked.line), asked.route, f"configuration of {asked.trainer}"
                )
                return Decision(asked.route, [event], 0.4, notes=["a configuration only: nothing in the code runs it"])
    return None


def _evidence(decision: Decision) -> tuple[EvidenceLine, ...]:
    lines = []
    for event in decision.events:
        says = clean(event.says, 200) or ""
        where = f"{event.path}:{event.line}" if event.line else event.path
        lines.append(
            EvidenceLine(where=clean(where, 200) or "", says=f"{says} [{clean(event.why, 150)}]" if event.why else says)
        )
        lines += [
            EvidenceLine(where=clean(tag, 200) or "", says="its samples") for tag in sorted(event.tags) if ":" in tag
        ]
    return tuple(lines)
