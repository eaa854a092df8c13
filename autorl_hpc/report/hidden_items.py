"""Decide what a report must not show of a run with held-out items in its workspace.

Looks check files and their names only, not an agent's other words (command lines, traces, notes, model paths). So one item found
anywhere hides all of these, and a file with an item is hidden wherever it is quoted.
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
NAMES = "./"  # the ledger's name for items in names of files and folders, and in link targets
CODE_FOLDER = "code/"
LONGEST_SURE_NAME = 140
"""Names are cut at several lengths, all longer than this. A longer or escaped name may be written differently where it would
have to be hidden; then everything is hidden."""

# places of lines that the report itself wrote
_OWN = re.compile(
    r"ledger(: (fingerprint|submission|fingerprint of submission|contamination|sealed)( \d{1,9})?| entry \d{1,9})?"
    r"|(report|feedback) split|training logs?(, ledger)?"
)

_OWN_PLACE = re.compile(r"process at \d{1,12} s|agent\.log, byte \d{1,18}")
_UNSEEN = re.compile(
    r"process(?: at |\Z)|.*#inline\.py|:|\Z"
)  # places of words from a command line, which no look has checked
# A number, a word or a model's name: too short to be a held-out text (eight words or more)
_PLAIN = re.compile(r"[A-Za-z0-9_.+\-/]{1,32}")


@dataclass(frozen=True)
class Hidden:
    """What must not be shown of one run."""

    files: frozenset[str] = frozenset()  # workspace files that held items, or `agent.log`; without a leading `code/`
    found: bool = False  # an item was found somewhere
    names: bool = False  # items were in names of files
    everything: bool = False  # nothing that an agent wrote may be quoted

    def file(self, path: str) -> bool:
        """Return whether a file's words must not be shown."""
        return self.everything or (clean(path) or "").removeprefix(CODE_FOLDER) in self.files

    def instead(self, where: str) -> str | None:
        """Return the text to show instead of the words at a place such as `train.py:12`, `agent.log, byte 77` or
        `process at 3 s`; None if the words may be shown."""
        if not self.found or _OWN.fullmatch(where):
            return None
        place = (clean(where) or "").removeprefix(CODE_FOLDER)
        if place.startswith(tuple(self.files)):
            return IN_FILE
        return IN_WORKSPACE if self.everything or _UNSEEN.match(place) else None

    def value(self, value: str, where: str) -> str:
        """Return a setting's value or its replacement; the value may come from another file than the one at `where`."""
        if not self.found or _PLAIN.fullmatch(value):
            return self.instead(where) or value
        return self.instead(where) or IN_WORKSPACE

    def place(self, where: str) -> str:
        """Return a place, with the file name hidden if necessary."""
        return NAME if self.names and not _OWN.fullmatch(where) and not _OWN_PLACE.fullmatch(where) else where

    def name(self, path: str) -> str:
        """Return the name of a workspace file, hidden if necessary."""
        return NAME if self.names and path not in (NAMES, "agent.log") else path

    def said(self, text: str | None) -> str | None:
        """Return what an agent said outside of files, or a quote of it, hidden if necessary."""
        return IN_WORKSPACE if self.found and text else text


NOTHING = Hidden()


def hidden_of(looks: Iterable[Contamination]) -> Hidden:
    """Return what must not be shown after these looks."""
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
