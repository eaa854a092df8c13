"""Graders that die, race, or find what they need altered: every score stands once, and the blame is right."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from held_graders import HeldGraders
from helpers import PATIENCE_S, SUBMITS_ONE, VARIANTS, Cluster, wait_for

from autorl_hpc.files.ledger import Ledger
from autorl_hpc.launch.local import processes
from autorl_hpc.records.entries import Score
from autorl_hpc.states import EntryKind, Fault, Split

MINI: dict[str, Any] = {"matrix": {"task": "mini"}}

EXPLODES = (
    "#!/usr/bin/env bash\nset -e\ncd $WORKSPACE\n"
    + VARIANTS
    + """variants 0 1
python3 - <<'END'
from safetensors.torch import load_file, save_file
path = "output/v0/model.safetensors"
tensors = load_file(path)
# Finite, as intake demands, but the forward pass overflows: sampling from the probabilities then fails.
wild = ("q_proj.weight", "k_proj.weight")
save_file({k: v * 1e30 if k.endswith(wild) else v for k, v in tensors.items()}, path, metadata={"format": "pt"})
END
./submit output/v0
"""
)


def scores_in_ledger(cluster: Cluster, run_id: str) -> list[Score]:
    """Every score entry of a run, doubles included."""
    entries = Ledger(cluster.run_dir(run_id)).read()
    return [linked.body for linked in entries if linked.kind is EntryKind.SCORE]


def assert_nothing_waits(cluster: Cluster) -> None:
    """Queue and claims are empty."""
    assert os.listdir(cluster.experiment.queue) == []
    assert os.listdir(cluster.experiment.claims) == []


def test_a_stopped_grader_gives_its_claim_back_and_that_of_a_killed_one_is_taken_over(cluster: Cluster) -> None:
    cluster.mini_task()
    run_id = cluster.sealed_run(**MINI)
    held, claim = HeldGraders(cluster), [f"f-{run_id}--000001.g0001"]
    (first,) = held.start()
    assert scores_in_ledger(cluster, run_id) == [] and os.listdir(cluster.experiment.claims) == claim
    first.terminate()
    assert first.wait(PATIENCE_S) == 130
    assert os.listdir(cluster.experiment.claims) == []
    assert [beat["state"] for beat in cluster.heartbeats()] == ["ended"]
    (second,) = held.start()
    assert os.listdir(cluster.experiment.claims) == claim
    second.kill()
    assert cluster.grader().wait(PATIENCE_S) == 0, cluster.logs()
    (score,) = scores_in_ledger(cluster, run_id)
    assert score.generation == 2 and score.evaluation.score is not None
    assert cluster.finished([run_id])
    assert_nothing_waits(cluster)


JOB = """
import sys
from pathlib import Path
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.launch.local import run_graders
sys.exit(run_graders(ExperimentDir(Path(sys.argv[1])), 20.0))
"""
"""What a Slurm job of graders runs, with little patience with one that hangs."""


def test_a_job_starts_its_grader_again_more_often_than_the_chain_has_links(cluster: Cluster) -> None:
    """Three kills used up the chain, and submissions waited until a person launched again; and so they did for a grader that was
    stopped."""
    cluster.mini_task()
    run_id = cluster.sealed_run(**MINI, grader={"device": "cpu", "stale_after_s": 3, "chain": 3})
    command = [sys.executable, "-c", JOB, str(cluster.experiment.path)]
    job = subprocess.Popen(command, env={**cluster.env, "SLURM_JOB_ID": "1"}, cwd=cluster.root.path)
    cluster.processes.append(job)

    def grader() -> int | None:
        """The pid of the grader behind the job's first process, once it gives signs of life."""
        found = {pid for pid, words in processes(cluster.experiment).items() if words[0] == "grader"}
        return next((beat["pid"] for beat in cluster.heartbeats() if beat["pid"] in found), None)

    for deaths in range(1, 5):
        sent, how = (
            (signal.SIGKILL, "died (-9)") if deaths < 4 else (signal.SIGSTOP, "gave no sign of life and was killed")
        )
        os.kill(int(wait_for(grader, what="a grader")), sent)
        word = f"the grader {how}, {deaths} in a row"
        wait_for(lambda: any(word in (beat.get("problem") or "") for beat in cluster.heartbeats()), what=word)  # noqa: B023
        if deaths == 4:
            facts = json.loads(cluster.run("status", str(cluster.experiment.path), "--json").stdout)
            assert word in str(facts)
    assert job.wait(PATIENCE_S) == 0, cluster.logs()
    assert cluster.finished([run_id]) and len(scores_in_ledger(cluster, run_id)) == 1


