"""mini through the real loop: a scripted driver has it write training code, train, submit, read the score, improve and end."""

from __future__ import annotations

from pathlib import Path

import pytest
from driver_server import DriverServer
from helpers import PATIENCE_S, Cluster, wait_for
from miniparts import parts
from ministory import KEY, assert_told, engineer, experiment

parts()


@pytest.mark.timeout(1500)
def test_it_trains_submits_reads_improves_and_ends(cluster: Cluster, tmp_path: Path) -> None:
    """Ended early and reprompted, it goes on with its conversation; when its tokens are used up, it submits what it forgot."""
    cluster.mini_task(60, max_new_tokens=32)
    with DriverServer(engineer, key=KEY, model="scripted") as driver:
        (run_id,) = cluster.prepare(["mini"], grader={"idle_exit_s": 900}, **experiment(driver, tmp_path))
        cluster.grader()
        assert cluster.supervisor(run_id).wait(PATIENCE_S) == 0, cluster.logs()
        wait_for(lambda: cluster.finished([run_id]), what="the run's end")
    assert_told(cluster, run_id)
