"""What `rescore` takes of a run's grader, and what of the machine that it runs on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autorl_hpc.cluster.vllm_program import PROGRAM_VARIABLE
from autorl_hpc.errors import AutorlError
from autorl_hpc.evidence import rescore
from autorl_hpc.evidence.rescore import MAX_BATCH_TOKENS, RescoreOptions, grader_here, rescore_bundle
from autorl_hpc.files.layout import Root
from autorl_hpc.records.experiment import GraderSpec


def test_all_settings_of_the_run_but_what_is_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescore, "default_bytes", lambda: 2**30)
    spec = GraderSpec.model_validate(
        {"engine": "vllm", "device": "cuda", "tensor_parallel": 2, "context_tokens": 2048, "gpu_memory": 0.4}
        | {"sleep_after_s": 5, "threads": 10**6, "batch_tokens": MAX_BATCH_TOKENS + 1, "cache_gib": 10**6}
    )
    here = grader_here(spec, RescoreOptions(device="cpu"))
    changed = {name for name in GraderSpec.model_fields if getattr(here, name) != getattr(spec, name)}
    assert changed == {"device", "threads", "batch_tokens", "cache_gib"}
    assert (here.device, here.batch_tokens, here.cache_gib) == ("cpu", MAX_BATCH_TOKENS, 1.0)
    assert grader_here(spec, RescoreOptions(engine="transformers")).engine == "transformers"
    assert grader_here(GraderSpec(), RescoreOptions()) == GraderSpec()
    assert GraderSpec.model_validate(here.model_dump()) == here


def test_the_program_of_this_sites_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROGRAM_VARIABLE, "")
    monkeypatch.delenv(PROGRAM_VARIABLE)  # as it was, it is afterwards
    with pytest.raises(AutorlError, match="no cluster profile"):
        rescore_bundle(Root(tmp_path), tmp_path / "none.tar.zst", RescoreOptions(cluster="nowhere-at-all"))
    profile = tmp_path / "here.yaml"
    profile.write_text("name: here\nvllm: /opt/vllm/bin/vllm\n")
    with pytest.raises(AutorlError, match=r"none\.tar\.zst|no such file|bundle"):
        rescore_bundle(Root(tmp_path), tmp_path / "none.tar.zst", RescoreOptions(cluster=str(profile)))
    assert os.environ[PROGRAM_VARIABLE] == "/opt/vllm/bin/vllm"
