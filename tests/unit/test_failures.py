"""Why a run, or one of its submissions, did not help: hand-made cases with the kind that a reader would name."""

from __future__ import annotations

from typing import Any

import pytest

from autorl_hpc.recorder.trainings import steps_in
from autorl_hpc.records.recorded import ObservedFact, TrainingPoint
from autorl_hpc.report.run_story.failures import GainBounds, IterationFacts, ProcessExit, RunFacts, failure_of
from autorl_hpc.report.run_story.logs import LogExcerpt, Trace, crashes_in
from autorl_hpc.report.story_records import EvidenceLine
from autorl_hpc.states import OF_THE_PAPER, EndedBy, FailureKind, Fault, SubmissionState

K, S, E, F = FailureKind, SubmissionState, EndedBy, Fault
NONE = GainBounds(0.2, -1.5, 1.9, "ledger 12")
UP = GainBounds(6.0, 2.5, 9.5, "ledger 12")
DOWN = GainBounds(-22.0, -27.0, -17.0, "ledger 12")
NOISE = {"few lost": GainBounds(-4.0, -9.8, -0.3, "", 0.0625), "few won": GainBounds(4.0, 0.3, 9.8, "", 0.0625)}
"""0 won and 4 lost of 100, and 4 won: the interval leaves out 0, the exact test decides that it is noise."""


def points(losses: list[float] | None = None, **columns: list[Any]) -> tuple[TrainingPoint, ...]:
    """Training points from columns of figures."""
    count = len(losses or next(iter(columns.values())))
    rows = []
    for n in range(count):
        own = {name: column[n] for name, column in columns.items()}
        fields: dict[str, Any] = {k: own.pop(k) for k in ("reward", "kl", "grad_norm", "not_finite") if k in own}
        fields |= {"loss": losses[n] if losses else None, "more": {k.replace("__", "/"): v for k, v in own.items()}}
        rows.append(TrainingPoint(elapsed_s=100.0 + n, at="x", source="output/log", step=n + 1, **fields))
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


def crashed(kind: str, message: str) -> list[Trace]:
    facts = {"type": kind, "message": message, "where": "/w/code/train.py:5"}
    seen = {"elapsed_s": 3.0, "at": "x", "pid": 7, "program": "code/train.py", "what": "crashed", "facts": facts}
    return crashes_in([ObservedFact.model_validate(seen)])


def with_not_finite(*names: tuple[str, ...]) -> tuple[TrainingPoint, ...]:
    """A sound training with figures that are no finite numbers in its first steps."""
    return points([1.0 / n for n in range(1, 20)], not_finite=[*names, *[()] * (19 - len(names))])


def logged_points(text: str) -> tuple[TrainingPoint, ...]:
    """The points that the recorder makes of a log."""
    fields = {"elapsed_s": 1.0, "at": "x", "source": "agent.log"}
    return tuple(TrainingPoint.model_validate({**fields, **step.fields()}) for step in steps_in(text))


def one(**more: Any) -> IterationFacts:
    return IterationFacts(**{"submission_id": 1, "status": S.SCORED, "score": 20.0, "gain": NONE, **more})


def fit(*losses: list[float], **columns: list[Any]) -> IterationFacts:
    return one(training=points(*losses, **columns))


def said(*lines: str) -> IterationFacts:
    return one(logs=log(*lines))


def run(**more: Any) -> RunFacts:
    base = {"budget_s": 1000.0, "elapsed_s": 990.0, "ended_by": E.AGENT_EXIT}
    usual = {"iterations": (one(),), "first_accepted_s": 300.0, "feedback_gain": NONE, "report_gain": NONE}
    return RunFacts(**{**base, **usual, **more})


def nothing(**more: Any) -> RunFacts:
    return run(**{"iterations": (), "first_accepted_s": None, "feedback_gain": None, "report_gain": None, **more})


