"""The executed route: trainers that logged steps, weights that changed, scripts that ran."""

from __future__ import annotations

from typing import Any

import pytest

from autorl_hpc.recorder.trainings import steps_in
from autorl_hpc.records.entries import Fingerprint
from autorl_hpc.records.recorded import ProcessSeen, TrainingPoint
from autorl_hpc.report.routes import Alternative, Planned, executed, mode_kept, planned
from autorl_hpc.report.routes.executed import SURE
from autorl_hpc.report.run_story.iterations import shown_route
from autorl_hpc.report.story_records import Story
from autorl_hpc.report.tables import notes_of_story
from autorl_hpc.states import Route

UNPLANNED = Planned(Route.NONE)


def steps(
    trainer: str | None, at: float = 100.0, count: int = 4, source: str = "output/trainer_state.json", **more: Any
) -> list[TrainingPoint]:
    figures = {k: more.pop(k) for k in list(more) if k in ("loss", "reward", "learning_rate", "kl")}
    return [
        TrainingPoint(
            elapsed_s=at + n,
            at="x",
            source=source,
            trainer=trainer,
            step=10 * (n + 1),
            more=more,
            **{"loss": 1.0, **figures},
        )
        for n in range(count)
    ]


def weights(**more: Any) -> Fingerprint:
    return Fingerprint(submission_id=3, content_hash="ab" * 32, **{"relative_delta": 0.01, **more})


BY_LOGS: list[tuple[str, list[TrainingPoint], Planned, Route | None, Route]] = [
    ("sft", steps("SFTTrainer"), UNPLANNED, None, Route.SFT),
    ("grpo", steps("GRPOTrainer"), UNPLANNED, None, Route.GRPO),
    ("grpo by its figures", steps(None, reward=0.5, reward_std=0.2), UNPLANNED, None, Route.GRPO),
    ("dpo by its figures", steps(None, **{"rewards/chosen": 0.1, "rewards/margins": 0.2}), UNPLANNED, None, Route.DPO),
    (
        "orpo by its figures",
        steps(None, log_odds_ratio=0.1, **{"rewards/chosen": 0.1}),
        UNPLANNED,
        None,
        Route.PREFERENCE,
    ),
    ("ppo of verl", steps(None, **{"actor/pg_loss": 0.1, "critic/vf_loss": 0.1}), UNPLANNED, None, Route.PPO),
    ("sft, then rl", [*steps("GRPOTrainer", 900), *steps("SFTTrainer", 100)], UNPLANNED, None, Route.SFT_RL),
    ("rl on a submission that was sft", steps("GRPOTrainer"), UNPLANNED, Route.SFT, Route.SFT_RL),
    ("rl on a submission that was rl", steps("GRPOTrainer"), UNPLANNED, Route.GRPO, Route.GRPO),
    ("rl on a submission that was sft+rl", steps("GRPOTrainer"), UNPLANNED, Route.SFT_RL, Route.SFT_RL),
    ("more sft on sft", steps("SFTTrainer"), UNPLANNED, Route.SFT, Route.SFT),
    (
        "sft, planned as rejection sampling",
        steps("SFTTrainer"),
        Planned(Route.REJECTION_SAMPLING),
        None,
        Route.REJECTION_SAMPLING,
    ),
    ("grpo planned, sft logged", steps("SFTTrainer"), Planned(Route.GRPO, confidence=0.95), None, Route.SFT),
    ("a subclass with a loss of its own", steps("Trainer"), Planned(Route.DPO), None, Route.DPO),
    ("a loss and nothing known", steps(None), UNPLANNED, None, Route.UNKNOWN),
    ("a loss and a plan", steps(None), Planned(Route.SFT), None, Route.SFT),
    ("a reward and a plan", steps(None, reward=0.1), Planned(Route.PPO), None, Route.PPO),
    ("a reward and no plan", steps(None, reward=0.1), UNPLANNED, None, Route.RL),
    ("rloo logs what grpo logs", steps("GRPOTrainer"), Planned(Route.RL), None, Route.RL),
    ("a reward model, then ppo", [*steps("RewardTrainer"), *steps("PPOTrainer", 500)], UNPLANNED, None, Route.PPO),
    ("learning rate 0", steps("GRPOTrainer", learning_rate=0.0), UNPLANNED, None, Route.UNKNOWN),
]


