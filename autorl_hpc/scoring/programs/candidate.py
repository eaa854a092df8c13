"""The candidate's process, after it was confined: defines the program and answers calls until the pipe closes.

Nothing here is trusted once the program's text runs: whatever it does to this process, it can only answer.
"""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable

from autorl_hpc.scoring.programs import frames

MODULE = "program"
MOST_REQUEST_BYTES = 64 * 1024 * 1024
SYNTAX, RAISED, UNDEFINED, NOT_PLAIN = "syntax", "raised", "undefined", "not_plain"


def serve(source: str, entry_point: str, requests: int, answers: int) -> None:
    """Defines the program and answers `[arguments, named]` with `{"value": ...}` or `{"raised": name}`.

    The first answer is `{"ready": true}` or says why it is not. Returns when nobody asks any more.
    """
    random.seed(1)  # what a program draws is the same every time, too
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    try:
        code = compile(source, "<program>", "exec", dont_inherit=True)
    except MemoryError:
        return frames.write(answers, {RAISED: "MemoryError"})
    except Exception:
        return frames.write(answers, {SYNTAX: True})
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        return frames.write(answers, {RAISED: type(error).__name__})
    if entry_point not in module.__dict__:
        return frames.write(answers, {UNDEFINED: True})
    function = module.__dict__[entry_point]
    frames.write(answers, {"ready": True})
    while True:
        try:
            request = frames.read(requests, MOST_REQUEST_BYTES)
        except frames.Ended:
            return None
        frames.write(answers, _answer(function, request))


def _answer(function: Callable[..., object], request: object) -> object:
    try:
        arguments, named = frames.decode(request)  # type: ignore[misc]
        value = function(*arguments, **named)  # type: ignore[has-type]
        return {"value": frames.encode(value)}
    except frames.NotPlain:
        return {NOT_PLAIN: True}
    except BaseException as error:
        return {RAISED: type(error).__name__}
