"""What others found in an agent's code and logs, made fit to be shown: cleaned, masked, bounded, held-out items hidden."""

from __future__ import annotations

from collections.abc import Sequence

from autorl_hpc.files.masking import masked
from autorl_hpc.report.hiding import NOTHING, Hidden
from autorl_hpc.report.routes import Executed, Planned
from autorl_hpc.report.story import EvidenceLine, Failure, RouteTold, Setting
from autorl_hpc.report.text import clean, clean_code

MAX_LINES = 8
MAX_NAMED = 2
"""Lines of evidence in a sentence."""

MAX_SAYS_CHARS = 240
MAX_WHERE_CHARS = 160
MAX_SETTINGS = 30
MAX_VALUE_CHARS = 120


def shown_lines(lines: Sequence[EvidenceLine], hidden: Hidden = NOTHING) -> tuple[EvidenceLine, ...]:
    """Evidence for people, without what `hidden` says."""
    distinct = list(dict.fromkeys(lines))[:MAX_LINES] if len(lines) > 1 else lines
    return tuple(_shown(line, hidden) for line in distinct)


def _shown(line: EvidenceLine, hidden: Hidden) -> EvidenceLine:
    where = clean(masked(hidden.place(line.where)), MAX_WHERE_CHARS) or ""
    says = hidden.instead(line.where) or clean_code(masked(line.says).strip(), MAX_SAYS_CHARS)
    return line if where == line.where and says == line.says else EvidenceLine(where=where, says=says)


def shown_route(plan: Planned, done: Executed, hidden: Hidden = NOTHING) -> RouteTold:
    """What code planned beside what was executed, for people."""
    by_code, by_logs = shown_lines(plan.evidence, hidden), shown_lines(done.evidence, hidden)
    disputed = None
    if done.disputed:
        disputed = f"by code {plan.route} ({_first(by_code)}), by logs {done.route} ({_first(by_logs)})"
    return RouteTold(
        planned=plan.route, executed=done.route, planned_by=by_code, executed_by=by_logs, disputed=disputed
    )


def _first(lines: Sequence[EvidenceLine]) -> str:
    return "; ".join(f"{line.where}: {line.says}" for line in lines[:MAX_NAMED]) or "no line to show"


def shown_failure(failure: Failure | None, hidden: Hidden = NOTHING) -> Failure | None:
    """A failure with its evidence made fit to be shown."""
    if failure is None:
        return None
    return Failure(kind=failure.kind, evidence=shown_lines(failure.evidence, hidden))


def shown_settings(settings: Sequence[Setting], hidden: Hidden = NOTHING) -> tuple[Setting, ...]:
    """Settings for people."""
    return tuple(
        Setting(
            name=clean(one.name, MAX_VALUE_CHARS) or "",
            value=_value(one, hidden),
            where=clean(masked(hidden.place(one.where)), MAX_WHERE_CHARS) or "",
        )
        for one in settings[:MAX_SETTINGS]
    )


def _value(setting: Setting, hidden: Hidden) -> str:
    """Masked with its name: `api_key` tells what `value` alone doesn't."""
    shown = masked(f"{setting.name}={setting.value}").removeprefix(f"{setting.name}=")
    return hidden.value(clean(shown, MAX_VALUE_CHARS) or "", setting.where)
