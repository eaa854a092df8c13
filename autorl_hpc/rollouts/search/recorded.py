"""Search results that were recorded: asked once, and then the same for every model.

One small JSON file an answer, named by the sha256 over back end, query and number of results; they lie in `.search-cache`
beside the tasks' vaults, for their owner alone. `online` records there and reads from there first, so that one experiment's
checkpoints meet the same results. `replay` reads alone: a query that was not recorded is an error of the grader, never an
empty result. It can score what was scored before, again and without a network; a model that asks something new it can't.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path

from autorl_hpc.rollouts.search.backend import Result, SearchBackend, SearchFailed, Setup

FORMAT = 1
"""Of the files; another one is not read."""
FOLDER = ".search-cache"


def folder_of(setup: Setup) -> Path:
    """Where results are kept: beside the tasks' vaults, or for agents in their data."""
    data = Path(setup.data)
    return (data.parent if setup.held_out else data) / FOLDER


def key_of(identity: str, query: str, k: int) -> str:
    """The name of a recorded answer. White space around and between words makes no difference."""
    asked = {"backend": identity, "query": " ".join(query.split()), "results": k}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode("ascii")).hexdigest()


class SearchCache:
    """A folder of recorded answers. Any number of processes may use it at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> list[Result] | None:
        """The answer of that name; None if there is none, or its file is damaged."""
        try:
            value = json.loads(self._path(key).read_bytes())
            if value["format"] != FORMAT or value["key"] != key:
                return None
            rows = [Result(*row) for row in value["found"]]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        return rows if all(isinstance(part, str) for row in rows for part in row) else None

    def stands(self, key: str) -> bool:
        """Whether there is a file of that name, readable or not."""
        return os.path.lexists(self._path(key))

    def put(self, key: str, backend: str, query: str, found: list[Result]) -> None:
        """Keeps an answer: the whole file or none. The first one stays: results must not change under a recipe.

        Raises:
            OSError: the folder can't be written.
        """
        value = {
            "format": FORMAT,
            "key": key,
            "backend": backend,
            "query": query,
            "found": [list(row) for row in found],
        }
        path = self._path(key)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = path.with_name(f".tmp-{os.getpid()}-{secrets.token_hex(4)}")
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(json.dumps(value, sort_keys=True, indent=1).encode("ascii"))
                file.flush()
                os.fsync(file.fileno())
            if self.get(key) is None:  # a damaged file is replaced
                os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"


class Recording:
    """Another back end's answers, recorded."""

    def __init__(self, backend: SearchBackend, folder: Path) -> None:
        self.backend = backend
        self.cache = SearchCache(folder)

    @property
    def identity(self) -> str:
        """That of the back end which is recorded."""
        return self.backend.identity

    def search(self, query: str, k: int) -> list[Result]:
        """See the Protocol: the recorded answer, else the back end's."""
        key = key_of(self.identity, query, k)
        found = self.cache.get(key)
        if found is None:
            found = self.backend.search(query, k)
            try:
                self.cache.put(key, self.identity, query, found)
            except OSError as error:
                raise SearchFailed(f"the results can't be recorded: {error.strerror}") from error
            # Another process may have been first, with other results: everybody goes by the recorded ones.
            found = self.cache.get(key) or found
        return found


class Replay:
    """Recorded answers alone."""

    def __init__(self, identity: str, folder: Path) -> None:
        self.identity = identity
        self.cache = SearchCache(folder)

    def search(self, query: str, k: int) -> list[Result]:
        """See the Protocol."""
        key = key_of(self.identity, query, k)
        found = self.cache.get(key)
        if found is None and self.cache.stands(key):
            raise SearchFailed(
                f"the recorded answer {key[:16]} for the query {query[:80]!r} is damaged or can't be read: put the original "
                "back, or ask the engine again"
            )
        if found is None:
            raise SearchFailed(f"no recorded answer {key[:16]} for the query {query[:80]!r}: it was not asked before")
        return found


def recording(backend: SearchBackend, setup: Setup) -> SearchBackend:
    """The back end, recorded unless the option `search_record` is false."""
    return Recording(backend, folder_of(setup)) if setup.options.get("search_record", True) else backend
