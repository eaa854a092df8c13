"""A person in an agent's place, through the whole loop: launch, attach from a terminal, a submission by hand, let go, attach again, exit."""

from __future__ import annotations

from helpers import PATIENCE_S, PYTHON, VARIANTS, Cluster, wait_for
from terminals import Terminal

LET_GO = b"\x1d"


def attached(cluster: Cluster, run_id: str) -> Terminal:
    """`autorl-hpc attach` on a terminal."""
    argv = [*PYTHON, "attach", str(cluster.experiment.run(run_id).path)]
    return Terminal(argv, patience_s=PATIENCE_S, env=cluster.env, cwd=cluster.root.path)


def test_a_person_submits_by_hand(cluster: Cluster) -> None:
    cluster.mini_task()
    (run_id,) = cluster.prepare(
        ["shell"],
        matrix={"task": "mini"},
        budget={"wall_clock": "1h"},
        sandbox={"level": "auto"},
        grader={"idle_exit_s": 900},
    )
    grader, supervisor = cluster.grader(), cluster.supervisor(run_id)
    workspace = cluster.experiment.run(run_id).workspace_link
    wait_for(lambda: workspace.exists() and (cluster.workspace(run_id) / ".terminal").exists(), "the shell")
    (cluster.workspace(run_id) / "code" / "variants.sh").write_text(VARIANTS)
    one = attached(cluster, run_id)
    one.type(b". code/variants.sh; variants 0 1; ./submit output/v0; echo sent-$((6 * 7))\n")
    assert one.sees(b"sent-42"), one.seen[-2000:]
    one.type(LET_GO)
    assert one.process.wait(PATIENCE_S) == 0 and supervisor.poll() is None
    wait_for(lambda: list((cluster.workspace(run_id) / "results").glob("*.json")), "its score")
    other = attached(cluster, run_id)
    other.type(b"ls results | wc -l; ./time | head -c 200; echo again-$((6 * 7)); exit 3\n")
    assert other.sees(b"again-42"), other.seen[-2000:]
    assert other.process.wait(PATIENCE_S) == 0
    assert supervisor.wait(PATIENCE_S) == 0 and grader.wait(PATIENCE_S) == 0, cluster.logs()
    view = cluster.view(run_id)
    assert view.sealed is not None and (str(view.sealed.ended_by), view.sealed.exit_code) == ("agent_exit", 3)
    (submission,) = view.accepted()
    scored = view.score_of(submission)
    assert scored is not None and scored.evaluation.score is not None
    assert view.closed is not None
