"""What must not be shown of a run in whose workspace held-out items were found.

A look at the workspace reads files and their names. Nobody looks at what an agent said elsewhere: command lines, traces, notes,
paths of models. So one item found anywhere hides all of that, and a file's words wherever the file holds an item.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from autorl_hpc.records.entries import Contamination
from autorl_hpc.report.format import clean

IN_FILE = "(not shown: held-out items were found in this file)"
IN_WORKSPACE = "(not shown: held-out items were found in the workspace)"
NAME = "(name not shown: held-out items were found in names of files)"

NAMES = "./"
"""By this name the ledger tells of items in names of files and folders, and in what links say."""

CODE_FOLDER = "code/"

LONGEST_SURE_NAME = 140
"""Names are cut at several lengths, none of them shorter: a longer one, or one with escapes, may be told in another way at the place
that would have to be hidden. Then all is hidden."""

_OWN = re.compile(
    r"ledger(: (fingerprint|submission|fingerprint of submission|contamination|sealed)( \d{1,9})?| entry \d{1,9})?"
    r"|(report|feedback) split|training logs?(, ledger)?"
)
"""Places of lines that the report itself wrote, of figures and of names of its own."""

_OWN_PLACE = re.compile(r"process at \d{1,12} s|agent\.log, byte \d{1,18}")
_UNSEEN = re.compile(r"process(?: at |\Z)|.*#inline\.py|:|\Z")
"""Places of words that stood in a command line, not in a file that was looked at."""

_PLAIN = re.compile(r"[A-Za-z0-9_.+\-/]{1,32}")
"""A number, a word or a model's name. Held-out texts that are looked for have eight words and more."""


@dataclass(frozen=True)
class Hidden:
    """What of one run must not be shown.

    Attributes:
        files: files of the workspace that held items, or `agent.log`; `code/` is left out where it leads.
        found: an item was found somewhere.
        names: items stood in names of files.
        everything: nothing that an agent wrote may be shown word by word.
    """

    files: frozenset[str] = frozenset()
    found: bool = False
    names: bool = False
    everything: bool = False

    def file(self, path: str) -> bool:
        """Whether a file's words must not be shown."""
        return self.everything or (clean(path) or "").removeprefix(CODE_FOLDER) in self.files

    def instead(self, where: str) -> str | None:
        """What is said instead of the words at a place such as `train.py:12`, `agent.log, byte 77` or `process at 3 s`; None: they
        may be shown."""
        if not self.found or _OWN.fullmatch(where):
            return None
        place = (clean(where) or "").removeprefix(CODE_FOLDER)
        if place.startswith(tuple(self.files)):
            return IN_FILE
        return IN_WORKSPACE if self.everything or _UNSEEN.match(place) else None

    def value(self, value: str, where: str) -> str:
        """A setting's value, or what is said instead: its words may have come from another file than that at `where`."""
        if not self.found or _PLAIN.fullmatch(value):
            return self.instead(where) or value
        return self.instead(where) or IN_WORKSPACE

    def place(self, where: str) -> str:
        """A place, its name of a file hidden if need be."""
        return NAME if self.names and not _OWN.fullmatch(where) and not _OWN_PLACE.fullmatch(where) else where

    def name(self, path: str) -> str:
        """The name of a file of the workspace, hidden if need be."""
        return NAME if self.names and path not in (NAMES, "agent.log") else path

    def said(self, text: str | None) -> str | None:
        """What an agent said outside of files, or what others said in its words."""
        return IN_WORKSPACE if self.found and text else text


NOTHING = Hidden()


def hidden_of(looks: Iterable[Contamination]) -> Hidden:
    """What must not be shown after these looks."""
    every = list(looks)
    files = {one.file for look in every for one in look.found}
    unlisted = any(look.found_unlisted for look in every)
    counted = any(count for look in every for count in look.items.values())
    odd = any("\\" in file or len(file) > LONGEST_SURE_NAME for file in files)
    return Hidden(
        files=frozenset((clean(file) or "?").removeprefix(CODE_FOLDER) for file in files - {NAMES}),
        found=bool(files) or unlisted or counted,
        names=NAMES in files or unlisted,
        everything=unlisted or odd,
    )