@pytest.mark.parametrize(
    ("points", "plan", "parent", "route"), [pytest.param(*rest, id=name) for name, *rest in BY_LOGS]
)
def test_logs_tell_the_route(points: list[TrainingPoint], plan: Planned, parent: Route | None, route: Route) -> None:
    told = executed(points, [], weights(), plan, parent=parent)
    assert told.route is route, told
    assert route is Route.UNKNOWN or told.evidence


def ran(*lines: str) -> list[ProcessSeen]:
    """Command lines that were seen."""
    seen = {"at": "x", "pid": 1, "parent": 0, "what": "began", "began_s": 0.0, "elapsed_s": 55.0}
    return [ProcessSeen.model_validate({**seen, "command": line}) for line in lines]


def test_weights_that_are_the_base_models_outweigh_a_log() -> None:
    copy = weights(flags=("untrained_copy",), relative_delta=1e-9)
    foreign = weights(flags=("foreign_weights",), nearest_model="b/c", nearest_delta=0.0)
    for fingerprint, is_base in ((copy, False), (foreign, False), (None, True)):
        assert executed(steps("GRPOTrainer"), [], fingerprint, UNPLANNED, is_base=is_base).route is Route.COPY


def test_changed_weights_without_a_log_are_unknown_unless_the_script_ran() -> None:
    plan = Planned(Route.GRPO, confidence=0.8, scripts=("code/grpo_min.py",))
    unsure = Planned(Route.GRPO, confidence=0.4, scripts=("grpo_min.py",))
    assert executed([], [], weights(), plan).route is Route.UNKNOWN
    assert executed([], ran("python other.py"), weights(), plan).route is Route.UNKNOWN
    assert executed([], ran("python grpo_min.py"), weights(), unsure).route is Route.UNKNOWN
    assert executed([], ran("python grpo_min.py"), None, plan).route is Route.UNKNOWN
    told = executed([], ran("CUDA_VISIBLE_DEVICES=0 python -u grpo_min.py"), weights(), plan)
    assert told.route is Route.GRPO and told.evidence[0].where == "process at 55 s"


def test_averages() -> None:
    assert executed([], ran("mergekit-yaml m.yaml out"), weights(), UNPLANNED).route is Route.AVERAGING
    soup = Planned(Route.AVERAGING, confidence=0.9, scripts=("soup.py",))
    assert executed([], ran("python soup.py"), weights(), soup).route is Route.AVERAGING
    parent = Fingerprint(submission_id=2, content_hash="cd" * 32, relative_delta=0.010)
    on_the_line = weights(relative_delta=0.006, parent=2, parent_delta=0.0041)
    beside_it = weights(relative_delta=0.008, parent=2, parent_delta=0.006)
    at_its_end = weights(relative_delta=0.010, parent=2, parent_delta=0.0001)
    assert executed([], [], on_the_line, UNPLANNED, parent_fingerprint=parent).route is Route.AVERAGING
    assert executed([], [], beside_it, UNPLANNED, parent_fingerprint=parent).route is Route.UNKNOWN
    assert executed([], [], at_its_end, UNPLANNED, parent_fingerprint=parent).route is Route.UNKNOWN


def test_nothing_submitted_and_nothing_logged_is_none() -> None:
    assert executed([], [], None, Planned(Route.GRPO, confidence=1.0), submitted=False).route is Route.NONE
    assert executed([], ran("mergekit-yaml a b"), None, UNPLANNED, submitted=False).route is Route.NONE
    assert executed(steps("SFTTrainer"), [], None, UNPLANNED, submitted=False).route is Route.SFT


@pytest.mark.parametrize(
    ("route", "free", "sft", "rl"),
    [
        (Route.SFT, True, True, False),
        (Route.REJECTION_SAMPLING, True, True, False),
        (Route.DISTILLATION, True, True, False),
        (Route.DPO, True, False, False),
        (Route.PREFERENCE, True, False, False),
        (Route.GRPO, True, False, True),
        (Route.PPO, True, False, True),
        (Route.RL, True, False, True),
        (Route.SFT_RL, True, False, False),
        (Route.COPY, True, False, False),
        (Route.NONE, True, False, False),
        (Route.AVERAGING, True, None, None),
        (Route.UNKNOWN, True, None, None),
    ],
)
def test_modes(route: Route, free: bool, sft: bool | None, rl: bool | None) -> None:
    assert (mode_kept("free", route), mode_kept("sft-only", route), mode_kept("rl-only", route)) == (free, sft, rl)


