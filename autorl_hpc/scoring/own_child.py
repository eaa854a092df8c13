"""Child process that runs a task's own `evaluate`: one JSON object per line, no pickle. The first line in holds file, folder
and memory limit; each further one `{"arguments": [question, answer, reference], "named": {...}}`, answered by `{"value"}` or
`{"error"}`."""

from __future__ import annotations

import importlib.util
import inspect
import math
import numbers
import os
import resource
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from autorl_hpc.rollouts.child import Answering, hide_memory, is_bool, serve

FUNCTION = "evaluate"
POSITIONAL = ("question", "model_answer", "reference")
"""The first three arguments, passed by position, so that a task may name them as it likes."""
MAX_WORDS = 300
TOLERANCE = 1e-9  # Tolerance for means of shares slightly above 1


class InvalidScore(Exception):
    """`evaluate` returned something that is not a score."""


def main() -> int:
    """Run until stdin ends; return the exit code."""
    return serve(_begin, shown=False)  # what the task prints may hold references


def _begin(request: dict[str, Any]) -> tuple[dict[str, Any], Answering]:
    hide_memory()
    sys.dont_write_bytecode = True  # the task's folder may be frozen code, in which compiled files are not allowed
    folder = Path(request["folder"])
    try:
        evaluate = _load(Path(request["file"]), folder, int(request["memory_bytes"]))
    except BaseException as error:
        return {"error": _words(error, folder)}, lambda _: {}

    def answer(call: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"value": as_score(evaluate(*call["arguments"], **call["named"]))}
        except BaseException as error:  # also sys.exit() and its own KeyboardInterrupt
            return {"error": _words(error, folder)}

    return {"ready": True}, answer


def _load(file: Path, folder: Path, memory_bytes: int) -> Callable[..., Any]:
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, memory_bytes)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("autorl_task_evaluate", file)
    if spec is None or spec.loader is None:
        raise InvalidScore(f"{file.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    found = getattr(module, FUNCTION, None)
    if not callable(found):
        raise InvalidScore(f"{file.name} has no function {FUNCTION}")
    return _with_what_it_takes(found)


def _limit(kind: int, wanted: int) -> None:
    hard = resource.getrlimit(kind)[1]
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (limit, limit))


def _with_what_it_takes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function to pass only named arguments that it accepts; all of them if it has `**kw`."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # not a Python function
        return lambda *given, **_: function(*given)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return function
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    beyond = [p.name for p in by_place[len(POSITIONAL) :] if p.kind is not p.POSITIONAL_ONLY]
    taken = {*beyond, *(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)}
    return lambda *given, **named: function(*given, **{name: value for name, value in named.items() if name in taken})


def as_score(value: Any) -> float:
    """Return the result of `evaluate` as a number from 0 to 1; True and False are 1 and 0. InvalidScore for anything else."""
    if not isinstance(value, numbers.Real) and not is_bool(value):
        raise InvalidScore(f"returned {_shown(value)}, which is not a number")
    number = float(value)
    if not math.isfinite(number) or not -TOLERANCE <= number <= 1.0 + TOLERANCE:
        raise InvalidScore(f"returned {_shown(value)}")
    return min(1.0, max(0.0, number))


def _shown(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)[:MAX_WORDS]
    try:
        return f"{value!r:.80} ({type(value).__name__})"
    except Exception:
        return f"a {type(value).__name__}"


def _words(error: BaseException, folder: Path) -> str:
    if isinstance(error, InvalidScore):
        return str(error).encode("utf-8", "replace").decode()
    inside = [
        frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(folder)
    ]
    what = ""
    where = f" ({Path(inside[-1].filename).name}, line {inside[-1].lineno})" if inside else ""
    with suppress(Exception):
        what = str(error)
    said = f"raised {type(error).__name__}{': ' if what else ''}{what}"[:MAX_WORDS] + where
    return said.encode("utf-8", "replace").decode()


if __name__ == "__main__":
    sys.exit(main())
