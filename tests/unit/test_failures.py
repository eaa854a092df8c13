"""Why a run, or one of its submissions, did not help: hand-made cases with the kind that a reader would name."""

from __future__ import annotations

from typing import Any

import pytest

from autorl_hpc.records.recorded import TrainingPoint
from autorl_hpc.report.run_story.failures import (
    GainBounds,
    IterationFacts,
    ProcessExit,
    RunFacts,
    failure_of,
)
from autorl_hpc.report.run_story.logs import LogExcerpt
from autorl_hpc.report.story_records import EvidenceLine
from autorl_hpc.states import EndedBy, FailureKind, Fault, SubmissionState

K = FailureKind
NONE = GainBounds(0.2, -1.5, 1.9, "ledger 12")
UP = GainBounds(6.0, 2.5, 9.5, "ledger 12")
DOWN = GainBounds(-22.0, -27.0, -17.0, "ledger 12")


def points(losses: list[float] | None = None, **columns: list[Any]) -> tuple[TrainingPoint, ...]:
    """Training points from columns of figures."""
    count = len(losses or next(iter(columns.values())))
    rows = []
    for n in range(count):
        own = {name: column[n] for name, column in columns.items()}
        fields: dict[str, Any] = {k: own.pop(k) for k in ("reward", "kl", "grad_norm", "not_finite") if k in own}
        rows.append(
            TrainingPoint(
                elapsed_s=100.0 + n,
                at="x",
                source="output/log",
                step=n + 1,
                loss=losses[n] if losses else None,
                more={k.replace("__", "/"): v for k, v in own.items()},
                **fields,
            )
        )
    return tuple(rows)


def log(*lines: str, offset: int = 0) -> tuple[LogExcerpt, ...]:
    return (LogExcerpt("agent.log", offset, "\n".join(lines)),)


def trace(error: str, *frames: str) -> tuple[str, ...]:
    return ("Traceback (most recent call last):", *(f'  File "/x/code/{f}' for f in frames), error)


ROLLOUT_TRACE = trace("KeyError: 'observation'", 'train.py", line 5, in main', 'env.py", line 9, in step_environment')
IMPORT_TRACE = trace("ModuleNotFoundError: No module named 'trl'", 'train.py", line 1, in <module>')
FALLING = [2.0, 1.8, 1.5, 1.2, 1.0, 0.9]


STEADY = points([1.0 / n for n in range(1, 20)])
PARSE_COMPLAINTS = log("could not parse answer 3", "could not parse answer 9", "failed to extract answer")
JSON_TRACEBACK = (
    '{"type":"user","message":{"content":[{"content":"Traceback (most recent call last):\\n  File \\"/w/code/rollout.py\\", line 3, '
    'in rollout\\n    x\\nValueError: no group"}]}}'
)
INNER_TRACEBACK = JSON_TRACEBACK.replace("\\", "\\\\\\")


def with_not_finite(*names: tuple[str, ...]) -> tuple[TrainingPoint, ...]:
    """A sound training with figures that are no finite numbers in its first steps."""
    return points([1.0 / n for n in range(1, 20)], not_finite=[*names, *[()] * (19 - len(names))])


def one(**more: Any) -> IterationFacts:
    return IterationFacts(**{"submission_id": 1, "status": SubmissionState.SCORED, "score": 20.0, "gain": NONE, **more})


def run(**more: Any) -> RunFacts:
    base = {"budget_s": 1000.0, "elapsed_s": 990.0, "ended_by": EndedBy.AGENT_EXIT}
    return RunFacts(
        **{
            **base,
            "iterations": (one(),),
            "first_accepted_s": 300.0,
            "feedback_gain": NONE,
            "report_gain": NONE,
            **more,
        }
    )


def nothing(**more: Any) -> RunFacts:
    return run(**{"iterations": (), "first_accepted_s": None, "feedback_gain": None, "report_gain": None, **more})


