"""What others found in an agent's code and logs, made fit to be shown: cleaned, masked, bounded, held-out items hidden."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autorl_hpc.files.masking import masked
from autorl_hpc.report.story import EvidenceLine, Failure, Setting
from autorl_hpc.report.text import clean, clean_code

MAX_LINES = 8
MAX_SAYS_CHARS = 240
MAX_WHERE_CHARS = 160
MAX_SETTINGS = 30
MAX_VALUE_CHARS = 120
NOT_SHOWN = "(not shown: held-out items were found in this file)"


def shown_lines(
    lines: Sequence[EvidenceLine], *, hide_code: Collection[str] = (), hide_all: bool = False
) -> tuple[EvidenceLine, ...]:
    """Evidence for people.

    Args:
        hide_code: files of the workspace whose words must not be shown.
    """
    distinct = list(dict.fromkeys(lines))[:MAX_LINES] if len(lines) > 1 else lines
    return tuple(_shown(line, hide_all or _is_in(line.where, hide_code)) for line in distinct)


def _shown(line: EvidenceLine, hides: bool) -> EvidenceLine:
    where = clean(masked(line.where), MAX_WHERE_CHARS) or ""
    says = NOT_SHOWN if hides else clean_code(masked(line.says).strip(), MAX_SAYS_CHARS)
    return line if where == line.where and says == line.says else EvidenceLine(where=where, says=says)


def _is_in(where: str, files: Collection[str]) -> bool:
    """Whether a place such as `train.py:12` or `agent.log, byte 77` may be in one of these files of the workspace."""
    if not files:
        return False
    place = clean(where) or ""
    return any(place.startswith((file, file.removeprefix("code/"))) for file in files)


def shown_failure(
    failure: Failure | None, *, hide_code: Collection[str] = (), hide_all: bool = False
) -> Failure | None:
    """A failure with its evidence made fit to be shown."""
    if failure is None:
        return None
    return Failure(kind=failure.kind, evidence=shown_lines(failure.evidence, hide_code=hide_code, hide_all=hide_all))


def shown_settings(settings: Sequence[Setting]) -> tuple[Setting, ...]:
    """Settings for people."""
    return tuple(
        Setting(
            name=clean(one.name, MAX_VALUE_CHARS) or "",
            value=_value(one),
            where=clean(one.where, MAX_WHERE_CHARS) or "",
        )
        for one in settings[:MAX_SETTINGS]
    )


def _value(setting: Setting) -> str:
    """Masked with its name: `api_key` tells what `value` alone doesn't."""
    shown = masked(f"{setting.name}={setting.value}").removeprefix(f"{setting.name}=")
    return clean(shown, MAX_VALUE_CHARS) or ""
