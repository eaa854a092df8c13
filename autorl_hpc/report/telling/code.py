"""The agent's code at each of its revisions, out of code.git: listings first, contents only where they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from autorl_hpc.files.code_history import BY_HASH
from autorl_hpc.files.gitobjects import LINK, GitDamage, Repository
from autorl_hpc.records.recorded import CodeRevision
from autorl_hpc.report.hiding import CODE_FOLDER
from autorl_hpc.report.telling.changes import CODE_SUFFIXES, CodeChange, Differ

MAX_BLOB_BYTES = 1 << 20
"""Nobody writes a program of a megabyte; the recorder keeps larger files by hash anyway."""

BY_HASH_MARK, LINK_MARK = "=", "@"
"""Before the object id of a pointer, or of where a link leads: it tells one content from another, and holds none."""

MAX_CACHED_BYTES = 32 << 20
MAX_SOURCES = 300
MAX_SOURCE_BYTES = 4 << 20
"""Of one revision, what is read to find routes and settings: an agent that copied a library into its code is told from the
first files by depth and name."""


class Code:
    """The states of one run's code. What is damaged or missing is None, and said in `troubles`."""

    def __init__(self, code_git: Path, revisions: Sequence[CodeRevision], differ: Differ) -> None:
        self.troubles: list[str] = []
        self.revisions = sorted(revisions, key=lambda r: r.elapsed_s)
        self._repository = Repository(code_git) if code_git.is_dir() and not code_git.is_symlink() else None
        self._trees: dict[str, dict[str, str] | None] = {}
        self._blobs: dict[str, bytes | None] = {}
        self._cached_bytes = 0
        self._differ = differ

    def at(self, elapsed_s: float) -> str | None:
        """The last revision that was recorded by then; None: none was."""
        found = None
        for revision in self.revisions:
            if revision.elapsed_s > elapsed_s:
                break
            found = revision.revision
        return found

    def tree(self, revision: str | None) -> Mapping[str, str] | None:
        """Object ids by path in the workspace; of what no content is kept of (large, binary, links), other marks."""
        if revision is None or self._repository is None:
            return None
        if revision not in self._trees:
            try:
                files = self._repository.files(revision)
                self._trees[revision] = dict(_placed(path, mode, name) for path, (mode, name) in files.items())
            except GitDamage as error:
                self._trees[revision] = None
                self.troubles.append(f"code.git: {error}")
        return self._trees[revision]

    def blob(self, name: str) -> bytes | None:
        """The content of an object; None: it is not kept, too large, or damaged."""
        if name.startswith((BY_HASH_MARK, LINK_MARK)):
            return None
        if name not in self._blobs:
            assert self._repository is not None
            try:
                data: bytes | None = self._repository.read(name, "blob", MAX_BLOB_BYTES)
            except GitDamage:
                data = None
            self._cached_bytes += len(data or b"")
            if self._cached_bytes > MAX_CACHED_BYTES:
                self._blobs.clear()
                self._cached_bytes = len(data or b"")
            self._blobs[name] = data
        return self._blobs[name]

    def sources(self, revision: str | None) -> dict[str, bytes]:
        """Programs and configurations of a revision, by path relative to code/."""
        tree = self.tree(revision)
        if tree is None:
            return {}
        found: dict[str, bytes] = {}
        total = 0
        paths = sorted((p for p in tree if p.endswith(CODE_SUFFIXES)), key=lambda p: (p.count("/"), p))
        for path in paths[:MAX_SOURCES]:
            data = self.blob(tree[path])
            total += len(data or b"")
            if total > MAX_SOURCE_BYTES:
                break
            if data is not None:
                found[path.removeprefix(CODE_FOLDER)] = data
        return found

    def change(self, before: str | None, after: str | None) -> CodeChange:
        """From one revision to another; from nothing where `before` is None."""
        new, old = self.tree(after), self.tree(before) if before is not None else {}
        if new is None or old is None or before == after:
            return CodeChange()
        changed = [path for path in {*old, *new} if old.get(path) != new.get(path)]
        links = {path for path in changed for tree in (old, new) if tree.get(path, "").startswith(LINK_MARK)}
        return self._differ.between(
            {path: self.blob(old[path]) for path in changed if path in old},
            {path: self.blob(new[path]) for path in changed if path in new},
            changed,
            links,
        )


def _placed(path: bytes, mode: int, name: str) -> tuple[str, str]:
    """Path and object id of one file; the id is marked where the object is a pointer and no content."""
    mark = LINK_MARK if mode == LINK else BY_HASH_MARK if path.startswith(BY_HASH) else ""
    return path.removeprefix(BY_HASH).decode("utf-8", "replace"), mark + name
