"""What the recorder leaves beside a run of treemaker: lines through their records, code through the real repository."""

from __future__ import annotations

from typing import Any

from treemaker import CREATED, TreeRun

from autorl_hpc.recorder.code import FILE, Repository
from autorl_hpc.recorder.watch import LineWriter
from autorl_hpc.records.recorded import (
    CodeRevision,
    GpuSample,
    ProcessSeen,
    Seen,
    TraceEvent,
    TrainingPoint,
    UsageSample,
)


def add(run: TreeRun, name: str, *records: Seen) -> None:
    """Appends records to one of the recorder's files."""
    lines = LineWriter(run.dir.recorded(name))
    lines.add(*records)
    lines.close()


def usage(at_s: float, cpu_s: float | None = None, gpus: tuple[float | None, ...] = (), **more: Any) -> UsageSample:
    """A sample; `gpus`: the share of the time that each was used."""
    seen = tuple(GpuSample(index=i, name="H100", used_share=share) for i, share in enumerate(gpus))
    return UsageSample(elapsed_s=at_s, at=CREATED, cpu_s=cpu_s, gpus=seen, **more)


def event(at_s: float, kind: str, **more: Any) -> TraceEvent:
    """An event of a trace."""
    fields = {"source": "agent.log", "offset": 0, "format": "claude-code", **more}
    return TraceEvent.model_validate({"elapsed_s": at_s, "at": CREATED, "kind": kind, **fields})


def point(at_s: float, step: int | None = None, **more: Any) -> TrainingPoint:
    """A logged step."""
    fields = {"source": "output/trainer_state.json", **more}
    return TrainingPoint(elapsed_s=at_s, at=CREATED, step=step, **fields)


def process(at_s: float, command: str, what: str = "began", **more: Any) -> ProcessSeen:
    """A process that begins or ends."""
    fields = {"pid": 7, "parent": 1, "began_s": min(at_s, more.pop("began_s", at_s)), **more}
    return ProcessSeen.model_validate({"elapsed_s": at_s, "at": CREATED, "command": command, "what": what, **fields})


def code(run: TreeRun, at_s: float, files: dict[str, str], submission_id: int | None = None) -> str:
    """A state of the agent's code, committed and told; returns its revision. Paths are relative to the workspace."""
    repository = Repository.create(run.dir.code_git)
    parent = repository.head()
    entries = {path.encode(): (FILE, repository.write("blob", text.encode())) for path, text in files.items()}
    revision = repository.commit(repository.write_files(entries), parent, "state", 0)
    repository.set_ref("main", revision)
    told = CodeRevision(
        elapsed_s=at_s, at=CREATED, revision=revision, parent=parent, submission_id=submission_id, files=len(files)
    )
    add(run, "revisions", told)
    return revision
