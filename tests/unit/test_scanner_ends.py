"""Which scanner is ended where the one of a look that was given up, and the next one's, meet."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.supervise import contamination
from autorl_hpc.supervise.contamination import ContaminationWatch, ScannerLost


def test_a_look_that_was_given_up_ends_no_other_scanner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last look ends the scanner of one that hangs, and starts its own; only then the first look hears of it."""
    over, ended = threading.Event(), list[object]()
    unused: Any = None
    watch = ContaminationWatch(ExperimentDir(tmp_path), "run", lambda: tmp_path, unused)

    class Scanner:
        at = None

        def __init__(self, *_: object) -> None:
            pass

        def look(self, *_: object, **__: object) -> None:
            watch._scanner = next_one
            over.set()
            raise ScannerLost("ended from outside")

        def kill(self) -> None:
            ended.append(self)

    next_one: Any = Scanner()
    monkeypatch.setattr(contamination, "ScannerProcess", Scanner)
    assert not watch._look(60.0, over).complete
    assert watch._scanner is next_one and next_one not in ended and len(ended) == 1
