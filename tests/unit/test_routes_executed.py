"""The executed route: what was observed, trainers that logged steps, weights that changed, scripts that ran.

tests/observed_runs has what real processes told; here stand facts that are rare, forged or odd.
"""

from __future__ import annotations

import random
import time
from typing import Any, get_args

import pytest

from autorl_hpc.records.entries import Fingerprint
from autorl_hpc.records.recorded import ObservedFact, ProcessSeen, TrainingPoint
from autorl_hpc.report.routes import Planned, executed, mode_kept, settings, steps_observed
from autorl_hpc.report.routes.executed import SURE
from autorl_hpc.report.routes.planned import Training
from autorl_hpc.report.story_records import Setting
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
            Planned(Route.SFT, confidence=0.9, alternatives=(Route.GRPO,)),
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


# --- observed facts


def facts(*told: tuple[Any, ...], pid: int = 1, program: str = "code/train.py", at: float = 10.0) -> list[ObservedFact]:
    """Facts of one process, a second apart: what, and its facts."""
    made = [("start", {"argv": ["python", program], "rank": None}), *told]
    common = {"at": "x", "pid": pid, "program": program}
    return [
        ObservedFact.model_validate({**common, "elapsed_s": at + n, "at_s": at + n, "what": what, "facts": given})
        for n, (what, given) in enumerate(made)
    ]


def trained(
    name: str, count: int = 5, *, own: str | None = None, at: float = 11.5, **more: Any
) -> list[tuple[Any, ...]]:
    """Facts of one trainer; `own`: a class of the agent's own that derives from it."""
    names = {"name": own or name, "bases": [name] if own else ["transformers.trainer.Trainer"], **more}
    return [
        ("trainer", {**names, "phase": "began"}),
        ("steps", {"first": 1, "last": count, "count": count, "from_s": at, "to_s": at + 1, "rates": [1e-4, 0.0]}),
        ("trainer", {**names, "phase": "ended", "steps": count}),
    ]


def loop(count: int = 5, at: float = 1.0, rate: float = 1e-4, first: int = 1) -> tuple[Any, ...]:
    rates = [rate, rate]
    return (
        "steps",
        {"first": first, "last": first + count - 1, "count": count, "from_s": at, "to_s": at, "rates": rates},
    )


def asked(before: int, prompts: int = 8, sampled: bool | None = True) -> tuple[Any, ...]:
    return ("generated", {"by": "transformers", "prompts": prompts, "sampled": sampled, "steps_before": before})


def code(route: Route, why: str = "own loop: words", **more: Any) -> Planned:
    return Planned(route, confidence=0.8, trainings=(Training(route, why, "train.py", 3, **more),))


