"""An adapter through the whole loop: an agent trains it with peft, submits it, and the grader scores the sum."""

from __future__ import annotations

import pytest
from helpers import PATIENCE_S, Cluster, wait_for

pytest.importorskip("peft")

AGENT = """#!/usr/bin/env bash
set -e
cd "$WORKSPACE"
python - <<'PYTHON'
import os
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

torch.manual_seed(0)
base = AutoModelForCausalLM.from_pretrained(os.environ["MODEL_PATH"])
model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "up_proj"]))
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.01)
model.save_pretrained("output/adapter")
model.merge_and_unload().save_pretrained("output/full")
PYTHON
./submit output/adapter --wait
./submit output/full --wait
"""


def test_an_adapter_is_scored_as_its_merged_model(cluster: Cluster) -> None:
    cluster.mini_task()
    cluster.agent("lora", AGENT)
    (run_id,) = cluster.prepare(["lora"], matrix={"task": "mini"})
    grader, supervisor = cluster.grader(), cluster.supervisor(run_id)
    assert supervisor.wait(PATIENCE_S) == 0, cluster.logs()
    wait_for(lambda: cluster.finished([run_id]), "the run's end")
    grader.terminate()
    view = cluster.view(run_id)
    adapter, full = view.accepted()
    assert adapter.adapter is not None and (adapter.adapter.rank, adapter.adapter.tensors) == (4, 4)
    assert full.adapter is None and not adapter.is_base
    first, second = view.score_of(adapter), view.score_of(full)
    assert first is not None and second is not None
    assert first.evaluation.content_hash == adapter.content_hash
    assert first.evaluation.score is not None and first.evaluation.score == second.evaluation.score
    assert not view.refused()
    assert view.closed is not None and view.closed.selected in (adapter.submission_id, full.submission_id)