def test_two_graders_race_over_their_submissions(cluster: Cluster) -> None:
    cluster.mini_task(2, max_new_tokens=2)
    script = (
        "#!/usr/bin/env bash\nset -e\ncd $WORKSPACE\n"
        + VARIANTS
        + """variants $((AUTORL_SEED * 6)) 6
for folder in output/v*; do
  echo "{\\"schema_version\\": 1, \\"model_path\\": \\"$folder\\"}" > submissions/.tmp-x
  mv submissions/.tmp-x "submissions/${folder#output/}.json"
done
while [ "$(ls results | wc -l)" -lt 6 ]; do sleep 0.1; done
"""
    )
    cluster.agent("many", script)
    run_ids = cluster.prepare(["many"], matrix={"task": "mini", "seed": [0, 1]}, grader={"stale_after_s": 600})
    supervisors = [cluster.supervisor(run_id) for run_id in run_ids]
    assert [process.wait(PATIENCE_S) for process in supervisors] == [0, 0], cluster.logs()
    waiting = [name for name in os.listdir(cluster.experiment.queue) if name.startswith("f-")]
    assert len(waiting) == 12
    held = HeldGraders(cluster)
    graders = held.start(2)  # one that is slower to start would else find nothing left
    held.let_go()
    assert [process.wait(PATIENCE_S) for process in graders] == [0, 0], cluster.logs()

    scores = [(run_id, score) for run_id in run_ids for score in scores_in_ledger(cluster, run_id)]
    assert len(scores) == 12
    assert len({(run_id, score.submission_id) for run_id, score in scores}) == 12
    assert all(score.evaluation.score is not None and score.generation == 1 for _, score in scores)
    by_grader = [sum(score.grader == name for _, score in scores) for name in {s.grader for _, s in scores}]
    assert len(by_grader) == 2 and min(by_grader) >= 2, by_grader  # one each when they are let go
    assert cluster.finished(run_ids)
    assert_nothing_waits(cluster)
    # The base model: measured twice, by one grader alone, for each of the two splits.
    measured = [path for path in cluster.experiment.baselines.iterdir() if path.name.endswith(".json")]
    assert len(measured) == 2
    assert all('"repeat_score":null' not in path.read_text() for path in measured)
    assert cluster.logs_of("grader").count("measuring the base model") == 2
    done = cluster.run("verify", str(cluster.experiment.path))
    assert "2 runs, 0 damaged" in done.stdout


def test_an_altered_artifact_is_the_clusters_fault_and_one_that_breaks_the_engine_its_own(cluster: Cluster) -> None:
    cluster.mini_task(temperature=1.0)
    cluster.agent("one", SUBMITS_ONE)
    cluster.agent("wild", EXPLODES)
    run_ids = cluster.prepare(["one", "wild"], matrix={"task": "mini", "agent": ["one", "wild"]})
    altered, wild = sorted(run_ids, key=lambda run_id: "-wild-" in run_id)
    for run_id in run_ids:
        assert cluster.supervisor(run_id).wait(PATIENCE_S) == 0, cluster.logs()
    (submission,) = cluster.view(altered).accepted()
    assert cluster.view(wild).accepted(), cluster.answers(wild)
    alter(cluster.experiment.artifacts / str(submission.content_hash) / "model.safetensors")
    done = cluster.run("verify", str(cluster.experiment.path), check=False)
    assert done.returncode == 1 and f"artifacts/{str(submission.content_hash)[:16]}... was altered" in done.stdout
    assert cluster.grader().wait(PATIENCE_S) == 0, cluster.logs()
    assert cluster.logs_of("grader").count("Traceback") == 2, "of the engine alone"
    for run_id, fault, words, selected_by in (
        (altered, Fault.CLUSTER, "changed after intake", "infrastructure"),
        (wild, Fault.ARTIFACT, "failed on it twice, and works for the base model", "base_kept"),
    ):
        (score,) = scores_in_ledger(cluster, run_id)
        assert score.evaluation.score is None and score.evaluation.fault is fault
        assert words in str(score.evaluation.reason)
        closed = cluster.view(run_id).closed
        assert closed is not None and closed.selected_by == selected_by and closed.fault is fault
        assert (closed.report is not None and closed.report.score is not None) == (run_id == wild)


def alter(path: Path) -> None:
    """Flips a bit near a file's end, as a person with the owner's rights may."""
    os.chmod(path.parent, 0o700)
    os.chmod(path, 0o600)
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


def test_a_store_changed_after_launch_gives_no_score(cluster: Cluster) -> None:
    cluster.mini_task()
    run_id = cluster.sealed_run(**MINI)
    path, message = (
        cluster.root.model("autorl/tiny") / "model.safetensors",
        "model.safetensors of autorl/tiny has sha256",
    )
    kept = cluster.root.path / "kept-aside"
    shutil.copyfile(path, kept)
    alter(path)
    grader = cluster.grader()
    wait_for(lambda: message in cluster.logs_of("grader"), what=message)
    wait_for(lambda: cluster.logs_of("grader").count("goes back to the queue") >= 2, what="two entries to go back")
    assert scores_in_ledger(cluster, run_id) == []
    assert f"f-{run_id}--000001.json" in os.listdir(cluster.experiment.queue)
    grader.kill()
    grader.wait()
    os.replace(kept, path)  # put back: nothing was lost
    assert cluster.grader().wait(PATIENCE_S) == 0, cluster.logs()
    (score,) = scores_in_ledger(cluster, run_id)
    assert score.evaluation.score is not None and score.evaluation.split is Split.FEEDBACK


def test_a_submission_killed_between_ledger_and_queue_is_scored_all_the_same(cluster: Cluster) -> None:
    """Its queue entry is missing when the run is sealed without an agent: the sealing puts it."""
    cluster.mini_task()
    cluster.agent("one", SUBMITS_ONE + "sleep 600\n")
    (run_id,) = cluster.prepare(["one"], **MINI)
    supervisor = cluster.supervisor(run_id)
    entry = cluster.experiment.queue / f"f-{run_id}--000001.json"
    wait_for(entry.exists, what="the submission")
    supervisor.kill()
    supervisor.wait()
    entry.unlink()
    cluster.run("cancel", str(cluster.experiment.path))
    assert cluster.grader().wait(PATIENCE_S) == 0, cluster.logs()
    assert len(scores_in_ledger(cluster, run_id)) == 1
    assert cluster.finished([run_id])