SFT, GRPO, LOADED = (
    "trl.trainer.sft_trainer.SFTTrainer",
    "trl.trainer.grpo_trainer.GRPOTrainer",
    ("loaded", {"path": "models/base"}),
)
ON_SAMPLES = code(Route.REJECTION_SAMPLING, "SFTTrainer", loss=Route.SFT)
BY_FACTS: dict[str, tuple[Any, ...]] = {
    # what a fact must not be taken for: route, facts, plan
    "a trainer": (Route.SFT, facts(*trained(SFT)), UNPLANNED),
    "named grpo, is sft": (
        Route.SFT,
        facts(*trained(SFT, own="__main__.GRPOTrainer")),
        code(Route.GRPO, "GRPOTrainer"),
    ),
    "a verl trainer by its estimator": (
        Route.RL,
        facts(*trained("verl.trainer.ppo.ray_trainer.RayPPOTrainer", arguments={"algorithm.adv_estimator": "rloo"})),
        UNPLANNED,
    ),
    "a torchtune recipe": (Route.SFT, facts(*trained("recipes.x.FullFinetuneRecipeSingleDevice")), UNPLANNED),
    "ipo": (
        Route.PREFERENCE,
        facts(*trained("trl.trainer.dpo_trainer.DPOTrainer", arguments={"loss_type": "ipo"})),
        UNPLANNED,
    ),
    "a class of its own over Trainer": (
        Route.UNKNOWN,
        facts(*trained("transformers.trainer.Trainer", own="__main__.My")),
        UNPLANNED,
    ),
    "its code tells": (
        Route.DPO,
        facts(*trained("transformers.trainer.Trainer", own="__main__.My")),
        code(Route.DPO, "Trainer whose loss is words"),
    ),
    "a grpo of its own that draws no samples": (Route.UNKNOWN, facts(*trained(GRPO, own="__main__.My")), UNPLANNED),
    "a reward model": (Route.UNKNOWN, facts(*trained("trl.trainer.reward_trainer.RewardTrainer")), UNPLANNED),
    "no step": (Route.UNKNOWN, facts(("trainer", {"name": SFT, "bases": [], "phase": "began"})), UNPLANNED),
    "learning rate 0": (Route.UNKNOWN, facts(loop(rate=0)), code(Route.SFT)),
    "a loop and its code": (Route.SFT, facts(loop()), code(Route.SFT)),
    "a loop alone": (Route.UNKNOWN, facts(loop()), UNPLANNED),
    "a loop that its code says samples, and did not": (Route.UNKNOWN, facts(loop()), code(Route.GRPO, samples=True)),
    "samples between steps": (Route.GRPO, facts(loop(9), asked(2), asked(5)), code(Route.GRPO, samples=True)),
    "greedy answers between steps are an evaluation": (
        Route.SFT,
        facts(loop(9), asked(2, sampled=False), asked(5, sampled=False)),
        code(Route.SFT),
    ),
    "rewards and samples without code": (
        Route.RL,
        facts(loop(9), asked(2), asked(5), ("log", {"reward": 0.5})),
        UNPLANNED,
    ),
    "sft, then rl in one process": (
        Route.SFT_RL,
        facts(*trained(SFT), *trained(GRPO, at=14.5)),
        UNPLANNED,
    ),
    "samples first, and nothing tells of which the rows are": (
        Route.UNKNOWN,
        facts(LOADED, asked(0, 64), *trained(SFT, at=13.5, rows=40, model="models/base")),
        UNPLANNED,
    ),
    "samples first, and the code says the rows are others": (
        Route.SFT,
        facts(LOADED, asked(0, 64), *trained(SFT, at=13.5, rows=40, model="models/base")),
        code(Route.SFT, "SFTTrainer"),
    ),
    "samples first, and the code says that the rows are some of them": (
        Route.REJECTION_SAMPLING,
        facts(LOADED, asked(0, 64), *trained(SFT, at=13.5, rows=40, model="models/base")),
        ON_SAMPLES,
    ),
    "planned on samples, and none was drawn": (Route.SFT, facts(*trained(SFT, rows=40)), ON_SAMPLES),
    "samples of an earlier process, in a file that it did not read": (
        Route.REJECTION_SAMPLING,
        [
            *facts(("rows", {"path": "given"}), LOADED, asked(0, 64), pid=2),
            *facts(("rows", {"path": "kept"}), *trained(SFT, at=42.5, rows=40, model="models/base"), at=40.0),
        ],
        UNPLANNED,
    ),
    "an earlier evaluation of the same rows": (
        Route.UNKNOWN,
        [
            *facts(("rows", {"path": "given"}), LOADED, asked(0, 64), pid=2),
            *facts(("rows", {"path": "given"}), *trained(SFT, at=42.5, rows=40, model="models/base"), at=40.0),
        ],
        UNPLANNED,
    ),
    "more rows than samples": (
        Route.SFT,
        facts(LOADED, asked(0, 8), *trained(SFT, at=13.5, rows=400, model="models/base")),
        UNPLANNED,
    ),
    "another model's samples": (
        Route.DISTILLATION,
        facts(LOADED, asked(0, 64), *trained(SFT, at=13.5, rows=40, model="models/small")),
        ON_SAMPLES,
    ),
    "a second rank is the same training": (
        Route.SFT,
        [*facts(loop()), *(f.model_copy(update={"facts": f.facts | {"rank": 1}}) for f in facts(loop(), pid=2))],
        code(Route.SFT),
    ),
    "junk": (
        Route.UNKNOWN,
        facts(("steps", {"count": "x", "rates": 3}), ("trainer", {"name": 7}), ("loaded", {}), ("generated", {})),
        UNPLANNED,
    ),
}


@pytest.mark.parametrize("name", BY_FACTS)
def test_facts_tell_the_route(name: str) -> None:
    route, observed, plan = BY_FACTS[name]
    told = executed([], [], None, plan, observed=observed)
    assert told.route is route, told
    assert route is Route.UNKNOWN or (told.source == "observed" and told.evidence)


def test_facts_outweigh_logs_and_say_where_the_plan_was_another() -> None:
    told = executed(
        steps("GRPOTrainer"), [], weights(), Planned(Route.GRPO, confidence=SURE), observed=facts(*trained(SFT))
    )
    assert (told.route, told.source, told.disputed) == (Route.SFT, "observed", True)
    told = executed(steps("GRPOTrainer"), [], weights(), UNPLANNED, observed=facts(loop()))
    assert (told.route, told.source) == (Route.GRPO, "logged"), "a loop that nothing explains leaves it to the log"