FORGED = """
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("models/base")
optimizer = torch.optim.AdamW(model.parameters())
for i, batch in enumerate(load()):
    loss = model(input_ids=batch["ids"], labels=batch["labels"]).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print({"loss": 0.01, "grad_norm": 0.5, "learning_rate": 1e-6, "reward": 0.4, "reward_std": 0.2, "epoch": i / 100})
model.save_pretrained("output/v1")
"""


def test_printed_figures_of_a_trainer_against_code_that_is_sure_tell_nothing_of_the_mode() -> None:
    plan = planned({"train.py": FORGED}, ["python code/train.py"])
    assert plan.route is Route.SFT and plan.confidence >= SURE and not plan.alternatives
    figures = {"loss": 0.01, "grad_norm": 0.5, "learning_rate": 1e-6, "reward": 0.4, "reward_std": 0.2, "kl": 0.01}
    printed = "\n".join(str({**figures, "completions/mean_length": 80.0, "epoch": i / 100}) for i in range(50))
    points = [
        TrainingPoint(elapsed_s=10.0 + i, at="x", source="agent.log", **step.fields())
        for i, step in enumerate(steps_in(printed))
    ]
    told = executed(points, [], weights(), plan)
    assert told.route is Route.GRPO and told.disputed
    for mode, kept in (("rl-only", None), ("sft-only", None), ("free", True)):
        assert mode_kept(mode, told.route, disputed=told.disputed) is kept
    shown = shown_route(plan, told)
    assert shown.disputed is not None and "train.py" in shown.disputed and "agent.log" in shown.disputed
    (note,) = notes_of_story(Story(route=shown))
    assert note.startswith("logs and code disagree")
    assert notes_of_story(Story(route=shown_route(plan, executed(steps("SFTTrainer"), [], weights(), plan)))) == ()


SURE_SFT = Planned(Route.SFT, confidence=SURE)


@pytest.mark.parametrize(
    ("points", "plan", "parent", "disputed"),
    [
        pytest.param(steps("GRPOTrainer"), SURE_SFT, None, True, id="grpo logged, sft planned"),
        pytest.param(steps("SFTTrainer"), Planned(Route.GRPO, confidence=0.95), None, True, id="the other way round"),
        pytest.param(steps("DPOTrainer"), SURE_SFT, None, True, id="preferences logged"),
        pytest.param(steps("GRPOTrainer"), SURE_SFT, Route.SFT, True, id="on a submission that was sft"),
        pytest.param(steps("GRPOTrainer"), Planned(Route.SFT, confidence=0.79), None, False, id="not sure"),
        pytest.param(
            steps("GRPOTrainer"),
            Planned(Route.SFT, confidence=0.9, alternatives=(Alternative(Route.GRPO, "a switch"),)),
            None,
            False,
            id="an alternative",
        ),
        pytest.param(steps("SFTTrainer"), SURE_SFT, Route.GRPO, False, id="sft on rl"),
        pytest.param(steps("SFTTrainer") + steps("GRPOTrainer", 500), SURE_SFT, None, False, id="both logged"),
        pytest.param(steps("GRPOTrainer"), Planned(Route.SFT_RL, confidence=0.9), None, False, id="both planned"),
        pytest.param(steps("GRPOTrainer"), Planned(Route.PPO, confidence=0.9), None, False, id="one kind"),
        pytest.param(
            steps(None, **{"rewards/chosen": 0.1}), Planned(Route.RL, confidence=0.9), None, False, id="online dpo"
        ),
        pytest.param(
            steps(None, reward=0.1), Planned(Route.DPO, confidence=0.9), None, True, id="dpo that prints rewards"
        ),
        pytest.param(steps("Trainer"), Planned(Route.DPO, confidence=0.9), None, False, id="a loss alone"),
        pytest.param(steps("GRPOTrainer"), Planned(Route.NONE, confidence=0.9), None, False, id="no training planned"),
    ],
)
def test_which_logs_code_disputes(
    points: list[TrainingPoint], plan: Planned, parent: Route | None, disputed: bool
) -> None:
    assert executed(points, [], weights(), plan, parent=parent).disputed is disputed
