"""The owner of the files cheats after the end: a whole chain with a better score, items exchanged, a report that says more."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bundles import solved
from cheating import START
from helpers import PATIENCE_S, Cluster, wait_for
from workbench import WEIGHTS

from autorl_hpc.files.layout import RunDir
from autorl_hpc.files.ledger import Ledger, sha256_hex
from autorl_hpc.records import canonical_json

SCRIPT = (
    START
    + WEIGHTS
    + """
py <<'END'
from st import *
for number in (1, 2):
    save(f"v{number}", noisy(base(), 0.01, seed=number))
END
./submit output/v1 --wait > code/answer.json
./submit output/v2 --wait --final > code/answer.json
"""
)


@dataclass
class Closed:
    """A closed run, and the head that was printed at its end."""

    cluster: Cluster
    run: RunDir
    head: str

    @property
    def items(self) -> Path:
        view = self.cluster.view(self.run.run_id)
        assert view.closed is not None
        return self.run.path / "items" / f"{view.closed.selected:06d}.report.jsonl.gz"

    def verify(self, *more: str) -> tuple[int, str]:
        done = self.cluster.run("verify", str(self.cluster.experiment.path), *more, check=False)
        return done.returncode, done.stdout

    def write(self, path: Path, data: bytes) -> None:
        os.chmod(path.parent, 0o755)
        if path.exists():
            os.chmod(path, 0o644)
        path.write_bytes(data)

    def chain_anew(self, change: Callable[[dict[str, Any]], None]) -> str:
        """Every entry changed and linked again, with its copy and the heads; the new head."""
        prev, lines = sha256_hex(self.run.record.read_bytes()), []
        for path in sorted(self.run.ledger.iterdir()):
            entry = json.loads(path.read_bytes())
            change(entry)
            data = canonical_json({**entry, "prev": prev}) + b"\n"
            self.write(path, data)
            prev = sha256_hex(data)
            lines.append(data)
        self.write(self.run.sealed_ledger, b"".join(lines))
        heads = self.cluster.experiment.path / "heads.json"
        if heads.exists():
            self.write(heads, heads.read_bytes().replace(self.head.encode(), prev.encode()))
        return prev


@pytest.fixture(scope="module")
def finished(staged: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, str]]:
    cluster = Cluster(staged, tmp_path_factory.mktemp("evidence"))
    try:
        cluster.mini_task(items=12, max_new_tokens=16, any_number=True)
        cluster.agent("one", SCRIPT)
        (run_id,) = cluster.prepare(["one"], matrix={"task": "mini"}, sandbox={"level": "auto"})
        grader, supervisor = cluster.grader(), cluster.supervisor(run_id)
        assert supervisor.wait(PATIENCE_S) == 0, cluster.logs()
        wait_for(lambda: cluster.finished([run_id]), "the closing")
        assert grader.wait(PATIENCE_S) == 0, cluster.logs()
        cluster.run("report", str(cluster.experiment.path))
        yield cluster, run_id
    finally:
        cluster.end()


@pytest.fixture
def closed(finished: tuple[Cluster, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Closed]:
    """The run as it was at its end; put back afterwards."""
    cluster, run_id = finished
    assert cluster.code is not None
    monkeypatch.setenv("AUTORL_TASKS_PATH", str(cluster.code / "tasks"))
    kept = tmp_path / "kept"
    shutil.copytree(cluster.experiment.path, kept, symlinks=True)
    run = cluster.run_dir(run_id)
    made = Closed(cluster, run, Ledger(run).read()[-1].sha256)
    yield made
    shutil.rmtree(cluster.experiment.path)
    shutil.copytree(kept, cluster.experiment.path, symlinks=True)


def rescored(closed: Closed, tmp_path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    bundle = tmp_path / "run.tar.zst"
    closed.cluster.run("export", str(closed.run.path), "--out", str(bundle))
    root = str(closed.cluster.root.path)
    done = closed.cluster.run("rescore", str(bundle), "--root", root, "--device", "cpu", "--json", *more, check=False)
    return done.returncode, json.loads(done.stdout)


def test_a_whole_chain_with_a_better_score(closed: Closed, tmp_path: Path) -> None:
    items = solved(closed.items.read_bytes(), 12, other_texts=True)
    closed.write(closed.items, items)

    def better(entry: dict[str, Any]) -> None:
        if entry["kind"] == "closed":
            entry["body"]["report"] |= {
                "score": 100.0,
                "correct": 12,
                "items_sha256": hashlib.sha256(items).hexdigest(),
            }

    head = closed.chain_anew(better)
    closed.cluster.run("report", str(closed.cluster.experiment.path))
    told = json.loads((closed.run.report / "summary.json").read_text())
    assert told["report"]["score"] == 100.0, "the forger's report says so"
    assert closed.verify()[0] == 0, "who writes everything anew is not seen in the files: docs/threat-model.md"
    code, said = closed.verify("--expect", closed.head)
    assert code != 0 and closed.head[:16] in said and head != closed.head
    code, found = rescored(closed, tmp_path)
    assert code == 1 and not found["holds"] and found["selected"]["word"] == "differs"
    assert found["selected"]["claimed"] == 100.0 > found["selected"]["here"]


@pytest.mark.parametrize("change", ["made better", "another submission's"])
def test_other_items(closed: Closed, change: str) -> None:
    assert closed.verify("--expect", closed.head)[0] == 0
    if change == "made better":
        path, data = closed.items, solved(closed.items.read_bytes(), 12)
    else:
        path, other = (closed.run.path / "items" / f"{number:06d}.feedback.jsonl.gz" for number in (1, 2))
        data = other.read_bytes()
        assert gzip.decompress(path.read_bytes()) != gzip.decompress(data)
    closed.write(path, data)
    code, said = closed.verify()
    assert code != 0 and path.name in said


def test_another_artifact_under_the_same_name(closed: Closed) -> None:
    view = closed.cluster.view(closed.run.run_id)
    assert view.closed is not None and view.closed.selected is not None
    name = str(view.submissions[view.closed.selected].content_hash)
    weights = closed.cluster.experiment.artifacts / name / "model.safetensors"
    data = weights.read_bytes()
    closed.write(weights, data[:-4] + b"\0\0\0\0")
    code, said = closed.verify()
    assert code != 0 and name[:12] in said
    done = closed.cluster.run("export", str(closed.run.path), "--out", str(closed.run.path / "x.tar.zst"), check=False)
    assert done.returncode != 0


def test_a_report_that_says_more(closed: Closed) -> None:
    path = closed.run.report / "summary.json"
    true = path.read_bytes()
    told = json.loads(true)
    told["trajectory"][0]["score"] = 99.5
    closed.write(path, json.dumps(told).encode())
    code, said = closed.verify()
    assert code != 0 and "report/summary.json was altered: `trajectory[0].score` is 99.5" in said
    closed.write(path, true)
    table = closed.cluster.experiment.report / "summary.csv"
    closed.write(table, table.read_bytes().replace(closed.run.run_id.encode(), b"another", 1))
    code, said = closed.verify()
    assert code != 0 and "report/summary.csv was altered" in said
