"""The scripted experts' routes by their code and the commands that they run. Those that play learn in loops of their own,
whose loss a plain look can't tell: their logs do."""

from __future__ import annotations

from pathlib import Path

import pytest

from autorl_hpc.report.routes import planned
from autorl_hpc.states import Route

SCRIPTED = Path(__file__).resolve().parents[2] / "templates" / "agents" / "scripted"
LAUNCH = "python3 "
SFT = f"{LAUNCH}code/train_sft.py --model models/m --out output/sft --share 0.3"
EPISODES = f"{LAUNCH}code/train_episodes.py --model models/m --out output/sft --share 0.3 --traces output/traces"
GRPO = f"{LAUNCH}code/train_grpo.py --model output/sft --out output/grpo --share 0.9"
ONLINE = f"{LAUNCH}code/train_online.py --model output/sft --out output/online --share 0.95"
COLLECT = "python3 code/collect.py --model models/m --out output/traces --share 0.25"
SAMPLE = "python3 code/sample_right.py --model models/m --out output/kept-1 --round 1 --share 0.25"
CHOOSE = "python3 code/choose.py output/sft output/grpo"
FIT = "python3 code/fit.py models/m 0"

EXPERTS = {
    "sft": ([FIT, SFT], Route.SFT),
    "sft, played": ([COLLECT, FIT, EPISODES], Route.UNKNOWN),
    "grpo": ([FIT, GRPO, CHOOSE], Route.GRPO),
    "grpo, played": ([FIT, ONLINE, CHOOSE], Route.UNKNOWN),
    "sft-grpo": ([FIT, SFT, FIT, GRPO, CHOOSE], Route.SFT_RL),
    "sft-grpo-online": ([COLLECT, FIT, EPISODES, FIT, ONLINE, CHOOSE], Route.UNKNOWN),
    "rejection-sampling": ([SAMPLE, FIT, f"{SFT} --rows output/kept-1/rows.jsonl", CHOOSE], Route.REJECTION_SAMPLING),
    "rejection-sampling, played": ([SAMPLE, FIT, f"{SFT} --traces output/kept-1", CHOOSE], Route.REJECTION_SAMPLING),
}


@pytest.mark.parametrize("expert", EXPERTS)
@pytest.mark.slow
def test_each_expert_is_told_by_its_route(expert: str) -> None:
    commands, route = EXPERTS[expert]
    files = {path.name: path.read_text(encoding="utf-8") for path in SCRIPTED.glob("*.py")}
    found = planned(files, commands)
    assert found.route == route, found
    assert route is Route.UNKNOWN or (found.confidence > 0.6 and not found.alternatives), found
