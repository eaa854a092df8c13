"""An engine that does not start is the node's trouble: no artifact's weights have come near it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import Desk, tiny_base

from autorl_hpc.files.artifacts import READY_NAME
from autorl_hpc.files.layout import Root
from autorl_hpc.grading import engines
from autorl_hpc.grading.attempts import Attempts, ClusterTrouble
from autorl_hpc.grading.evaluate import Bench
from autorl_hpc.records.experiment import GraderSpec
from autorl_hpc.rollouts.engine import EngineFailed
from autorl_hpc.stage.models import TINY, stage_model
from autorl_hpc.states import Fault, Split


class Starting(Bench):
    """A bench at which nothing is asked: it begins with the engine."""

    def answer(self, science: Any, *others: Any, **more: Any) -> Any:
        return self.engine(science.base_model, science.recipe)


@pytest.mark.parametrize("problem", [EngineFailed("its worker ended with 1"), RuntimeError("CUDA error: all in use")])
def test_an_artifact_is_not_blamed_where_the_engine_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    left = [problem] * 3  # a third would be the base model's trial

    def make_engine(*arguments: Any) -> str:
        if left:
            raise left.pop()
        return "the engine"

    monkeypatch.setattr(engines, "make_engine", make_engine)
    desk, content = Desk(tmp_path / "exp", tiny_base()), "a" * 64
    root = Root(tmp_path / "exp")
    stage_model(root, TINY, None)
    (desk.experiment.artifacts / content).mkdir()
    (desk.experiment.artifacts / content / READY_NAME).touch()
    attempts = Attempts(desk.experiment, Starting(root, GraderSpec()))
    while left:
        before = len(left)
        with pytest.raises(ClusterTrouble, match=str(problem)) as told:
            attempts.answer(desk.record.science, content, Split.FEEDBACK, "f-r--000001", 1)
        assert len(left) == before - 1, "it is told at once, and counts as no try"
        assert told.value.fault is Fault.CLUSTER and "next:" in str(told.value) and ".log" not in str(told.value)
    found: object = attempts.answer(desk.record.science, content, Split.FEEDBACK, "f-r--000001", 1)
    assert found == "the engine"
