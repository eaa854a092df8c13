"""What a site allows, by its configuration and partitions."""

from __future__ import annotations

import ourjobs
import pytest
from fakes import Clients, lines

from autorl_hpc.cluster import profile as sites
from autorl_hpc.errors import AutorlError
from autorl_hpc.records.cluster import ClusterProfile

clients = ourjobs.clients

PARTITIONS = [
    "PartitionName=gpu AllowGroups=ALL Default=NO DefaultTime=01:00:00 MaxNodes=UNLIMITED MaxTime=1-00:00:00 State=UP",
    "PartitionName=short AllowGroups=ALL Default=YES DefaultTime=NONE OverTimeLimit=NONE MaxTime=04:00:00 State=UP",
    "PartitionName=long AllowGroups=ALL Default=NO MaxTime=UNLIMITED State=UP",
]


@pytest.fixture
def site(clients: Clients, monkeypatch: pytest.MonkeyPatch) -> Clients:
    for name in ("SBATCH_PARTITION", "AUTORL_SBATCH_PARTITION"):
        monkeypatch.delenv(name, raising=False)
    config = (
        "Configuration data as of 2026-01-01T00:00:00\nClusterName             = sim\nMaxArraySize            = 501\n"
    )
    (clients.folder / "config").write_text(config)
    (clients.folder / "partitions").write_text(lines(PARTITIONS))
    clients.script(
        "scontrol", f'case "$*" in *config*) cat {clients.folder}/config;; *) cat {clients.folder}/partitions;; esac'
    )
    return clients


def test_a_site_tells_its_limits(site: Clients) -> None:
    told = sites.ask(ClusterProfile(name="there"))
    assert told.max_array_size == 501
    assert told.limit_s("gpu") == 86400
    assert told.limit_s("gpu,short") == 4 * 3600, "the shorter of two: either may take the job"
    assert told.limit_s(None) == 4 * 3600, "the default partition"
    assert told.limit_s("long") is None
    assert told.limit_s("gpu,long") == 86400


def test_the_profiles_limits_stand_above(site: Clients) -> None:
    limits = {"max_time": "2h", "max_array_size": 100}
    told = sites.ask(ClusterProfile.model_validate({"name": "there", "limits": limits}))
    assert told.max_array_size == 100
    assert {told.limit_s(name) for name in ("gpu", "short", "long", None)} == {7200}


def test_a_users_own_partition_gives_the_limit_where_the_profile_names_none(
    site: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    assert sites.ask(ClusterProfile(name="there")).limit_s(None) == 86400
    monkeypatch.setenv("SBATCH_PARTITION", "long")
    assert sites.ask(ClusterProfile(name="there")).limit_s(None) is None


def test_a_partition_that_is_not_there_is_named(site: Clients) -> None:
    with pytest.raises(AutorlError, match="no partition `gpux`") as caught:
        sites.ask(ClusterProfile.model_validate({"name": "there", "partition": "gpu", "grader": {"partition": "gpux"}}))
    assert caught.value.next_step == "choose one of: gpu, short, long"


def test_a_site_that_says_nothing_gets_slurms_defaults(clients: Clients) -> None:
    clients.says("scontrol", "")
    told = sites.ask(ClusterProfile(name="there"))
    assert told.max_array_size == 1001
    assert told.limit_s(None) is None and told.limit_s("gpu") is None
