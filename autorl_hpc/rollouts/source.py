"""Where an environment comes from: its Python file, the class in it, and its data folder."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from autorl_hpc.rollouts.environment import Dialogue, Environment

DIALOGUE = "Dialogue"  # Class name of the dialogue in the environment's file


class EnvironmentBroken(Exception):
    """The environment can't be used: its file can't be loaded, or its workers die repeatedly."""


@dataclass(frozen=True)
class Source:
    """An environment's file, the class in it (the dialogue is `Dialogue` in the same file), and the arguments of both: the folder
    of training data for agents, the vault for graders (`held_out`), and the recipe's options."""

    file: Path | str
    name: str
    data: Path | str
    held_out: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def environment(self) -> Environment:
        """Create an environment. Raises EnvironmentBroken: the file or the class can't be used."""
        made: Environment = self._make(self.name)
        return made

    def dialogue(self) -> Dialogue:
        """Create a dialogue; errors as for `environment`."""
        made: Dialogue = self._make(DIALOGUE)
        return made

    def _make(self, name: str) -> Any:
        kind = getattr(load(self.file), name, None)
        if kind is None:
            raise EnvironmentBroken(f"{self.file} has no class {name}")
        offered = {"data": Path(self.data), "held_out": self.held_out, "options": dict(self.options)}
        with blamed(EnvironmentBroken, f"{name} of {self.file} can't be made:"):
            taken = inspect.signature(kind).parameters
            return kind(**{key: value for key, value in offered.items() if key in taken})


def load(file: Path | str) -> ModuleType:
    """Load the module in `file`, once per process. Raises EnvironmentBroken: it can't be loaded."""
    name = f"autorl_environment_{abs(hash(str(file)))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise EnvironmentBroken(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    try:
        with blamed(EnvironmentBroken, f"{file} can't be loaded:"):
            spec.loader.exec_module(module)
    except EnvironmentBroken:
        del sys.modules[name]
        raise
    return module


@contextmanager
def blamed(kind: type[Exception], words: str) -> Iterator[None]:
    """Raise an error of this kind in the place of any other, also of SystemExit: a task's file must not end this process."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise kind(f"{words} {type(error).__name__}: {error}"[:1000]) from error
