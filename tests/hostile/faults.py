"""Errors on demand: which calls of lagging_fs fail, decided by counting, so that a run can be repeated.

The control file is a JSON list of rules; the mount looks at it before every call and counts anew when it has changed:

    {"errno": "ESTALE", "ops": ["open", "read"], "match": "^/runs/", "every": 7, "burst": 2, "after": false, "held": false}

Of every `every` calls of these operations on a path that `match` (a regular expression) finds, the last `burst` fail: instead
of being done, or, with `after`, although they were done. With `held` such a call waits until other rules are given, and the whole
mount with it, as where a file server hangs; then it fails. A burst of one ESTALE at `open` or `getattr` is never seen by a
program: Linux asks once more by itself. Each injected error is a line `ERRNO op path` in `<control file>.log`.

Operations: access is never faulty; getattr readdir readlink open create read write truncate flush fsync fsyncdir rename
(by its new name) link (by its new name) symlink unlink mkdir rmdir setattr.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HELD_LOOK_S = 0.02


@dataclass
class Rule:
    """One kind of error."""

    number: int
    ops: frozenset[str]
    match: re.Pattern[str]
    every: int = 1
    burst: int = 1
    after: bool = False
    held: bool = False
    calls: int = 0

    @classmethod
    def parse(cls, value: dict[str, Any]) -> Rule:
        return cls(
            getattr(errno, value["errno"]),
            frozenset(value["ops"]),
            re.compile(value.get("match", "")),
            value.get("every", 1),
            value.get("burst", 1),
            value.get("after", False),
            value.get("held", False),
        )

    def hits(self, op: str, path: str) -> bool:
        """Counts the call if it is one of these; whether it fails."""
        if op not in self.ops or not self.match.search(path):
            return False
        self.calls += 1
        return (self.calls - 1) % self.every >= self.every - self.burst


class Faults:
    """The rules of one mount, as its control file has them now."""

    def __init__(self, control: Path | None) -> None:
        self.control = control
        self._rules: list[Rule] = []
        self._seen: tuple[int, int, int] | None = None

    def hit(self, op: str, path: str) -> Rule | None:
        """The rule by which this call fails."""
        if self.control is None:
            return None
        self._look()
        hits = [rule for rule in self._rules if rule.hits(op, path)]  # every rule counts every call
        if not hits:
            return None
        with open(f"{self.control}.log", "a", encoding="utf-8") as log:
            log.write(f"{errno.errorcode[hits[0].number]} {op} {path}\n")
        if hits[0].held:
            before = self._seen
            while self._seen == before:
                time.sleep(HELD_LOOK_S)
                self._look()
        return hits[0]

    def _look(self) -> None:
        assert self.control is not None
        try:
            info = os.stat(self.control)
        except FileNotFoundError:
            self._rules, self._seen = [], None
            return
        seen = (info.st_ino, info.st_mtime_ns, info.st_size)
        if seen != self._seen:
            self._rules = [Rule.parse(value) for value in json.loads(self.control.read_bytes())]
            self._seen = seen
