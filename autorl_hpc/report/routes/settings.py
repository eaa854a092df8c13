"""Collect the key settings of a training from the code, command lines and configuration files that run it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from autorl_hpc.report.format import clean
from autorl_hpc.report.routes import configs
from autorl_hpc.report.routes.commands import options
from autorl_hpc.report.routes.planned import Followed, follow
from autorl_hpc.report.routes.script import CodePlace, Script, last_name
from autorl_hpc.report.routes.trainers import KEY_SETTINGS, OPTIMISERS, SETTING_CALLS, SETTING_CLASSES, TRAINER_CLASSES
from autorl_hpc.report.story_records import Setting

MAX_SETTINGS = 60
"""Settings shown of one revision; more means a folder of several trainings."""
MAX_VALUE_CHARS = 120


def settings(files: Mapping[str, str | bytes], entry_points: Sequence[str] = ()) -> tuple[Setting, ...]:
    """Return the key settings (`trainers.KEY_SETTINGS`) that live code passes to trainers, optimisers and samplers.

    Sorted by the list of key settings, then by place. Constants and options are resolved, other values are shown as written.
    Never raises, whatever `files` contain.
    """
    done = follow(files, entry_points)
    found = [*_of_files(done), *(each for script in done.scripts.values() for each in _of_code(script))]
    for command, where in done.commands:
        found += [(name, value, where) for name, value in options(command.args).items()]
    unique = dict.fromkeys(s for s in found if s[0].rsplit(".", 1)[-1].lower() in KEY_SETTINGS and s[1])
    ordered = sorted(unique, key=lambda s: (KEY_SETTINGS[s[0].rsplit(".", 1)[-1].lower()], s[2]))
    return tuple(
        Setting(name=clean(name, 80) or "", value=clean(value, MAX_VALUE_CHARS) or "", where=clean(where, 200) or "")
        for name, value, where in ordered[:MAX_SETTINGS]
    )


def _of_code(script: Script) -> Iterator[tuple[str, str, str]]:
    for each in script.calls:
        call = each.node
        name = each.look.name_of(call.func).rsplit(".", 1)[-1] or last_name(call.func)
        if name in SETTING_CLASSES or name in TRAINER_CLASSES or name in OPTIMISERS or name in SETTING_CALLS:
            given = [(k.arg, k.value) for k in call.keywords if k.arg]
            given += [("lr", call.args[1])] if name in OPTIMISERS and len(call.args) > 1 else []
            for key, expr in given:
                yield key, _shown(script, expr, each), f"{each.look.path}:{expr.lineno}"
    for each in script.statements:
        if isinstance(each.node, ast.Assign) and isinstance(each.node.value, ast.Constant):
            for target in each.node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, str(each.node.value.value), f"{each.look.path}:{each.node.lineno}"
    if any("Parser" in name for look in script.reached.values() for name in look.imports):
        for name, value in script.given.items():
            yield name, value, f"{script.path} --{name}"


def _shown(script: Script, expr: ast.expr, each: CodePlace) -> str:
    """Return a value as text: constants and options resolved, functions by name, the rest as written."""
    if isinstance(expr, ast.Attribute) and expr.attr in script.options:
        if expr.attr in script.given:
            return script.given[expr.attr]
        expr = next((n for n in [script.options[expr.attr].node] if isinstance(n, ast.Constant)), expr)
    known = each.look.literal(expr)
    if known is not None:
        return str(known)
    lines = each.look.text.split("\n")
    if expr.lineno != expr.end_lineno:
        return ""
    return lines[expr.lineno - 1].encode()[expr.col_offset : expr.end_col_offset].decode("utf-8", "replace")


def _of_files(done: Followed) -> Iterator[tuple[str, str, str]]:
    """Yield the settings of configurations that a command used; if nothing ran, of all trainers' configurations."""
    used = [path for path in done.used if path.endswith(configs.ENDINGS)]
    if not used and not done.scripts and not done.commands:
        used = [p for p, t in done.files.items() if p.endswith(configs.ENDINGS) and configs.asked_by_config(t, p)]
    for path in used:
        yield from ((i.key, i.value, f"{path}:{i.line}") for i in configs.items(done.files[path], path))