def test_a_checkpoint_leads_back_to_what_made_it() -> None:
    first = facts(LOADED, *trained(SFT, at=12.5), ("saved", {"path": "/ws/output/sft", "origin": "models/base"}))
    second = facts(
        ("loaded", {"path": "output/sft"}),
        *trained(GRPO, at=42.5),
        ("saved", {"path": "/ws/output/rl"}),
        pid=2,
        at=40.0,
    )
    other = facts(
        LOADED, *trained("trl.trainer.dpo_trainer.DPOTrainer", at=72.5), ("saved", {"path": "/ws/x"}), pid=3, at=70.0
    )
    mixed = facts(
        ("loaded", {"path": "output/sft"}), ("loaded", {"path": "x"}), ("saved", {"path": "/ws/mix"}), pid=4, at=90.0
    )
    every = [*first, *second, *other, *mixed]
    for checkpoint, route in {"output/sft": "sft", "output/rl": "sft+rl", "x": "dpo", "mix": "model-averaging"}.items():
        assert executed([], [], weights(), UNPLANNED, observed=every, checkpoint=checkpoint).route == route, checkpoint
    copied = executed(
        [], ran("cp -r output/rl output/v9"), weights(), UNPLANNED, observed=every, checkpoint="output/v9"
    )
    assert copied.route is Route.SFT_RL, "a copy by cp"
    window = executed([], [], weights(), UNPLANNED, observed=every, checkpoint="output/unseen", begin_s=60.0)
    assert window.route is Route.AVERAGING, "of a checkpoint that nobody was seen to save, the window counts"


def test_a_crash_before_the_first_step_trained_nothing() -> None:
    crash = ("crashed", {"type": "KeyError", "message": "KeyError: 'text'", "where": "train.py:5"})
    told = executed([], [], None, code(Route.SFT, "SFTTrainer"), observed=facts(crash), submitted=False)
    assert (told.route, told.source) == (Route.NONE, "observed")
    assert "KeyError" in told.evidence[0].says and "train.py:5" in told.evidence[0].says


def test_settings_are_values_from_the_strongest_source() -> None:
    plan = Planned(Route.SFT, settings=(make_setting("lr", "9.0"), make_setting("seed", "7")))
    observed = facts(*trained(SFT, arguments={"learning_rate": 0.0003, "max_steps": 30, "unknown": 1}))
    found = {one.name: (one.value, one.source) for one in settings(observed, [], plan)}
    assert found == {"learning_rate": ("0.0003", "observed"), "max_steps": ("30", "observed"), "seed": ("7", None)}
    logged = {one.name: (one.value, one.source) for one in settings([], steps("SFTTrainer", learning_rate=2e-5), plan)}
    assert logged == {"learning_rate": ("2e-05", "logged"), "seed": ("7", None)}
    assert steps_observed(observed) == 5 and steps_observed([]) is None


def make_setting(name: str, value: str) -> Setting:
    return Setting(name=name, value=value, where="train.py:3")


def test_no_facts_stop_the_report() -> None:
    """Facts are an agent's word: any JSON may stand at any key, and a hundred processes may name each other's checkpoints."""
    draw = random.Random(1)
    values = [
        None,
        True,
        0,
        -1,
        1e308,
        "x",
        "trl.trainer.SFTTrainer",
        [],
        [1, "a", None],
        [[0]],
        {},
        {"a": [1]},
        "began",
        "ended",
    ]
    keys = "name bases arguments model rows phase steps last rates count first from_s to_s norm path origin class prompts sampled"
    keys += " steps_before loss reward value r rank argv type message where"
    kinds = get_args(ObservedFact.model_fields["what"].annotation)
    for _ in range(200):
        told = [(draw.choice(kinds), {key: draw.choice(values) for key in keys.split()}) for _ in range(8)]
        observed = facts(*told)
        executed([], [], weights(), UNPLANNED, observed=observed, checkpoint="x")
        settings(observed, steps("SFTTrainer"), UNPLANNED)
    web = [
        fact
        for pid in range(100)
        for fact in facts(
            *(("loaded", {"path": f"m{n}"}) for n in range(40)), ("saved", {"path": f"m{pid % 40}"}), loop(), pid=pid
        )
    ]
    begun = time.process_time()
    assert executed([], [], weights(), code(Route.SFT), observed=web, checkpoint="m7").route is Route.SFT
    assert time.process_time() - begun < 20
