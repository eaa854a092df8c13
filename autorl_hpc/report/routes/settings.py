"""Key settings of a training, from the code, command lines and configuration files that run it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from autorl_hpc.report.format import clean
from autorl_hpc.report.routes import configs
from autorl_hpc.report.routes.commands import options
from autorl_hpc.report.routes.follow import Follower
from autorl_hpc.report.routes.names import KEY_SETTINGS
from autorl_hpc.report.routes.plan import follow
from autorl_hpc.report.routes.reading import CONFIGS, sources
from autorl_hpc.report.story_records import Setting

MAX_SETTINGS = 60
"""Shown of one revision: more is a folder of several trainings."""
MAX_VALUE_CHARS = 120

_PARSERS = ("HfArgumentParser", "TrlParser")
"""Parsers that take every setting of a trainer as an option."""

_ORDER = {name: number for number, name in enumerate(KEY_SETTINGS)}


def settings(
    files: Mapping[str, str | bytes],
    entry_points: Sequence[str] = (),
    cache: MutableMapping[str, Any] | None = None,
) -> tuple[Setting, ...]:
    """The key settings (`names.KEY_SETTINGS`) that reached code gives to trainers, optimisers and samplers.

    Sorted by the list of key settings, then by place. The value is resolved where constants, options and files tell it,
    and as it is written where they don't. Never raises for what stands in `files`.
    """
    known, _ = sources(files, cache)
    follower = follow(known, entry_points, cache)
    found = [*_of_code(follower), *_of_commands(follower), *_of_files(follower)]
    unique = dict.fromkeys((name, value, where) for name, value, where in found if value)
    ordered = sorted(unique, key=lambda s: (_ORDER[s[0].rsplit(".", 1)[-1].lower()], s[2]))
    return tuple(
        Setting(name=clean(name, 80) or "", value=clean(value, MAX_VALUE_CHARS) or "", where=clean(where, 200) or "")
        for name, value, where in ordered[:MAX_SETTINGS]
    )


def _is_key(name: str) -> bool:
    return name.rsplit(".", 1)[-1].lower() in KEY_SETTINGS


def _of_code(follower: Follower) -> Iterator[tuple[str, str, str]]:
    for _, _, walk in follower.ran:
        for name, value, path, line in walk.settings:
            if _is_key(name):
                yield name, value, f"{path}:{line}"
    for path, values, _ in follower.ran:
        source = follower.sources.get(path)
        if source is not None and any(parser in source.text for parser in _PARSERS):
            for name, value in values.options.items():
                if _is_key(name):
                    yield name, value, f"{path} --{name}"


def _of_commands(follower: Follower) -> Iterator[tuple[str, str, str]]:
    for _, command, at in follower.programs:
        where = f"{at.path}:{at.line}" if at.line else at.path
        for name, value in options(command.args).items():
            if _is_key(name):
                yield name, value, where


def _of_files(follower: Follower) -> Iterator[tuple[str, str, str]]:
    """Of configurations that a command used; of all trainers' configurations where no code ran."""
    used = [path for path in follower.used if path.endswith(CONFIGS)]
    if not used and not follower.ran:
        used = [
            p for p, s in follower.sources.items() if p.endswith(CONFIGS) and configs.asked(configs.items(s.text, p))
        ]
    for path in used:
        for item in configs.items(follower.sources[path].text, path):
            if _is_key(item.key):
                yield item.name if item.name in KEY_SETTINGS else item.key, item.value, f"{path}:{item.line}"
