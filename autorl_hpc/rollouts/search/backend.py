"""Search back ends behind one Protocol, and how a recipe's options choose one.

A task brings a back end of its own by `BACKENDS["name"] = make` in its environment.py; the recipe's option `search` names it.
Nothing here opens a connection but `online`, and that one only where the recipe names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from autorl_hpc.rollouts.environment import Unavailable


class Result(NamedTuple):
    """One thing found."""

    title: str
    url: str
    snippet: str


class SearchBackend(Protocol):
    """Finds texts for a query."""

    @property
    def identity(self) -> str:
        """What answers: kind, version, corpus or address. Never a key. Recorded results are kept under it."""
        ...

    def search(self, query: str, k: int) -> list[Result]:
        """At most `k` results, best first; none where nothing fits.

        Raises:
            SearchFailed: it could not be asked. Never an empty list in its place.
        """
        ...


class SearchFailed(Unavailable):
    """The back end could not be asked: the grader's fault, and no score. Its message holds no key."""


class Setup(NamedTuple):
    """What a back end is made from.

    Attributes:
        options: the recipe's.
        data: the folder of the task's data: training data for agents, the vault for graders.
        held_out: whether `data` is the vault.
    """

    options: Mapping[str, Any]
    data: Path
    held_out: bool = False


def _bm25(setup: Setup) -> SearchBackend:
    from autorl_hpc.rollouts.search import bm25

    return bm25.from_setup(setup)


def _online(setup: Setup) -> SearchBackend:
    from autorl_hpc.rollouts.search import online, recorded

    return recorded.recording(online.from_setup(setup), setup)


def _replay(setup: Setup) -> SearchBackend:
    from autorl_hpc.rollouts.search import online, recorded

    return recorded.Replay(online.identity_of(setup.options), recorded.folder_of(setup))


BACKENDS: dict[str, Callable[[Setup], SearchBackend]] = {"bm25": _bm25, "online": _online, "replay": _replay}


def make_backend(setup: Setup) -> SearchBackend:
    """The back end that the option `search` names (default bm25).

    Raises:
        ValueError: there is none of that name, or an option that it needs is missing or wrong.
        OSError: its corpus or its key can't be read.
    """
    name = str(setup.options.get("search", "bm25"))
    if name not in BACKENDS:
        raise ValueError(f"there is no search back end `{name}`; there are {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name](setup)
