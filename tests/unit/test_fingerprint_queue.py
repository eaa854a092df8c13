"""Fingerprints as queue work: committed once, never in the way for ever; and which artifacts an open run keeps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_fingerprint import Model, model, plus, save
from treemaker import Tree, TreeRun, outcomes

from autorl_hpc.files import artifacts, atomic, reading
from autorl_hpc.files.checkpoint import folder_content_hash
from autorl_hpc.files.layout import Root
from autorl_hpc.files.run_view import RunView
from autorl_hpc.files.store import write_manifest
from autorl_hpc.grading import fingerprint_queue
from autorl_hpc.grading.attempts import DEATHS_BEFORE_BLAME, NotReady
from autorl_hpc.grading.daemon import release_spare
from autorl_hpc.grading.fingerprint_queue import FingerprintQueue
from autorl_hpc.records.entries import Fingerprint
from autorl_hpc.records.exchange import StoreManifest
from autorl_hpc.states import Split

BASE: Model = model()


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


class World:
    """One run with real weights in its artifacts, and a grader's tracing."""

    def __init__(self, tmp: Path) -> None:
        self.root = Root(tmp / "root")
        self.tree = Tree(tmp / "runs" / "exp")
        self.experiment = self.tree.experiment
        self.run: TreeRun = self.tree.run(base_model_content_hash=self.stage("org/tiny", BASE)).start()
        self.tracing = FingerprintQueue(self.experiment, self.root, "g1")
        self.base = self.tree.baseline(self.run.science, Split.FEEDBACK)

    def stage(self, name: str, weights: Model, dtype: str = "F32") -> str:
        folder = save(self.root.model(name), weights, dtype)
        content = folder_content_hash(folder)
        manifest = StoreManifest(name=name, kind="model", source="test", content_hash=content, files=())
        write_manifest(folder, manifest)
        return content

    def submit(self, weights: Model, *, score: float | None = 0.5, **fields: Any) -> int:
        """An accepted submission with its artifact; scored unless `score` is None."""
        folder = save(artifacts.new_folder(self.experiment.artifacts, self.run.dir.run_id, 1), weights)
        content = folder_content_hash(folder)
        atomic.write_json(folder / artifacts.READY_NAME, {})
        artifacts.install(self.experiment.artifacts, folder, content, self.run.dir.run_id)
        n = self.tree.n_feedback
        values = None if score is None else outcomes(n, range(round(n * score)))
        return self.run.submit(1.0, values, content_hash=content, **fields)

    def work(self, number: int, generation: int = 1) -> RunView | None:
        name = f"p-{self.run.dir.run_id}--{number:06d}"
        return self.tracing.work(self.run.record, self.run.ledger, number, name, generation)

    def made(self, number: int) -> Fingerprint:
        view = self.work(number)
        assert view is not None
        return view.fingerprints[number]

    def kept(self) -> set[str]:
        return set(reading.list_names(self.experiment.artifacts))

    def content(self, *numbers: int) -> set[str]:
        view = RunView.of(self.run.ledger.read())
        return {str(view.submissions[number].content_hash) for number in numbers}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_another_staged_model_is_found_and_read_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    other = plus(BASE, 0.02, seed=9)
    world.stage("org/instruct", other)
    world.stage("org/wider", {**other, "up": np.zeros((8, 8), dtype=np.float32)})
    world.stage("plain", {name: value.copy() for name, value in BASE.items()}, "F16")
    read: list[str] = []
    real = fingerprint_queue.sketch_of
    monkeypatch.setattr(fingerprint_queue, "sketch_of", lambda o, *a: read.append(o.folder.name) or real(o, *a))  # type: ignore[func-returns-value]
    found = [world.made(world.submit(value)) for value in (other, plus(other, 0.01, seed=4), plus(BASE, 0.02, seed=5))]
    assert [one.flags for one in found] == [("foreign_weights",), ("foreign_weights",), ()]
    assert found[0].nearest_model == "org/instruct" and found[0].nearest_delta == pytest.approx(0, abs=1e-5)
    assert found[2].nearest_model != "org/instruct"
    assert sorted(read) == ["instruct", "plain"]


@pytest.mark.parametrize("damage", ["altered", "no weights", "store"])
def test_what_cannot_be_computed_has_a_reason(world: World, damage: str) -> None:
    number = world.submit(plus(BASE, 0.01))
    file = world.experiment.artifacts / world.content(number).pop() / "model-0.safetensors"
    if damage == "altered":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "no weights":
        file.write_bytes(b"")
    else:
        world.stage("org/tiny", plus(BASE, 0.5, seed=77))
    with pytest.raises(NotReady):
        world.work(number)
    found = world.made(number)
    assert found.flags == () and found.relative_delta is None
    words = {"altered": "changed after intake", "no weights": "no safetensors file", "store": "staged anew"}
    assert words[damage] in str(found.reason)


def test_spare_artifacts_go_while_the_run_is_open(world: World) -> None:
    for seed, (score, final) in enumerate([(0.5, False), (0.3, True), (0.4, False), (0.2, True), (0.3, False)], 1):
        world.submit(plus(BASE, 0.01, seed=seed), score=score, final=final)
    for number in (1, 2, 3):
        world.work(number)
    assert release_spare(world.experiment, world.run.dir.run_id, world.run.ledger) == 2
    # best 1; 2's mark was followed by 4's; 3 is nothing; 4 final and unfingerprinted; 5 the last
    assert world.kept() == world.content(1, 4, 5)
    for number in (4, 5):
        world.work(number)
    assert release_spare(world.experiment, world.run.dir.run_id, world.run.ledger) == 0
    world.work(world.submit(plus(BASE, 0.01, seed=6), score=0.6))
    assert release_spare(world.experiment, world.run.dir.run_id, world.run.ledger) == 2
    assert world.kept() == world.content(4, 6)


def test_a_damaged_staged_model_hinders_nothing_and_graders_that_die_end_it(world: World) -> None:
    world.stage("org/broken", BASE)
    (world.root.model("org/broken") / "model-0.safetensors").write_bytes(b"nothing")
    (world.root.model("org/unread")).mkdir()
    (world.root.model("org/unread") / "MANIFEST.json").write_text("{")
    assert world.made(world.submit(plus(BASE, 0.01))).flags == ()
    number = world.submit(plus(BASE, 0.01, seed=3))
    view = world.work(number, generation=DEATHS_BEFORE_BLAME + 1)
    assert view is not None and "3 graders died" in str(view.fingerprints[number].reason)
