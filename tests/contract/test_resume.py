"""An experiment whose supervisor and grader were killed is launched again and comes to its end; its run is exported and scored again."""

from __future__ import annotations

import json
import re
import tarfile
import time
from pathlib import Path

import pytest
from contract import LIMIT_S, MADE_AT, Place, alter, with_code_of

pytestmark = pytest.mark.xdist_group("contract-resume")

EXPORTED = {
    *("EVIDENCE.json", "task/recipe.json", "task/task.yaml", "experiment/experiment.json"),
    *("experiment/RUN/run.json", "experiment/RUN/ledger.jsonl", "experiment/RUN/ledger/#.json"),
    *("experiment/RUN/items/#.feedback.jsonl.gz", "experiment/RUN/items/#.report.jsonl.gz"),
    *("experiment/RUN/report/summary.json", "experiment/artifacts/#/model.safetensors"),
    *("experiment/baselines/#.json", "experiment/baselines/#.items.jsonl.gz"),
}

SITE = """name: site
agent: {gpus: 0}
grader: {gpus: 0}
"""


def test_an_interrupted_experiment_goes_on(place: Place) -> None:
    """What was accepted before the interruption is kept and scored, the run gets a second attempt, the third run its first."""
    place.unpack("tiny")
    assert place.run("stage", "alpacaeval-mini").returncode == 0
    assert place.run("stage", "autorl/tiny", "--from", place.path / "tiny").returncode == 0  # as it was staged then
    folder = place.unpack("interrupted")
    spec = folder / "experiment.yaml"
    place.env["AUTORL_AGENTS_PATH"] = str(place.path / "agents")

    refused = place.run("launch", spec)
    assert refused.returncode == 1 and "frozen code" in refused.stderr, refused.stderr
    _code_of_now(place, folder)
    (killed,) = folder.glob("*sparse*s0-*")
    before = {path.name: path.read_bytes() for path in (killed / "ledger").iterdir()}
    (done,) = folder.glob("*null*s0-*")
    untouched = {path: path.read_bytes() for path in done.rglob("*") if path.is_file()}
    assert place.facts("launch", spec)["finished"] == 1

    try:
        _wait_until_over(place, folder)
    finally:
        place.run("cancel", folder)
    assert {path: path.read_bytes() for path in untouched} == untouched
    assert {name: (killed / "ledger" / name).read_bytes() for name in before} == before
    entries = [json.loads(path.read_bytes()) for path in sorted((killed / "ledger").glob("0*.json"))]
    kinds = [entry["kind"] for entry in entries]
    assert {kind: kinds.count(kind) for kind in ("attempt_started", "submission", "score", "sealed", "closed")} == {
        "attempt_started": 2,
        "submission": 3,
        "score": 3,
        "sealed": 1,
        "closed": 1,
    }
    assert [entry["body"]["submission_id"] for entry in entries if entry["kind"] == "score"] == [1, 2, 3]
    (status,) = place.facts("status", folder)
    facts = {run["run_id"][:-9]: run for run in status["runs"]}
    assert {name: (run["state"], run["accepted"], run["waiting"], run["attempt"]) for name, run in facts.items()} == {
        "alpacaeval-mini-null-tiny-free-s0": ("finished", 0, 0, 1),
        "alpacaeval-mini-sparse-tiny-free-s0": ("finished", 3, 0, 2),
        "alpacaeval-mini-sparse-tiny-free-s1": ("finished", 3, 0, 1),
    }
    assert facts["alpacaeval-mini-sparse-tiny-free-s0"]["left_s"] < 3559.42  # what the first attempt used stays used

    verdicts = place.facts("verify", folder)
    assert all(verdict["whole"] for verdict in verdicts) and len(verdicts) == 4, verdicts
    _exported_and_scored_again(place, killed)


def _code_of_now(place: Place, folder: Path) -> None:
    """Lets the stored experiment have frozen the code of this version. A launch that its site refuses freezes it."""
    record = json.loads((folder / "experiment.json").read_text())
    (place.path / "jobs" / "clusters").mkdir(parents=True)
    (place.path / "jobs" / "clusters" / "site.yaml").write_text(SITE)
    frozen = place.path / "frozen.yaml"
    frozen.write_text(
        (folder / "experiment.yaml").read_text().replace("name: interrupted", "name: frozen\ncluster: site")
    )
    done = place.run("launch", frozen)
    assert done.returncode and "this site takes no jobs" in done.stderr, done.stderr
    (code,) = (place.path / "runs" / "frozen" / "code").iterdir()
    (folder / "code").mkdir(exist_ok=True)
    code.rename(folder / "code" / code.name)
    text = (
        (folder / "experiment.json")
        .read_text()
        .replace(record["code_hash"], code.name)
        .replace(MADE_AT, str(place.path))
    )
    alter(folder / "experiment.json", text.encode())
    for run in record["runs"]:
        with_code_of(folder / run, record["code_hash"], code.name)
    for path in folder.glob("*/workspace.json"):
        alter(path, path.read_bytes().replace(MADE_AT.encode(), str(place.path).encode()))


def _wait_until_over(place: Place, folder: Path) -> None:
    """Waits until each run is finished; fails when no job is left that could finish one. The agent of a first attempt is told to go on."""
    deadline, look = time.monotonic() + LIMIT_S, time.monotonic() + 15
    while len(list((folder / "finished").iterdir())) < 3:
        for output in (place.path / "scratch" / "interrupted").glob("*-s1-*/output"):
            (output / "second").touch()
            (output / "third").touch()
        if time.monotonic() > look:
            (status,) = place.facts("status", folder)
            logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in (folder / "jobs").glob("*.out"))
            assert status["jobs"] and time.monotonic() < deadline, f"{json.dumps(status, indent=1)}\n{logs}"
            look += 15
        time.sleep(0.1)


def _exported_and_scored_again(place: Place, run: Path) -> None:
    bundle = place.path / "run.tar.gz"
    assert place.facts("export", run, "--out", bundle)
    with tarfile.open(bundle) as packed:
        names = {re.sub(r"[0-9a-f]{64}|\d{6}", "#", name.replace(run.name, "RUN")) for name in packed.getnames()}
    assert names == EXPORTED
    found = place.facts("rescore", bundle, "--device", "cpu")
    assert found["selected"]["word"] == "identical" and found["base"]["word"] == "identical", found
