"""Start the observer in a Python process of an agent: `site` imports this at each start, before the program.

It has only what every start needs, because Python compiles it each time where it can't write here; autorl_observer.py is loaded at the
first import of a library of the field, or when the program crashes. Standard library alone, Python 3.8 or later.
"""

from __future__ import annotations

import atexit
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
LIBRARIES = "torch transformers trl peft accelerate datasets safetensors vllm sglang verl openrlhf torchtune lightning"
ROOTS = frozenset((LIBRARIES + " pytorch_lightning wandb").split())


class Waiting:
    """Finder that finds nothing itself: at the first library of the field the observer's own finder takes its place."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name.partition(".")[0] not in ROOTS or self not in sys.meta_path:  # type: ignore[comparison-overlap]
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        return ask("start", name, path, target)


def ask(function: str, *args: object) -> object:
    """Call a function of the observer; the program must not notice if that fails."""
    try:
        if HERE not in sys.path:
            sys.path.append(HERE)
        return getattr(__import__("autorl_observer"), function)(*args)
    except Exception:
        return None


def at_exit() -> None:
    if "autorl_observer" in sys.modules or getattr(sys, "last_value", None) is not None:
        ask("end")


if __name__ == "sitecustomize":
    if os.environ.get("AUTORL_OBSERVED"):
        sys.meta_path.insert(0, Waiting())  # type: ignore[arg-type]
        atexit.register(at_exit)
    # Run the `sitecustomize` that would have run without this one.
    ours, before = sys.modules.pop(__name__), list(sys.path)
    sys.path[:] = [each for each in before if os.path.abspath(each or ".") != HERE]
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.path[:] = before + [each for each in sys.path if each not in before]
        sys.modules.setdefault("sitecustomize", ours)
