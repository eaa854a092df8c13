"""The executed route: trainers that logged steps, weights that changed, scripts that ran."""

from __future__ import annotations

from typing import Any

import pytest

from autorl_hpc.records.entries import Fingerprint
from autorl_hpc.records.recorded import ProcessSeen, TrainingPoint
from autorl_hpc.report.routes import Alternative, Planned, executed, mode_kept
from autorl_hpc.report.routes.executed import SURE
from autorl_hpc.states import Route

UNPLANNED = Planned(Route.NONE)


def steps(trainer: str | None, at: float = 100.0, **more: Any) -> list[TrainingPoint]:
    own = {"loss": 1.0} | {k: more.pop(k) for k in list(more) if k in ("reward", "learning_rate")}
    fields = {"at": "x", "source": "output/trainer_state.json", "trainer": trainer, "more": more, **own}
    return [TrainingPoint.model_validate({"elapsed_s": at + n, "step": 10 * (n + 1), **fields}) for n in range(4)]


def weights(**more: Any) -> Fingerprint:
    return Fingerprint(submission_id=3, content_hash="ab" * 32, **{"relative_delta": 0.01, **more})


BY_LOGS: dict[Route, dict[str, tuple[Any, ...]]] = {
    Route.SFT: {
        "sft": (steps("SFTTrainer"),),
        "more sft on sft": (steps("SFTTrainer"), UNPLANNED, Route.SFT),
        "grpo planned, sft logged": (steps("SFTTrainer"), Planned(Route.GRPO, confidence=0.95)),
        "a loss and a plan": (steps(None), Planned(Route.SFT)),
    },
    Route.GRPO: {
        "grpo": (steps("GRPOTrainer"),),
        "grpo by its figures": (steps(None, reward=0.5, reward_std=0.2),),
        "rl on a submission that was rl": (steps("GRPOTrainer"), UNPLANNED, Route.GRPO),
    },
    Route.DPO: {
        "dpo by its figures": (steps(None, **{"rewards/chosen": 0.1, "rewards/margins": 0.2}),),
        "a subclass with a loss of its own": (steps("Trainer"), Planned(Route.DPO)),
    },
    Route.PREFERENCE: {
        "orpo by its figures": (steps(None, log_odds_ratio=0.1, **{"rewards/chosen": 0.1}),),
    },
    Route.PPO: {
        "ppo of verl": (steps(None, **{"actor/pg_loss": 0.1, "critic/vf_loss": 0.1}),),
        "a reward and a plan": (steps(None, reward=0.1), Planned(Route.PPO)),
        "a reward model, then ppo": ([*steps("RewardTrainer"), *steps("PPOTrainer", 500)],),
    },
    Route.SFT_RL: {
        "sft, then rl": ([*steps("GRPOTrainer", 900), *steps("SFTTrainer", 100)],),
        "rl on a submission that was sft": (steps("GRPOTrainer"), UNPLANNED, Route.SFT),
        "rl on a submission that was sft+rl": (steps("GRPOTrainer"), UNPLANNED, Route.SFT_RL),
    },
    Route.REJECTION_SAMPLING: {
        "sft, planned as rejection sampling": (steps("SFTTrainer"), Planned(Route.REJECTION_SAMPLING)),
    },
    Route.UNKNOWN: {
        "a loss and nothing known": (steps(None),),
        "learning rate 0": (steps("GRPOTrainer", learning_rate=0.0),),
    },
    Route.RL: {
        "a reward and no plan": (steps(None, reward=0.1),),
        "rloo logs what grpo logs": (steps("GRPOTrainer"), Planned(Route.RL)),
    },
}
"""By route: logged steps, what was planned (default: nothing), and the route of the submission that they go on from."""


@pytest.mark.parametrize(
    ("case", "route"), [pytest.param(case, r, id=name) for r, cases in BY_LOGS.items() for name, case in cases.items()]
)
def test_logs_tell_the_route(case: tuple[Any, ...], route: Route) -> None:
    points, *rest = case
    told = executed(points, [], weights(), rest[0] if rest else UNPLANNED, parent=rest[1] if rest[1:] else None)
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
    ("route", "sft", "rl"),
    [
        *((route, True, False) for route in (Route.SFT, Route.REJECTION_SAMPLING, Route.DISTILLATION)),
        *((route, False, True) for route in (Route.GRPO, Route.PPO, Route.RL)),
        *((r, False, False) for r in (Route.DPO, Route.PREFERENCE, Route.SFT_RL, Route.COPY, Route.NONE)),
        *((route, None, None) for route in (Route.AVERAGING, Route.UNKNOWN)),
    ],
)
def test_modes(route: Route, sft: bool | None, rl: bool | None) -> None:
    assert (mode_kept("free", route), mode_kept("sft-only", route), mode_kept("rl-only", route)) == (True, sft, rl)


SURE_SFT = Planned(Route.SFT, confidence=SURE)


DISPUTED: dict[bool, dict[str, tuple[Any, ...]]] = {
    True: {
        "grpo logged, sft planned": (steps("GRPOTrainer"), SURE_SFT),
        "the other way round": (steps("SFTTrainer"), Planned(Route.GRPO, confidence=0.95)),
        "preferences logged": (steps("DPOTrainer"), SURE_SFT),
        "on a submission that was sft": (steps("GRPOTrainer"), SURE_SFT, Route.SFT),
        "dpo that prints rewards": (steps(None, reward=0.1), Planned(Route.DPO, confidence=0.9)),
    },
    False: {
        "not sure": (steps("GRPOTrainer"), Planned(Route.SFT, confidence=0.79)),
        "an alternative": (
            steps("GRPOTrainer"),
            Planned(Route.SFT, confidence=0.9, alternatives=(Alternative(Route.GRPO, "a switch"),)),
        ),
        "sft on rl": (steps("SFTTrainer"), SURE_SFT, Route.GRPO),
        "both logged": (steps("SFTTrainer") + steps("GRPOTrainer", 500), SURE_SFT),
        "both planned": (steps("GRPOTrainer"), Planned(Route.SFT_RL, confidence=0.9)),
        "one kind": (steps("GRPOTrainer"), Planned(Route.PPO, confidence=0.9)),
        "online dpo": (steps(None, **{"rewards/chosen": 0.1}), Planned(Route.RL, confidence=0.9)),
        "a loss alone": (steps("Trainer"), Planned(Route.DPO, confidence=0.9)),
        "no training planned": (steps("GRPOTrainer"), Planned(Route.NONE, confidence=0.9)),
    },
}
"""Logged steps, what was planned, and the route of the submission that they go on from."""


@pytest.mark.parametrize(
    ("case", "disputed"),
    [pytest.param(case, d, id=name) for d, cases in DISPUTED.items() for name, case in cases.items()],
)
def test_which_logs_code_disputes(case: tuple[Any, ...], disputed: bool) -> None:
    points, plan, parent = (*case, None)[:3]
    assert executed(points, [], weights(), plan, parent=parent).disputed is disputed
