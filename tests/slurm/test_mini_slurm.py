"""mini on the real Slurm: the same story, with a requeue in the middle of a command."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from driver_server import DriverServer
from miniparts import parts
from ministory import KEY, assert_told, engineer, experiment
from slurm_world import World

if TYPE_CHECKING:
    from conftest import Sandbox

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1500)]

parts()

WAITS = 'echo "attempt $AUTORL_ATTEMPT" >> output/attempts; [ "$AUTORL_ATTEMPT" -gt 1 ] || sleep 900'


@pytest.mark.soak
def test_mini_trains_submits_improves_and_outlives_a_requeue(
    world: Callable[..., World], slurm: Sandbox, tmp_path: Path
) -> None:
    here = world(slurm)
    with DriverServer(partial(engineer, waits=WAITS), key=KEY, model="scripted") as driver:
        here.launch(["mini"], grader={"idle_exit_s": 900}, **experiment(driver, tmp_path, "arithmetic"))
        (run,) = here.runs
        here.wait_agent(run)
        slurm.client("scontrol", "requeue", here.job_of("agents", 0))
        here.wait_over()
    here.assert_whole()
    assert_told(here, run)
    assert driver.conversations[-1].text.count("interrupted before this command's outcome was known") == 1