CASES: list[tuple[str, RunFacts | IterationFacts, FailureKind | None]] = [
    # one submission
    ("it helped", one(gain=UP), None),
    ("no score yet", one(status=SubmissionState.ACCEPTED, gain=None, score=None), None),
    (
        "refused",
        one(status=SubmissionState.REFUSED, gain=None, score=None, code="no_config", message="no config.json"),
        K.ARTIFACT_REFUSED,
    ),
    (
        "its weights killed the engine",
        one(status=SubmissionState.FAILED, gain=None, score=None, fault=Fault.ARTIFACT),
        K.ARTIFACT_REFUSED,
    ),
    (
        "the grader lost its node",
        one(status=SubmissionState.FAILED, gain=None, score=None, fault=Fault.CLUSTER),
        K.INFRASTRUCTURE,
    ),
    ("a copy of the base", one(flags=("untrained_copy",)), K.STATIC_SHORTCUT),
    ("another model that scores well", one(flags=("foreign_weights",), gain=UP), K.STATIC_SHORTCUT),
    (
        "answers in the code",
        one(hard_coded=(EvidenceLine(where="a.py:3", says="ANSWERS = {"),), gain=UP),
        K.STATIC_SHORTCUT,
    ),
    ("held-out file in the workspace", one(contaminated_items=40, gain=UP), K.STATIC_SHORTCUT),
    ("two items may be chance", one(contaminated_items=2, gain=UP), None),
    ("loss is NaN", one(training=points([1.0, 0.9], not_finite=[(), ("loss",)])), K.TRAINING_COLLAPSE),
    (
        "loss is Inf in the log only",
        one(logs=log("{'loss': 1.2}", "{'loss': inf, 'grad_norm': nan}")),
        K.TRAINING_COLLAPSE,
    ),
    ("loss explodes", one(training=points([2.0, 1.9, 1.8, 5.0, 30.0, 80.0])), K.TRAINING_COLLAPSE),
    (
        "KL explodes",
        one(training=points([0.1] * 6, kl=[0.0, 0.1, 0.5, 4.0, 60.0, 300.0], reward=[0, 0.2, 0.4, 0.1, 0.1, 0.0])),
        K.TRAINING_COLLAPSE,
    ),
    ("one answer to everything", one(flags=("degenerate_outputs",)), K.TRAINING_COLLAPSE),
    ("far under the base", one(score=2.0, gain=DOWN, training=points(FALLING)), K.TRAINING_COLLAPSE),
    ("a spike that comes back", one(training=points([2.0, 1.9, 40.0, 1.8, 1.7, 1.6])), K.NO_GAIN),
    ("GRPO's loss starts at zero", one(training=points([0.0, 0.0, 0.001, 0.02, 0.03, 0.05])), K.NO_GAIN),
    ("the environment throws", one(logs=log(*ROLLOUT_TRACE)), K.ROLLOUT_CONSTRUCTION),
    (
        "completions are empty",
        one(training=points([0.0] * 6, completions__mean_length=[0.0] * 6, reward=[0.0] * 6)),
        K.ROLLOUT_CONSTRUCTION,
    ),
    (
        "answers can't be parsed and the reward stands still",
        one(training=points(None, reward=[0.0] * 8), logs=log("failed to parse completion 3", "step 2")),
        K.ROLLOUT_CONSTRUCTION,
    ),
    ("one complaint is no cause", one(training=points(FALLING), logs=log("failed to parse completion 3")), K.NO_GAIN),
    (
        "no spread of rewards",
        one(training=points(None, reward=[0.1, 0.2, 0.1, 0.2, 0.1, 0.2], reward_std=[0.0] * 5 + [0.2])),
        K.REWARD_OR_DATA,
    ),
    ("all groups without spread", one(training=points(None, frac_reward_zero_std=[1.0] * 6)), K.REWARD_OR_DATA),
    (
        "some groups without spread",
        one(training=points(None, frac_reward_zero_std=[1.0, 0.5, 0.6, 0.4, 0.7, 0.9])),
        K.NO_GAIN,
    ),
    ("the reward is one number", one(training=points(None, reward=[1.0] * 10)), K.REWARD_OR_DATA),
    (
        "the reward rises and the score falls",
        one(
            score=15.0,
            score_before=20.0,
            gain=GainBounds(-5, -8, -2),
            training=points(None, reward=[0.1, 0.2, 0.4, 0.6, 0.8, 0.9]),
        ),
        K.REWARD_OR_DATA,
    ),
    (
        "reward and score rise",
        one(score=22.0, score_before=20.0, training=points(None, reward=[0.1, 0.2, 0.4, 0.6, 0.8, 0.9])),
        K.NO_GAIN,
    ),
    ("five rows", one(dataset_rows=5, training=points(FALLING)), K.REWARD_OR_DATA),
    (
        "an empty data set",
        one(
            logs=log(
                *trace(
                    "ValueError: num_samples should be a positive integer value, but got num_samples=0",
                    'train.py", line 3, in main',
                )
            )
        ),
        K.REWARD_OR_DATA,
    ),
    ("trained well, to no avail", one(training=points(FALLING)), K.NO_GAIN),
    ("tracebacks before it trained are forgiven", one(training=points(FALLING), logs=log(*IMPORT_TRACE)), K.NO_GAIN),
    # what only looks like a cause
    ("parsing complaints of an evaluation", one(logs=PARSE_COMPLAINTS, training=STEADY), K.NO_GAIN),
    (
        "the same where the code samples",
        one(logs=PARSE_COMPLAINTS, training=STEADY, samples=True),
        K.ROLLOUT_CONSTRUCTION,
    ),
    (
        "an installer's complaints",
        one(
            logs=log("WARNING: environment check failed", "conda environment error: not found", "setting env: failed"),
            training=STEADY,
            samples=True,
        ),
        K.NO_GAIN,
    ),
    (
        "the agent thinks aloud",
        one(logs=log(*["I think the rollout could fail if answers are empty"] * 4), training=STEADY, samples=True),
        K.NO_GAIN,
    ),
    (
        "the agent thinks aloud in a trace",
        one(logs=log(*['{"type":"assistant","text":"rollout failed"}'] * 4), training=STEADY, samples=True),
        K.NO_GAIN,
    ),
    *(
        (f"a traceback through {frame}", one(logs=log(*trace("ValueError: bad", frame)), training=STEADY), K.NO_GAIN)
        for frame in (
            '../../usr/lib/python3.11/argparse.py", line 1, in parse_args',
            'main.py", line 1, in parse_args',
            'venv/lib/python3.11/site-packages/torch/utils/data/sampler.py", line 3, in __iter__',
        )
    ),
    ("supervised code with a frame called generate", one(logs=log(*ROLLOUT_TRACE), samples=False), K.NO_GAIN),
    ("a traceback in a trace", one(logs=log(JSON_TRACEBACK)), K.ROLLOUT_CONSTRUCTION),
    ("a traceback in JSON in a trace", one(logs=log(INNER_TRACEBACK)), K.ROLLOUT_CONSTRUCTION),
    (
        "an exception that isn't named Error",
        one(logs=log(*trace("engine.Dead: gone", 'rollout.py", line 3, in rollout'))),
        K.ROLLOUT_CONSTRUCTION,
    ),
    (
        "a launcher's prefixes",
        one(logs=log(*(f"[rank0]: {line}" for line in IMPORT_TRACE)), score=None, gain=None),
        K.EARLY_CODING,
    ),
    ("scaled half precision begins", one(training=with_not_finite(("grad_norm",), ("grad_norm",))), K.NO_GAIN),
    ("an evaluation without loss", one(training=points([1.0, 0.9], not_finite=[(), ("eval_loss",)])), K.NO_GAIN),
    ("no margins", one(training=points([1.0, 0.9], not_finite=[(), ("rewards/margins",)])), K.NO_GAIN),
    ("a name with kl in it", one(training=points([1.0, 0.9], not_finite=[(), ("tackle_rate",)])), K.NO_GAIN),
    ("one step without a loss", one(training=with_not_finite((), ("loss",))), K.NO_GAIN),
    ("two steps without a loss", one(training=with_not_finite((), ("loss",), ("loss",))), K.TRAINING_COLLAPSE),
    (
        "gradients to the end",
        one(training=points([1.0, 0.9, 0.9], not_finite=[(), ("grad_norm",), ("grad_norm",)])),
        K.TRAINING_COLLAPSE,
    ),
    (
        "a printed line of code",
        one(logs=log("    assert not torch.isnan(loss), 'loss: nan'"), training=STEADY),
        K.NO_GAIN,
    ),
    ("a second training begins high", one(training=points([0.05] * 9) + points([1.5] * 9)), K.NO_GAIN),
    # a run
    (
        "a trace tells that a tool failed",
        nothing(exits=(ProcessExit("python train.py", None, 5.0, ok=False),)),
        K.EARLY_CODING,
    ),
    (
        "a trace tells that a tool worked",
        nothing(exits=(ProcessExit("python train.py", None, 5.0, ok=True),)),
        K.NO_SUBMISSION,
    ),
    ("it helped on the report split", run(report_gain=UP, feedback_gain=UP), None),
    ("it goes on", run(ended_by=None), None),
    ("somebody cancelled it", run(ended_by=EndedBy.CANCELLED), None),
    ("the node was lost", run(fault=Fault.CLUSTER, reason="node failed"), K.INFRASTRUCTURE),
    ("the supervisor died too often", run(ended_by=EndedBy.CRASHED), K.INFRASTRUCTURE),
    ("the lost node before a traceback", nothing(fault=Fault.CLUSTER, logs=log(*IMPORT_TRACE)), K.INFRASTRUCTURE),
    ("gain on feedback alone", run(feedback_gain=UP, report_gain=NONE, optimism_gap=5.8), K.STATIC_SHORTCUT),
    (
        "a gap within noise",
        run(feedback_gain=GainBounds(2.0, 0.1, 3.9), report_gain=GainBounds(1.0, -0.2, 2.2), optimism_gap=1.0),
        K.NO_GAIN,
    ),
    (
        "contaminated, whatever it gained",
        run(contaminated_items=100, feedback_gain=UP, report_gain=UP),
        K.STATIC_SHORTCUT,
    ),
    (
        "nothing but refusals",
        nothing(refused=4, iterations=(one(status=SubmissionState.REFUSED, message="pickle"),)),
        K.ARTIFACT_REFUSED,
    ),
    (
        "it never got its code to run",
        nothing(logs=log(*IMPORT_TRACE), exits=(ProcessExit("python train.py", 1, 50.0),)),
        K.EARLY_CODING,
    ),
    ("still broken at half time", nothing(ended_by=None, elapsed_s=600.0, logs=log(*IMPORT_TRACE)), K.EARLY_CODING),
    (
        "killed by a signal, nothing trained",
        nothing(exits=(ProcessExit("python3 train.py", -9, 700.0),), ended_by=EndedBy.BUDGET),
        K.EARLY_CODING,
    ),
    (
        "it trained until its time was up",
        nothing(training=points([1.0] * 3), logs=(), ended_by=EndedBy.BUDGET),
        K.BUDGET_OUT,
    ),
    ("memory", nothing(ended_by=EndedBy.OUT_OF_MEMORY), K.BUDGET_OUT),
    ("no money left", nothing(ended_by=EndedBy.COST, reason="the driver cost used up: $5.01 of $5.00"), K.BUDGET_OUT),
    ("no tokens left", nothing(ended_by=EndedBy.TOKENS), K.BUDGET_OUT),
    ("no GPU-hours left", nothing(ended_by=EndedBy.GPU_HOURS), K.BUDGET_OUT),
    ("it gave up", nothing(), K.NO_SUBMISSION),
    (
        "it trained, collapsed, and submitted nothing",
        nothing(training=points([1.0, 0.9], not_finite=[(), ("train/loss", "grad_norm")])),
        K.TRAINING_COLLAPSE,
    ),
    ("a failed ls is no failure", nothing(exits=(ProcessExit("ls nowhere", 2, 3.0),)), K.NO_SUBMISSION),
    ("no gain", run(), K.NO_GAIN),
    (
        "no gain, as two of three iterations had no reward",
        run(
            iterations=(
                one(),
                one(training=points(None, reward=[0.0] * 9)),
                one(training=points(None, reward=[0.0] * 9)),
            )
        ),
        K.REWARD_OR_DATA,
    ),
    ("no base score", run(feedback_gain=None, report_gain=None), None),
]


