"""The executed route: trainers that logged steps, weights that changed, scripts that ran."""

from __future__ import annotations

from typing import Any

import pytest

from autorl_hpc.records.ledger import Fingerprint
from autorl_hpc.records.recorded import TrainingPoint
from autorl_hpc.report.routes import Planned, Seen, executed, mode_kept
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


def test_steps_are_those_of_each_log_once() -> None:
    points = [*steps("SFTTrainer", count=5), *steps("GRPOTrainer", 500, count=3, source="grpo.log")]
    assert executed(points, [], None, UNPLANNED).steps == 50 + 30


def test_weights_that_are_the_base_models_outweigh_a_log() -> None:
    told = executed(steps("GRPOTrainer"), [], weights(flags=("untrained_copy",), relative_delta=1e-9), UNPLANNED)
    assert told.route is Route.COPY
    assert "40 training steps were logged" in told.notes[0]
    assert executed([], [], None, UNPLANNED, is_base=True).route is Route.COPY
    assert (
        executed([], [], weights(flags=("foreign_weights",), nearest_model="b/c", nearest_delta=0.0), UNPLANNED).route
        is Route.COPY
    )


def test_changed_weights_without_a_log_are_unknown_unless_the_script_ran() -> None:
    plan = Planned(Route.GRPO, confidence=0.8, scripts=("code/grpo_min.py",))
    assert executed([], [], weights(), plan).route is Route.UNKNOWN
    assert executed([], [Seen("python other.py")], weights(), plan).route is Route.UNKNOWN
    told = executed([], [Seen("CUDA_VISIBLE_DEVICES=0 python -u grpo_min.py", 55.0)], weights(), plan)
    assert told.route is Route.GRPO
    assert told.evidence[0].where == "process at 55 s"
    assert (
        executed(
            [], [Seen("python grpo_min.py")], weights(), Planned(Route.GRPO, confidence=0.4, scripts=("grpo_min.py",))
        ).route
        is Route.UNKNOWN
    )
    assert executed([], [Seen("python grpo_min.py")], None, plan).route is Route.UNKNOWN


def test_averages() -> None:
    assert executed([], [Seen("mergekit-yaml m.yaml out")], weights(), UNPLANNED).route is Route.AVERAGING
    soup = Planned(Route.AVERAGING, confidence=0.9, scripts=("soup.py",))
    assert executed([], [Seen("python soup.py")], weights(), soup).route is Route.AVERAGING
    parent = Fingerprint(submission_id=2, content_hash="cd" * 32, relative_delta=0.010)
    on_the_line = weights(relative_delta=0.006, parent=2, parent_delta=0.0041)
    beside_it = weights(relative_delta=0.008, parent=2, parent_delta=0.006)
    at_its_end = weights(relative_delta=0.010, parent=2, parent_delta=0.0001)
    assert executed([], [], on_the_line, UNPLANNED, parent_fingerprint=parent).route is Route.AVERAGING
    assert executed([], [], beside_it, UNPLANNED, parent_fingerprint=parent).route is Route.UNKNOWN
    assert executed([], [], at_its_end, UNPLANNED, parent_fingerprint=parent).route is Route.UNKNOWN


def test_nothing_submitted_and_nothing_logged_is_none() -> None:
    assert executed([], [], None, Planned(Route.GRPO, confidence=1.0), submitted=False).route is Route.NONE
    assert executed([], [Seen("mergekit-yaml a b")], None, UNPLANNED, submitted=False).route is Route.NONE
    assert executed(steps("SFTTrainer"), [], None, UNPLANNED, submitted=False).route is Route.SFT


def test_the_order_of_points_makes_no_difference() -> None:
    points = [*steps("SFTTrainer", 100), *steps("GRPOTrainer", 900)]
    assert executed(points, [], None, UNPLANNED) == executed(points[::-1], [], None, UNPLANNED)


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


def test_every_route_has_its_modes() -> None:
    assert all(mode_kept("free", route) is True for route in Route)
    assert mode_kept("another", Route.SFT) is None