CASES: dict[FailureKind | None, dict[str, RunFacts | IterationFacts]] = {
    None: {
        "it helped": one(gain=UP),
        "no score yet": one(status=S.ACCEPTED, gain=None, score=None),
        "two items may be chance": one(contaminated_items=2, gain=UP),
        "it helped on the report split": run(report_gain=UP, feedback_gain=UP),
        "it goes on": run(ended_by=None),
        "somebody cancelled it": run(ended_by=E.CANCELLED),
        "no base score": run(feedback_gain=None, report_gain=None),
    },
    K.ARTIFACT_REFUSED: {
        "refused": one(status=S.REFUSED, gain=None, score=None, code="no_config", message="no config.json"),
        "its weights can't be scored": one(
            status=S.FAILED, gain=None, score=None, fault=F.ARTIFACT, message="logits are NaN"
        ),
        "nothing but refusals": nothing(refused=4, iterations=(one(status=S.REFUSED, message="pickle"),)),
    },
    K.INFRASTRUCTURE: {
        "the grader lost its node": one(status=S.FAILED, gain=None, score=None, fault=F.CLUSTER),
        "the node was lost": run(fault=F.CLUSTER, reason="node failed"),
        "the supervisor died too often": run(ended_by=E.CRASHED),
        "the lost node before a traceback": nothing(fault=F.CLUSTER, logs=log(*IMPORT_TRACE)),
    },
    K.COPIED_WEIGHTS: {
        "a copy of the base": one(flags=("untrained_copy",)),
        "another model that scores well": one(flags=("foreign_weights",), gain=UP),
    },
    K.HELD_OUT_ITEMS: {
        "answers in the code": one(hard_coded=(EvidenceLine(where="a.py:3", says="ANSWERS = {"),), gain=UP),
        "held-out file in the workspace": one(contaminated_items=40, gain=UP),
        "contaminated, whatever it gained": run(contaminated_items=100, feedback_gain=UP, report_gain=UP),
    },
    K.FEEDBACK_ONLY: {"gain on feedback alone": run(feedback_gain=UP, report_gain=NONE, optimism_gap=5.8)},
    K.WORSE: {
        "far under the base, and the training is sound": one(score=2.0, gain=DOWN, training=points(FALLING)),
        "under the base, without a log": one(score=10.0, gain=GainBounds(-5.0, -8.0, -2.0)),
        "the whole run": run(report_gain=DOWN, iterations=(one(score=2.0, gain=DOWN, training=points(FALLING)),)),
    },
    K.OUT_OF_MEMORY: {
        "a rollout that runs out of memory is out of memory": said(
            *trace("torch.OutOfMemoryError: CUDA out of memory.", 'rollout.py", line 3, in rollout')
        ),
        "after its last step": one(
            training=STEADY,
            logs=log(*trace("torch.OutOfMemoryError: CUDA out of memory", 'train.py", line 3, in main')),
            exits=(ProcessExit("python train.py", 1, 500.0),),
        ),
        "the run's budget of memory": nothing(ended_by=E.OUT_OF_MEMORY),
        "nothing submitted, three times": nothing(
            logs=log(*trace("RuntimeError: CUDA error: out of memory", 'a.py", line 3, in f'))
        ),
        "seen by the observer alone": nothing(crashes=crashed("OutOfMemoryError", "CUDA out of memory. Tried 2 GiB")),
        **{
            f"a log says {words}": said(words)
            for words in (
                "slurmstepd: error: Detected 1 oom_kill event in StepId=7.batch",
                "terminate called after throwing an instance of 'std::bad_alloc'",
                "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that shared memory is too small",
                "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
                "ValueError: Free memory on device (3.1/79.1 GiB) on startup is less than desired GPU memory utilization",
                "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
                "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
            )
        },
        "exit code 137": nothing(exits=(ProcessExit("python train.py", 137, 5.0),)),
    },
    K.ENGINE_CRASH: {
        "its weights killed the engine": one(
            status=S.FAILED,
            gain=None,
            score=None,
            fault=F.ARTIFACT,
            message="the engine process died twice while it loaded these weights",
        ),
        **{
            f"a log says {words}": said(words)
            for words in (
                "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue",
                "RuntimeError: Engine core initialization failed. See root cause above.",
                "Received sigquit from a child process. It usually means the child failed.",
                "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
                "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp",
                "ncclUnhandledCudaError: Call to CUDA function failed.",
                "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
                "Fatal Python error: Segmentation fault",
            )
        },
        "exit code 139": nothing(exits=(ProcessExit("torchrun train.py", 139, 5.0),)),
    },
    K.FORMAT_MISMATCH: {
        "no template": said(*trace("ValueError: tokenizer.chat_template is not set", 'train.py", line 3, in main')),
        "columns": said(*trace("KeyError: 'messages'", 'train.py", line 3, in main')),
        **{
            words: said(words)
            for words in (
                "prompt format mismatch count: 3",
                "step 0 prompt mismatch",
                "10 prompt mismatches",
                "template mismatch in 0x7f",
            )
        },
        "the log warns": said(
            "WARNING: Mismatch between tokenized prompt and the start of tokenized prompt+completion."
        ),
    },
    K.REWARD_WITHOUT_SCORE: {
        "the reward rises and the score falls": one(
            score=15.0,
            score_before=20.0,
            gain=GainBounds(-5, -8, -2),
            training=points(reward=[0.1, 0.2, 0.4, 0.6, 0.8, 0.9]),
        ),
        "the reward rises and the score stands still": one(
            score=20.0,
            score_before=20.0,
            gain=GainBounds(0.0, -2, 2),
            training=points(reward=[0.1, 0.2, 0.4, 0.6, 0.8, 0.9]),
        ),
        "figures prove more than a traceback": one(
            score=15.0,
            score_before=20.0,
            gain=GainBounds(-5, -8, -2),
            training=points(reward=[0.1, 0.2, 0.4, 0.6, 0.8, 0.9]),
            logs=log(*ROLLOUT_TRACE),
        ),
    },
    K.TRAINING_COLLAPSE: {
        "loss is NaN": fit([1.0, 0.9], not_finite=[(), ("loss",)]),
        "loss is Inf in the log only": said("{'loss': 1.2}", "{'loss': inf, 'grad_norm': nan}"),
        "in a line with a validation's": said("{'val_loss': 0.3, 'loss': nan}", "step 3 val loss: 0.2 loss: nan"),
        "points of both": one(training=logged_points("step 3 train loss: nan, val loss: 0.3")),
        "loss explodes": fit([2.0, 1.9, 1.8, 5.0, 30.0, 80.0]),
        "KL explodes": fit([0.1] * 6, kl=[0.0, 0.1, 0.5, 4.0, 60.0, 300.0], reward=[0, 0.2, 0.4, 0.1, 0.1, 0.0]),
        "one answer to everything": one(flags=("degenerate_outputs",)),
        "far under the base, with a loss that is NaN": one(
            score=2.0, gain=DOWN, training=with_not_finite((), ("loss",), ("loss",))
        ),
        "two steps without a loss": one(training=with_not_finite((), ("loss",), ("loss",))),
        "gradients to the end": fit([1.0, 0.9, 0.9], not_finite=[(), ("grad_norm",), ("grad_norm",)]),
        "it trained, collapsed, and submitted nothing": nothing(
            training=points([1.0, 0.9], not_finite=[(), ("train/loss", "grad_norm")])
        ),
    },
    K.NO_GAIN: {
        **{name: one(score=20.0 + gain.points, gain=gain) for name, gain in NOISE.items()},
        "a spike that comes back": fit([2.0, 1.9, 40.0, 1.8, 1.7, 1.6]),
        "GRPO's loss starts at zero": fit([0.0, 0.0, 0.001, 0.02, 0.03, 0.05]),
        "one complaint is no cause": one(training=points(FALLING), logs=log("failed to parse completion 3")),
        "some groups without spread": fit(frac_reward_zero_std=[1.0, 0.5, 0.6, 0.4, 0.7, 0.9]),
        "reward and score rise": one(
            score=22.0, score_before=20.0, training=points(reward=[0.1, 0.2, 0.4, 0.6, 0.8, 0.9])
        ),
        "trained well, to no avail": fit(FALLING),
        "tracebacks before it trained are forgiven": one(training=points(FALLING), logs=log(*IMPORT_TRACE)),
        "out of memory, then trained": one(
            training=points(FALLING),
            logs=log(*trace("torch.OutOfMemoryError: CUDA out of memory", 'train.py", line 3, in main')),
        ),
        "parsing complaints of an evaluation": one(logs=PARSE_COMPLAINTS, training=STEADY),
        "an installer's complaints": one(
            logs=log("WARNING: environment check failed", "conda environment error: not found", "setting env: failed"),
            training=STEADY,
            samples=True,
        ),
        "the agent thinks aloud": one(
            logs=log(*["I think the rollout could fail if answers are empty"] * 4), training=STEADY, samples=True
        ),
        "the agent thinks aloud in a trace": one(
            logs=log(*['{"type":"assistant","text":"rollout failed"}'] * 4), training=STEADY, samples=True
        ),
        **{
            f"a traceback through {frame}": one(logs=log(*trace("ValueError: bad", frame)), training=STEADY)
            for frame in (
                '../../usr/lib/python3.11/argparse.py", line 1, in parse_args',
                'main.py", line 1, in parse_args',
                'venv/lib/python3.11/site-packages/torch/utils/data/sampler.py", line 3, in __iter__',
            )
        },
        "supervised code with a frame called generate": one(logs=log(*ROLLOUT_TRACE), samples=False),
        "scaled half precision begins": one(training=with_not_finite(("grad_norm",), ("grad_norm",))),
        "an evaluation without loss": fit([1.0, 0.9], not_finite=[(), ("eval_loss",)]),
        "no margins": fit([1.0, 0.9], not_finite=[(), ("rewards/margins",)]),
        "a name with kl in it": fit([1.0, 0.9], not_finite=[(), ("tackle_rate",)]),
        "one step without a loss": one(training=with_not_finite((), ("loss",))),
        "a printed line of code": one(logs=log("    assert not torch.isnan(loss), 'loss: nan'"), training=STEADY),
        "a second training begins high": one(training=points([0.05] * 9) + points([1.5] * 9)),
        "a gap within noise": run(
            feedback_gain=GainBounds(2.0, 0.1, 3.9), report_gain=GainBounds(1.0, -0.2, 2.2), optimism_gap=1.0
        ),
        "no gain": run(),
        **{
            f"no training's figure: {words}": said(words)
            for words in (
                *(
                    "step 10 val loss: nan",
                    "Validation: step 10, loss nan",
                    "eval loss=nan",
                    "test/loss: nan",
                    "[eval] loss: inf",
                ),
                *("best loss: inf", "{'val_loss': nan}", "epoch 3: train loss 0.4, val loss nan", "dev-loss: nan"),
            )
        },
        **{
            f"points of it: {words}": one(training=logged_points(words))
            for words in (
                "step 10 val loss: nan",
                "epoch 3: train loss 0.4, val loss nan",
                "step 3 best loss: inf lr 1e-4",
            )
        },
        **{
            f"counts none: {words}": one(logs=log(*[words] * 4), samples=True)
            for words in (
                *(
                    "prompt format mismatch count: 0",
                    "format mismatches: 0",
                    "0 prompt mismatches",
                    "no template mismatch",
                ),
                *("format mismatch rate = 0.0%", "failed rollouts, generation errors: 0", "rollouts: 64, failed: 0"),
                *(
                    "0 completions failed",
                    "no rollouts failed",
                    "episodes failed 0/64",
                    "answers that could not be parsed: 0",
                ),
                *(
                    "oom_kill 0",
                    "OOM-kills: 0",
                    "cuda errors: 0",
                    "no segmentation fault",
                    "train dataset: 0 examples were dropped",
                ),
                *("training data has no duplicates", "training set: removed 0 rows"),
            )
        },
    },
    K.ROLLOUT_CONSTRUCTION: {
        "the environment throws": said(*ROLLOUT_TRACE),
        "completions are empty": fit([0.0] * 6, completions__mean_length=[0.0] * 6, reward=[0.0] * 6),
        "answers can't be parsed and the reward stands still": one(
            training=points(reward=[0.0] * 8), logs=log("failed to parse completion 3")
        ),
        "the same where the code samples": one(logs=PARSE_COMPLAINTS, training=STEADY, samples=True),
        "a traceback in a trace": said(JSON_TRACEBACK),
        "a traceback in JSON in a trace": said(INNER_TRACEBACK),
        "an exception that isn't named Error": said(*trace("engine.Dead: gone", 'rollout.py", line 3, in rollout')),
    },
    K.REWARD_OR_DATA: {
        "no spread of rewards": fit(reward=[0.1, 0.2, 0.1, 0.2, 0.1, 0.2], reward_std=[0.0] * 5 + [0.2]),
        "all groups without spread": fit(frac_reward_zero_std=[1.0] * 6),
        "the reward is one number": fit(reward=[1.0] * 10),
        "five rows": one(dataset_rows=5, training=points(FALLING)),
        "an empty data set": said(
            *trace(
                "ValueError: num_samples should be a positive integer value, but got num_samples=0",
                'train.py", line 3, in main',
            )
        ),
        "no gain, as two of three iterations had no reward": run(
            iterations=(one(), fit(reward=[0.0] * 9), fit(reward=[0.0] * 9))
        ),
    },
    K.EARLY_CODING: {
        "seen by the observer alone": nothing(crashes=crashed("KeyError", "'question'")),
        "a launcher's prefixes": one(logs=log(*(f"[rank0]: {line}" for line in IMPORT_TRACE)), score=None, gain=None),
        "a trace tells that a tool failed": nothing(exits=(ProcessExit("python train.py", None, 5.0, ok=False),)),
        "it never got its code to run": nothing(
            logs=log(*IMPORT_TRACE), exits=(ProcessExit("python train.py", 1, 50.0),)
        ),
        "still broken at half time": nothing(ended_by=None, elapsed_s=600.0, logs=log(*IMPORT_TRACE)),
        "killed by a signal, nothing trained": nothing(
            exits=(ProcessExit("python3 train.py", -9, 700.0),), ended_by=E.BUDGET
        ),
    },
    K.NO_SUBMISSION: {
        "a trace tells that a tool worked": nothing(exits=(ProcessExit("python train.py", None, 5.0, ok=True),)),
        "it gave up": nothing(),
        "a failed ls is no failure": nothing(exits=(ProcessExit("ls nowhere", 2, 3.0),)),
    },
    K.BUDGET_OUT: {
        "it trained until its time was up": nothing(training=points([1.0] * 3), logs=(), ended_by=E.BUDGET),
        "disk": nothing(ended_by=E.DISK),
        "no money left": nothing(ended_by=E.COST, reason="the driver cost used up: $5.01 of $5.00"),
        "no tokens left": nothing(ended_by=E.TOKENS),
        "no GPU-hours left": nothing(ended_by=E.GPU_HOURS),
    },
}
"""By kind, with what each case shows."""


@pytest.mark.parametrize(
    ("facts", "kind"),
    [pytest.param(facts, kind, id=name) for kind, cases in CASES.items() for name, facts in cases.items()],
)
def test_the_kind_is_what_a_reader_would_name(facts: RunFacts | IterationFacts, kind: FailureKind | None) -> None:
    told = failure_of(facts)
    assert (told.kind if told else None) is kind, told
    assert told is None or (told.evidence and all(line.where and line.says for line in told.evidence))


def test_every_kind_occurs() -> None:
    assert CASES.keys() == {None, *FailureKind} - {K.STATIC_SHORTCUT}  # seen over several tasks: test_report_boards.py
    assert [str(kind) for kind in OF_THE_PAPER] == [
        "rollout construction",
        "reward or data design",
        "training collapse",
        "early coding failure",
        "static shortcut without transfer",
    ]


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
