"""Submissions that are rated and committed beside the next evaluations."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import PATIENCE_S

from autorl_hpc.grading.feedback import ROOM, Finished, Finishing


def evaluation(name: str) -> Any:
    return SimpleNamespace(of=name)


def test_what_is_finished_first_is_collected_first_and_each_once() -> None:
    finishing, go = Finishing(), {name: threading.Event() for name in "abc"}

    def work(name: str) -> Any:
        assert go[name].wait(PATIENCE_S)
        return evaluation(name)

    for number, name in enumerate(go, 1):
        assert not finishing.full
        finishing.start(name, number, lambda name=name: work(name))  # type: ignore[misc]
    assert finishing.full and finishing.names == ("a", "b", "c") and len(go) == ROOM
    with pytest.raises(RuntimeError, match="not collected"):
        finishing.start("d", 1, lambda: evaluation("d"))
    assert finishing.collect() is None and finishing.collect(0.05) is None
    go["b"].set()
    assert finishing.collect(None) == Finished("b", 2, evaluation("b"))
    assert finishing.names == ("a", "c") and not finishing.full
    with pytest.raises(RuntimeError, match="not collected"):
        finishing.start("a", 1, lambda: evaluation("a"))
    go["a"].set()
    go["c"].set()
    rest = [finishing.collect(PATIENCE_S), finishing.collect(PATIENCE_S)]
    assert {(found.name, found.generation) for found in rest if found} == {("a", 1), ("c", 3)}
    assert finishing.names == () and finishing.collect(None) is None, "there is nothing to wait for"


@pytest.mark.parametrize("error", [OSError(5, "EIO"), SystemExit(3)])
def test_errors_are_results(error: BaseException) -> None:
    finishing = Finishing()

    def breaks() -> Any:
        raise error

    finishing.start("a", 1, breaks)
    found = finishing.collect(PATIENCE_S)
    assert found is not None and isinstance(found.result, Exception)
    assert found.result is error or found.result.__cause__ is error
    assert not finishing.names
