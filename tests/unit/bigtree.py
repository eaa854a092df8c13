"""Big run trees, written fast: one run's records are made by the models, the others by replacing what differs.

Every run has its own run.json and its own valid chain, in ledger/ and in ledger.jsonl; items files and recorder files
may be equal between runs and are hard links to a few templates.
"""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path
from typing import Any

from treemaker import CREATED, Tree, evaluation, outcomes, save_items, sha

from autorl_hpc.files.layout import RunDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.records import canonical_json
from autorl_hpc.records import entries as bodies
from autorl_hpc.records.recorded import RECORDED, GpuSample, TraceEvent, TrainingPoint, UsageSample
from autorl_hpc.records.run import RunRecord
from autorl_hpc.states import EndedBy, EntryKind, Fault, Network, SandboxLevel, Split

N_FEEDBACK, N_REPORT = 500, 1319
"""As gsm8k has them."""

AGENTS, BASE_MODELS, RUNS_PER_EXPERIMENT = 10, 2, 250
REPORT_VARIANTS = 20
LIVE_EVERY, EMPTY_EVERY, LOST_EVERY = 10, 17, 53
"""Every so many-th run goes on, ended without a submission, was lost with its node."""

WRITER = {"role": "supervisor", "host": "node1", "pid": 4242, "job_id": "77"}
RECORDED_LINES = {"training": 200, "trace": 300, "usage": 500}