@pytest.mark.parametrize(("facts", "kind"), [pytest.param(f, k, id=name) for name, f, k in CASES])
def test_the_kind_is_what_a_reader_would_name(facts: RunFacts | IterationFacts, kind: FailureKind | None) -> None:
    told = failure_of(facts)
    assert (told.kind if told else None) is kind, told
    assert told is None or (told.evidence and all(line.where and line.says for line in told.evidence))


def test_every_kind_occurs() -> None:
    assert {kind for _, _, kind in CASES} == {None, *FailureKind}


def test_an_evidence_line_names_the_byte_at_which_it_stands() -> None:
    told = failure_of(one(logs=log("é" * 3, *ROLLOUT_TRACE, offset=1000)))
    assert told is not None
    assert told.evidence[0].where == "agent.log, byte 1007"
    assert told.evidence[0].says == "KeyError: 'observation'"


def test_logs_of_any_kind_are_read_in_little_time_and_shown_harmlessly() -> None:
    hostile = (
        "Traceback (most recent call last):\n" * 5_000,
        "rollout " * 50_000,
        "\x1b[31mError: " * 9_000,
        "fail" * 99_999,
        "\0" * 99_999,
    )
    told = failure_of(one(logs=tuple(LogExcerpt("a\x1b[2Jb", 0, text) for text in hostile)))
    assert told is not None
    assert all("\x1b" not in line.where + line.says for line in told.evidence)
