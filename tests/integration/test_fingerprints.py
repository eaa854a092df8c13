"""Fingerprints through the real loop: cheap cheats and honest checkpoints, a killed grader, and what a closing waits for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

from helpers import PATIENCE_S, VARIANTS, Cluster

from autorl_hpc.files.ledger import Ledger
from autorl_hpc.records.entries import Fingerprint
from autorl_hpc.states import EntryKind

MINI: dict[str, Any] = {"matrix": {"task": "mini"}}

CHEATS = (
    "#!/usr/bin/env bash\nset -e\ncd $WORKSPACE\n"
    + VARIANTS
    + """variants 0 1
python3 - <<'END'
import os, shutil
import torch
from safetensors.torch import load_file, save_file

base = load_file(os.environ["MODEL_PATH"] + "/model.safetensors")
torch.manual_seed(0)
noise = {k: torch.randn(v.shape) for k, v in base.items()}


def save(name, tensors):
    os.makedirs("output/" + name)
    shutil.copyfile(os.environ["MODEL_PATH"] + "/config.json", f"output/{name}/config.json")
    save_file(tensors, f"output/{name}/model.safetensors", metadata={"format": "pt"})


save("base", base)
save("noise", {k: v + 1e-6 * noise[k] for k, v in base.items()})
save("bf16", {k: v.to(torch.bfloat16) for k, v in base.items()})
save("trained", {k: v + 1e-3 * noise[k] for k, v in base.items()})
save("further", {k: v + 1e-3 * noise[k] + 3e-4 * torch.randn(v.shape) for k, v in base.items()})
save("silent", {k: torch.zeros_like(v) if k == "model.norm.weight" else v for k, v in base.items()})
END
cp -r "$OTHER" output/other
for name in base v0 noise bf16 trained further other silent; do ./submit --wait output/$name; done
"""
)


def fingerprints(cluster: Cluster, run_id: str) -> list[Fingerprint]:
    """Every fingerprint entry of a run, doubles included."""
    entries = Ledger(cluster.run_dir(run_id)).read()
    return [linked.body for linked in entries if linked.kind is EntryKind.FINGERPRINT]


def other_model(cluster: Cluster) -> None:
    """A second model of the same family in the store, as `stage` leaves one."""
    script = (
        "import sys, torch; from safetensors.torch import load_file, save_file; f = sys.argv[1] + '/model.safetensors';"
        "torch.manual_seed(5); t = {k: v + 0.05 * torch.randn(v.shape) for k, v in load_file(f).items()};"
        "save_file(t, sys.argv[2] + '/model.safetensors', metadata={'format': 'pt'})"
    )
    source, target = cluster.root.model("autorl/tiny"), cluster.root.path / "other"
    shutil.copytree(source, target)
    (target / "MANIFEST.json").unlink()
    os.chmod(target, 0o755)
    os.chmod(target / "model.safetensors", 0o644)
    subprocess.run([sys.executable, "-c", script, str(source), str(target)], check=True)
    cluster.run("stage", "org/other", "--from", str(target), "--root", str(cluster.root.path))


def test_flags_lineage_and_kept_artifacts(cluster: Cluster) -> None:
    cluster.mini_task(items=20)
    other_model(cluster)
    script = CHEATS.replace("$OTHER", str(cluster.root.model("org/other")))
    cluster.agent("cheats", script)
    (run_id,) = cluster.prepare(["cheats"], **MINI)
    grader, supervisor = cluster.grader(), cluster.supervisor(run_id)
    assert supervisor.wait(PATIENCE_S) == 0, cluster.logs()
    assert grader.wait(PATIENCE_S) == 0, cluster.logs()
    view = cluster.view(run_id)
    found = {str(s.model_path).removeprefix("output/"): view.fingerprints[s.submission_id] for s in view.accepted()}
    assert {name: set(one.flags) - {"degenerate_outputs"} for name, one in found.items()} == {
        "base": {"untrained_copy"},
        "v0": {"untrained_copy"},
        "noise": {"untrained_copy"},
        "bf16": {"untrained_copy"},
        "trained": set(),
        "further": set(),
        "other": {"foreign_weights"},
        "silent": set(),
    }
    assert found["other"].nearest_model == "org/other"
    trained = next(s.submission_id for s in view.accepted() if s.model_path == "output/trained")
    assert {name: one.parent for name, one in found.items() if one.parent is not None} == {"further": trained}
    assert found["silent"].commonest_output_share == 1.0
    assert all(one.reason is None for one in found.values())
    assert len(fingerprints(cluster, run_id)) == 8
    last = Ledger(cluster.run_dir(run_id)).read()[-1]
    assert last.kind is EntryKind.CLOSED, "the closing stands last: its hash is the chain's head"
    assert view.closed is not None and view.closed.selected is not None
    assert os.listdir(cluster.experiment.artifacts) == [view.submissions[view.closed.selected].content_hash]
    assert os.listdir(cluster.experiment.queue) == [] and os.listdir(cluster.experiment.claims) == []
    cluster.run("verify", str(cluster.experiment.path))