class BigTree:
    """`runs/` with `n_runs` runs of `submissions` submissions each, in experiments of 250; `recorded`: with a recorder's lines."""

    def __init__(
        self,
        path: Path,
        *,
        submissions: int = 50,
        n_feedback: int = N_FEEDBACK,
        n_report: int = N_REPORT,
        recorded: bool = True,
    ):
        self.path, self.submissions = path, submissions
        self.n_feedback, self.n_report = n_feedback, n_report
        self.templates = path.parent / f".{path.name}-templates"
        self.recorded = recorded
        self.made = 0

    def grow(self, n_runs: int) -> None:
        """Adds runs up to `n_runs`, whole experiments last."""
        self.templates.mkdir(parents=True, exist_ok=True)
        self._feedback = [self._items(Split.FEEDBACK, i, self.n_feedback) for i in range(self.submissions)]
        self._report = [self._items(Split.REPORT, i, self.n_report) for i in range(REPORT_VARIANTS)]
        lines = RECORDED_LINES if self.recorded else {}
        self._recorded = {name: self._recorder_file(name, count) for name, count in lines.items()}
        while self.made < n_runs:
            number = self.made // RUNS_PER_EXPERIMENT
            tree = Tree(self.path / f"exp{number:03d}", n_feedback=self.n_feedback, n_report=self.n_report)
            end = min(n_runs, (number + 1) * RUNS_PER_EXPERIMENT)
            names = [self._run(tree, index) for index in range(self.made, end)]
            tree.keeps.extend(names)
            tree.save()
            self.made = end

    def touch(self, count: int) -> None:
        """Adds an entry to the first `count` runs, as an attempt that Slurm started late does."""
        for run in sorted(self.path.glob("exp*/gsm8k*"))[:count]:
            late = bodies.AttemptStarted(attempt=2, elapsed_s=1100, workspace="/scratch/w")
            Ledger(RunDir(run)).append(EntryKind.ATTEMPT_STARTED, late, role="supervisor")

    def _items(self, split: Split, variant: int, n: int) -> tuple[Path, str, list[float]]:
        solved = random.Random(f"{split}-{variant}").sample(range(n), n // 4 + (variant * n) // 200)
        path, values = self.templates / f"{split}-{variant}.jsonl.gz", outcomes(n, solved)
        return path, save_items(path, values), values

    def _recorder_file(self, name: str, count: int) -> Path:
        """Lines as the recorder writes them."""
        path = self.templates / f"{name}.jsonl"
        rows = (_RECORDED_ROWS[name](i) for i in range(count))
        path.write_bytes(b"".join(row.model_dump_json(exclude_defaults=True).encode() + b"\n" for row in rows))
        return path

    def _run(self, tree: Tree, index: int) -> str:
        agent, base = index % AGENTS, (index // AGENTS) % BASE_MODELS
        science = tree.science(
            task="gsm8k", agent=f"agent{agent}", base_model=f"org/base{base}", seed=index, driver=f"llm{agent % 3}"
        )
        run, record = tree.lay(science, index % RUNS_PER_EXPERIMENT)
        data = run.record.read_bytes()
        _write_chain(run, data, self._entries(tree, run, record, index))
        for name, path in self._recorded.items():
            os.link(path, run.recorded(name))
        return run.run_id

    def _entries(self, tree: Tree, run: RunDir, record: RunRecord, index: int) -> list[tuple[EntryKind, Any]]:
        entries: list[tuple[EntryKind, Any]] = [
            (EntryKind.ATTEMPT_STARTED, bodies.AttemptStarted(attempt=1, elapsed_s=0, workspace="/scratch/w")),
            (EntryKind.SANDBOX, bodies.SandboxUsed(attempt=1, level=SandboxLevel.LANDLOCK, network=Network.NONE)),
        ]
        if index % EMPTY_EVERY == 1:
            return entries + self._end(tree, record, 0, index)
        count = self.submissions if index % LIVE_EVERY else self.submissions // 2
        for number in range(1, count + 1):
            entries += self._submission(run, number)
        return entries + (self._end(tree, record, count, index, run) if index % LIVE_EVERY else [])

    def _submission(self, run: RunDir, number: int) -> list[tuple[EntryKind, Any]]:
        path, items, values = self._feedback[number - 1]
        os.link(path, run.items / f"{number:06d}.feedback.jsonl.gz")
        content = sha(f"{run.run_id}-{number}")
        found = _once(("evaluation", items), lambda: evaluation(Split.FEEDBACK, content, values, items))
        which = {"submission_id": number, "content_hash": content}
        told = {"elapsed_s": 20.0 * number, "model_path": f"output/v{number}", "note": f"attempt {number}"}
        scored = {"evaluation": {**found, "content_hash": content}, "grader": "g", "generation": 1}
        return [
            (EntryKind.SUBMISSION, {**_SUBMISSION, **which, **told, "manifest_id": f"m{number}"}),
            (EntryKind.SCORE, {"submission_id": number, **scored}),
            (EntryKind.FINGERPRINT, {**_FINGERPRINT, **which}),
            (EntryKind.CONTAMINATION, {**_CONTAMINATION, "submission_id": number}),
        ]

    def _end(
        self, tree: Tree, record: RunRecord, count: int, index: int, run: RunDir | None = None
    ) -> list[tuple[EntryKind, Any]]:
        end: dict[str, Any] = {"ended_by": EndedBy.AGENT_EXIT, "exit_code": 0}
        if index % LOST_EVERY == 2:
            end = {"ended_by": EndedBy.CRASHED, "exit_code": None, "fault": Fault.CLUSTER, "reason": "node lost"}
        sealed = bodies.Sealed(submissions=tuple(range(1, count + 1)), elapsed_s=1100.0, given_back_s=0.0, **end)
        base, feedback = (tree.baseline(record.science, split) for split in (Split.REPORT, Split.FEEDBACK))
        closed: dict[str, Any] = {
            "selected": None,
            "selected_by": "base_kept",
            "report": base.evaluation,
            "grader": "g",
        }
        closed |= {"baseline_report": base.key, "baseline_feedback": feedback.key}
        closed["baseline_sha256"] = {b.key: b.digest() for b in (base, feedback)}
        if run is not None:
            path, items, values = self._report[random.Random(index).randrange(REPORT_VARIANTS)]
            os.link(path, run.items / f"{count:06d}.report.jsonl.gz")
            closed["report"] = evaluation(Split.REPORT, sha(f"{run.run_id}-{count}"), values, items)
            closed |= {"selected": count, "selected_by": "best_feedback"}
        return [(EntryKind.SEALED, sealed), (EntryKind.CLOSED, bodies.Closed(**closed))]


_KEPT: dict[Any, Any] = {}


def _once(key: Any, make: Any) -> dict[str, Any]:
    if key not in _KEPT:
        _KEPT[key] = make().model_dump(mode="json")
    found: dict[str, Any] = _KEPT[key]
    return found


_SUBMISSION = bodies.Submission(
    **{"submission_id": 1, "manifest_id": "m", "status": "accepted", "model_path": "output/v", "elapsed_s": 0},
    **{"tensors": 290, "size_bytes": 10**9},
).model_dump(mode="json")
_FINGERPRINT = bodies.Fingerprint(
    **{"submission_id": 1, "content_hash": sha("x"), "took_s": 1.5, "grader": "g", "relative_delta": 0.011},
    **{"largest_delta": 0.05, "largest_tensor": "model.layers.3.mlp.up_proj.weight", "noise_delta": 0.0004},
    **{"changed_tensors": 288, "changed_share": 0.93, "moved_tensors": 280, "nearest_delta": 0.011},
    **{"nearest_model": "org/base0", "commonest_output_share": 0.01, "commonest_output_tokens": 14},
).model_dump(mode="json")
_CONTAMINATION = bodies.Contamination(
    **{"submission_id": 1, "files_scanned": 120, "bytes_scanned": 10**7, "complete": True, "took_s": 1.0},
    items={Split.FEEDBACK: 0, Split.REPORT: 0},
    of={Split.FEEDBACK: N_FEEDBACK, Split.REPORT: N_REPORT},
).model_dump(mode="json")


def _write_chain(run: RunDir, record: bytes, entries: list[tuple[EntryKind, Any]]) -> None:
    prev, lines = hashlib.sha256(record).hexdigest(), []
    for seq, (kind, body) in enumerate(entries, 1):
        told = body if isinstance(body, dict) else body.model_dump(mode="json")
        value = {"schema_version": 1, "seq": seq, "prev": prev, "kind": str(kind), "at": CREATED, "writer": WRITER}
        data = canonical_json({**value, "body": told}) + b"\n"
        with open(run.ledger / f"{seq:06d}.json", "wb") as file:
            file.write(data)
        prev = hashlib.sha256(data).hexdigest()
        lines.append(data)
    if entries[-1][0] is EntryKind.CLOSED:
        run.sealed_ledger.write_bytes(b"".join(lines))


def _usage(i: int) -> UsageSample:
    gpu = GpuSample(index=0, name="H100", uuid="GPU-1", used_share=0.8, memory_bytes=6 << 30, power_w=400.0)
    return UsageSample(elapsed_s=2.0 * i, at=CREATED, cpu_s=3.0 * i, memory_bytes=8 << 30, processes=9, gpus=(gpu,))


def _trace(i: int) -> TraceEvent:
    at = {"elapsed_s": 3.0 * i, "at": CREATED, "source": "agent.log", "offset": 900 * i, "format": "claude-code"}
    if i % 3 == 0:
        return TraceEvent(**at, kind="usage", model="llm", tokens_in=9000 + i, tokens_out=300, tokens_cached=8000)
    if i % 3 == 1:
        return TraceEvent(**at, kind="tool_call", call_id=f"c{i}", tool="Bash", command="python code/train.py")
    return TraceEvent(**at, kind="tool_result", call_id=f"c{i - 1}", ok=i % 5 != 0)


def _training(i: int) -> TrainingPoint:
    at = {"elapsed_s": 100.0 + 4 * i, "at": CREATED, "source": "agent.log", "trainer": "GRPOTrainer", "step": i}
    return TrainingPoint(**at, loss=1.0 / (i + 1), reward=0.01 * i, kl=0.001 * i, learning_rate=1e-6)


_RECORDED_ROWS: dict[str, Any] = {"usage": _usage, "trace": _trace, "training": _training}
assert set(_RECORDED_ROWS) <= set(RECORDED)
