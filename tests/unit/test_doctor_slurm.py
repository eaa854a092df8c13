"""What the doctor says of Slurm, from made-up answers of its clients, and of two nodes, from the results of a pair."""

from __future__ import annotations

from typing import Any

import patients
import pytest
from patients import Fake, by_name, profile, state

from autorl_hpc.doctor import scheduler, trial_jobs

fake = patients.fake

# --- limits ---


def test_limits_of_a_user_and_of_the_account(fake: Fake) -> None:
    fake(
        "sacctmgr",
        """case "$*" in
        *qos*) echo 'normal||||||||gres/gpu=4'; echo 'normal||||||||'; echo 'torn|line' ;;
        *user=\\ *) echo 'lab||||||||||gres/gpu=1'; echo 'lab|somebody|||||||||' ;;
        *) echo 'lab|me||normal||500|||||'; echo 'lab|me||normal||500||||' ;;
        esac""",
    )
    config = {"AccountingStorageEnforce": "associations,limits", "ClusterName": "c"}
    found = by_name(scheduler.check_limits(config, profile()))
    assert found["your accounts"].value == "lab"
    assert "MaxSubmit 500" in found["account lab"].value
    assert state(found["account lab, all users"]) == "warning"
    assert "step" in found["account lab, all users"].do_this
    assert state(found["qos normal"]) == "ok"


# --- partitions and GPUs by name ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(null)", {}),
        ("gpu:4", {"": 4}),
        ("gpu:a100:4(S:0-1),gpu:v100:2(S:0,3),lscratch:1", {"a100": 4, "v100": 2}),
        ("gpu:1g.10gb:7,mps:100", {"1g.10gb": 7}),
        ("gpu", {"": 1}),
        ("shard:gpu:4,,", {}),
    ],
)
def test_gres_of_a_node(text: str, expected: dict[str, int]) -> None:
    assert scheduler.gres(text) == expected


SCONTROL = """PartitionName=gpu Default=YES MaxTime=1-00:00:00 State=UP
PartitionName=old Default=NO MaxTime=UNLIMITED State=DOWN
PartitionName=cpu MaxTime=30 State=UP
nonsense
"""
SINFO = "gpu|2/1/1/4|gpu:a100:4(S:0-1)\ngpu|0/1/0/1|gpu:1g.10gb:7\ncpu|0/0/2/2|(null)\nold|x/y|gpu:2\ntorn\n"


def test_partitions_as_told() -> None:
    known = scheduler.read(SCONTROL, SINFO)
    gpu, old, cpu = known["gpu"], known["old"], known["cpu"]
    assert (gpu.usable, gpu.nodes, gpu.gpus, gpu.max_time_s) == (4, 5, {"a100": 4, "1g.10gb": 7}, 86400)
    assert (old.up, old.max_time_s) == (False, None)
    lines = by_name(scheduler.lines(known, profile(report={"partition": "cpu"}, grader={"partition": "old"})))
    assert state(lines["partition gpu"]) == "ok"
    assert state(lines["partition cpu"]) == "warning" and "0 of 2 nodes" in lines["partition cpu"].value
    assert state(lines["partition old"]) == "warning" and "down" in lines["partition old"].value
    assert state(by_name(scheduler.lines(known, profile(partition="gpux")))["partition gpux"]) == "problem"
    assert state(scheduler.lines({}, profile())[0]) == "problem"
    assert cpu.max_time_s == 1800


# --- a pair of nodes


def raw() -> tuple[dict[str, Any], dict[str, Any]]:
    """Two nodes, everything seen and answered after 0.1 s."""
    a: dict[str, Any] = {"node": "n1", "boot": "1", "stopped": "", "lags": dict.fromkeys(trial_jobs.WAYS, 0.1)}
    a |= {"race": ["won", "lost"] * 15, "held": "granted"}
    b: dict[str, Any] = {"node": "n2", "boot": "2", "stopped": ""}
    b |= {"race": ["lost", "won"] * 15, "tried": "refused", "again": "granted"}
    return a, b


RENAMED, LISTED, RACE = "renamed over, by open()", "new file, by listing", "link, raced"


@pytest.mark.parametrize(
    ("a", "b", "check", "expected", "words"),
    [
        ({}, {}, LISTED, "ok", "100 ms"),
        ({}, {}, "flock", "ok", "excludes"),
        ({}, {}, RACE, "ok", "15 to one side"),
        ({}, {"boot": "1"}, "the two nodes", "note", "one machine"),
        ({"lags": {"listed": 20.0}}, {}, LISTED, "warning", "20 s"),
        ({"lags": {"listed": 20.0}}, {}, RENAMED, "unknown", "not come so far"),
        ({"race": ["won"] * 30}, {"race": ["won"] + ["lost"] * 29}, RACE, "problem", "1 won by both"),
        ({"race": ["lost", "lost"] * 15}, {}, RACE, "note", "15 to nobody"),
        ({"held": "refused"}, {"tried": "refused"}, "flock", "note", "first refused, then refused"),
        ({"stopped": "no answer", "race": None}, {"tried": None}, "the pair", "problem", "no answer"),
        ({"race": None}, {}, RACE, "unknown", "not come so far"),
    ],
)
def test_what_two_nodes_saw(a: dict[str, Any], b: dict[str, Any], check: str, expected: str, words: str) -> None:
    first, second = raw()
    found = by_name(trial_jobs.judge_pair({**first, **a}, {**second, **b}))[check]
    assert state(found) == expected and words in found.value


def test_a_dry_submission_in_the_schedulers_words(fake: Fake) -> None:
    fake("sbatch", 'cat >/dev/null; echo "sbatch: Job 7 to start at 2001-01-01T00:00:00 using $*" >&2')
    found = scheduler.dry(profile(account="lab"))
    assert [state(f) for f in found] == ["ok"] * 3 and "at once" in found[0].value
    fake("sbatch", "echo 'sbatch: error: Invalid account or account/partition combination specified' >&2; exit 1")
    refused = scheduler.dry(scheduler.UNNAMED)[0]
    assert state(refused) == "problem" and "account" in refused.do_this
