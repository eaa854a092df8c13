"""Write a closed run in the formats of other tools: an Inspect AI log, Trackio, an offline run of W&B.

Each is written by its own library. What goes in is what a report shows: secrets masked, and no agent's words at all if held-out
items were found in the workspace.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from autorl_hpc import __version__
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.evidence.export import closed_run
from autorl_hpc.files.layout import RunDir
from autorl_hpc.files.redact import masked
from autorl_hpc.recorder.traces.turns import Part, Turn
from autorl_hpc.report.format import clean
from autorl_hpc.report.hidden_items import hidden_of
from autorl_hpc.report.run_folder import ReadableLedger, read_chain
from autorl_hpc.report.run_story.logs import read_recorded
from autorl_hpc.report.run_summary import digest
from autorl_hpc.report.summary import RunSummary
from autorl_hpc.report.trace_page import submitting, turns_of

NEEDS = {"inspect_ai": "inspect", "trackio": "trackio", "wandb": "wandb"}
"""By library, the extra of this package that installs it."""


@dataclass(frozen=True)
class ClosedRun:
    """A closed run as a report shows it."""

    folder: RunDir
    summary: RunSummary
    chain: ReadableLedger

    @staticmethod
    def of(folder: Path) -> ClosedRun:
        """Read a run. Raises AutorlError: it is not closed or does not verify."""
        run = closed_run(folder)
        chain = read_chain(run)
        return ClosedRun(run, digest(run, chain), chain)

    @cached_property
    def turns(self) -> list[Turn]:
        """Return its trace, masked, and without words if held-out items were found."""
        return turns_of(self.summary, self.folder)

    def scores(self) -> dict[str, float]:
        """Return its final figures in points, those that are known."""
        run = self.summary
        figures: dict[str, Any] = {
            "report": run.report and run.report.score,
            "base_report": run.baseline_report and run.baseline_report.score,
            "best_feedback": run.best_feedback and run.best_feedback.score,
            "base_feedback": run.baseline_feedback and run.baseline_feedback.score,
            "improvement": run.improvement and run.improvement.difference,
            "improvement_low": run.improvement and run.improvement.low,
            "improvement_high": run.improvement and run.improvement.high,
        }
        return {name: value for name, value in figures.items() if value is not None}

    def facts(self) -> dict[str, Any]:
        """Return what describes the run: conditions, hashes, how it ended."""
        names = """run_id task agent driver base_model mode seed protocol network sandbox budget_s elapsed_s attempts accepted refused
        failed selected selected_by ended_by exit_code flags counted ledger_entries ledger_head recipe_hash engine_hash task_hash agent_hash
        base_model_content_hash code_hash"""
        return self.summary.model_dump(mode="json", include=set(names.split()))

    def curves(self) -> Iterator[dict[str, float]]:
        """Yield training steps and feedback scores by budget time, as flat rows of figures."""
        hidden = hidden_of(self.chain.view.contaminations)
        sources: dict[str, int] = {}
        rows: list[dict[str, float]] = []
        for point in read_recorded(self.folder).training.records:
            number = sources.setdefault(point.source, len(sources) + 1)
            own: dict[str, Any] = {} if hidden.found else point.more
            figures = {**own, **{name: getattr(point, name) for name in STEP_FIGURES}}
            prefix = f"training-{number}/"
            named = {prefix + (clean(masked(k)) or "?"): v for k, v in figures.items() if isinstance(v, (int, float))}
            rows.append({"elapsed_s": point.elapsed_s, **named})
        for made in self.summary.trajectory:
            scored = {"score": made.score, "low": made.low, "high": made.high, "submission": made.submission_id}
            named = {f"feedback/{name}": float(value) for name, value in scored.items() if value is not None}
            rows.append({"elapsed_s": made.elapsed_s, **named})
        yield from sorted(rows, key=lambda row: row["elapsed_s"])
        yield {f"final/{name}": value for name, value in self.scores().items()}


STEP_FIGURES = ("step", "epoch", "loss", "reward", "kl", "learning_rate")


def library(name: str) -> Any:
    """Import a tool's library. Raises AutorlError: it is not installed."""
    if name == "inspect_ai" and sys.version_info < (3, 11):
        raise AutorlError(
            "inspect_ai needs Python 3.11 or newer",
            next_step="run this export with a newer Python",
            exit_code=Exit.FAILED,
        )
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise AutorlError(
            f"{name} can't be imported: {error}",
            next_step=f"pip install 'autorl-hpc[{NEEDS[name]}]'",
            exit_code=Exit.FAILED,
        ) from None


# --- Trackio and W&B


def to_trackio(folder: Path, out: Path | None) -> Path:
    """Write training curves and scores into a folder of Trackio (TRACKIO_DIR); return it."""
    run = ClosedRun.of(folder)
    out = (out or Path("trackio")).absolute()
    os.environ["TRACKIO_DIR"] = str(out)  # read when trackio is imported
    trackio = library("trackio")
    name, project = run.summary.run_id, clean(run.summary.experiment) or "autorl-hpc"
    quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    with contextlib.redirect_stdout(sys.stderr):  # it tells how to open its dashboard
        trackio.init(project=project, name=name, config=run.facts(), **quiet)
        for step, row in enumerate(run.curves()):
            trackio.log(row, step=step)
        trackio.finish()
    return out


def to_wandb(folder: Path, out: Path | None) -> Path:
    """Write training curves and scores as an offline run of W&B below a folder; return it. Nothing is sent."""
    run = ClosedRun.of(folder)
    out = (out or Path()).absolute()
    wandb = library("wandb")
    out.mkdir(parents=True, exist_ok=True)
    of_this_host = {"disable_git": True, "disable_code": True, "x_disable_stats": True, "x_disable_meta": True}
    settings = wandb.Settings(mode="offline", console="off", silent=True, **of_this_host)
    name, project = run.summary.run_id, clean(run.summary.experiment) or "autorl-hpc"
    made = wandb.init(project=project, name=name, dir=str(out), config=run.facts(), settings=settings)
    for step, row in enumerate(run.curves()):
        made.log(row, step=step)
    made.finish()
    return out / "wandb"


# --- Inspect AI


def to_inspect(folder: Path, out: Path | None) -> Path:
    """Write an Inspect AI log (`.eval`): one sample, whose transcript is the trace; return its path."""
    library("inspect_ai")
    import inspect_ai.log as log_of

    run = ClosedRun.of(folder)
    summary, scores = run.summary, run.scores()
    out = (out or Path(f"{summary.run_id}.eval")).absolute()
    if out.suffix != ".eval":
        raise AutorlError(
            f"{out.name} does not end in .eval", where=out, next_step="give --out a name that ends in .eval"
        )
    began = dt.datetime.fromisoformat(run.chain.entries[0].at)
    begin, end = began.isoformat(), (began + dt.timedelta(seconds=summary.elapsed_s or 0)).isoformat()
    model = summary.driver if summary.driver != "none" else summary.agent
    usage = _usage(run)
    metrics = {name: log_of.EvalMetric(name=name, value=value) for name, value in scores.items()}
    failed = summary.fault is not None and "report" not in scores
    log = log_of.EvalLog(
        status="error" if failed else "success",
        eval=log_of.EvalSpec(
            created=begin,
            task=f"autorl-hpc/{summary.task}",
            model=model,
            solver=summary.agent,
            dataset=log_of.EvalDataset(name=summary.task, samples=1, sample_ids=[summary.run_id]),
            config=log_of.EvalConfig(time_limit=int(summary.budget_s)),
            packages={"autorl_hpc": __version__},
            metadata=run.facts(),
        ),
        results=log_of.EvalResults(
            total_samples=1,
            completed_samples=0 if failed else 1,
            scores=[log_of.EvalScore(name="autorl-hpc", scorer="autorl-hpc", metrics=metrics)],
        ),
        stats=log_of.EvalStats(started_at=begin, completed_at=end, model_usage=usage),
        error=_error(run) if failed else None,
        samples=[_sample(run, began, model, usage)],
    )
    log_of.write_eval_log(log, str(out), format="eval")
    return out


def _error(run: ClosedRun) -> Any:
    from inspect_ai.log import EvalError

    return EvalError(message=run.summary.reason or str(run.summary.fault), traceback="", traceback_ansi="")


def _usage(run: ClosedRun) -> dict[str, Any]:
    from inspect_ai.model import ModelUsage

    used = run.summary.story.resources
    total_in, total_out = used.tokens_in or 0, used.tokens_out or 0
    if not total_in + total_out:
        return {}
    model = run.summary.driver if run.summary.driver != "none" else run.summary.agent
    figures = {"input_tokens": total_in, "output_tokens": total_out, "total_tokens": total_in + total_out}
    return {model: ModelUsage(**figures, input_tokens_cache_read=used.tokens_cached, total_cost=used.cost_usd)}


def _sample(run: ClosedRun, began: dt.datetime, model: str, usage: dict[str, Any]) -> Any:
    from inspect_ai.event import ScoreEvent
    from inspect_ai.log import EvalSample
    from inspect_ai.scorer import Score

    summary, messages, events = run.summary, [], list[Any]()
    places = submitting(run.turns, summary.trajectory)
    for place, turn in enumerate(run.turns):
        when = {
            "timestamp": began + dt.timedelta(seconds=turn.elapsed_s or 0.0),
            "working_start": turn.elapsed_s or 0.0,
        }
        of_turn = _of_turn(turn, f"e{place}", model)
        messages += of_turn
        events += _events(turn, of_turn, when, model)
        for point in summary.trajectory:
            if places.get(point.submission_id) == place and point.score is not None:
                score = Score(value=point.score, explanation=f"feedback score of submission {point.submission_id}")
                events.append(ScoreEvent(score=score, intermediate=True, **when))
    final = {name: Score(value=value) for name, value in run.scores().items() if name in ("report", "improvement")}
    prompt = next((m.text for m in messages if m.role == "user"), f"Improve {summary.base_model} on {summary.task}.")
    return EvalSample(
        id=summary.run_id,
        epoch=1,
        input=prompt,
        target="",
        messages=messages,
        events=events,
        scores=final,
        metadata=run.facts(),
        model_usage=usage,
        started_at=began.isoformat(),
        completed_at=(began + dt.timedelta(seconds=summary.elapsed_s or 0)).isoformat(),
        total_time=summary.elapsed_s,
        working_time=summary.elapsed_s,
    )


def _of_turn(turn: Turn, name: str, model: str) -> list[Any]:
    """Return a turn's messages: words to the agent, its answer with tool calls, and what the tools said."""
    from inspect_ai.model import (
        ChatMessageAssistant,
        ChatMessageSystem,
        ChatMessageTool,
        ChatMessageUser,
        ContentReasoning,
        ContentText,
    )
    from inspect_ai.tool import ToolCall, ToolCallError

    to = {"user": ChatMessageUser, "system": ChatMessageSystem}
    found = [to[part.kind](content=part.text) for part in turn.parts if part.kind in to]
    words = [part for part in turn.parts if part.kind in ("thought", "assistant")]
    content = [ContentReasoning(reasoning=p.text) if p.kind == "thought" else ContentText(text=p.text) for p in words]
    tools = [(f"{name}-{n}", part) for n, part in enumerate(turn.parts) if part.kind == "tool"]
    if not content and not tools:
        return found
    calls = [ToolCall(id=key, function=part.tool or "tool", arguments={"input": part.text}) for key, part in tools]
    found.append(ChatMessageAssistant(content=content, tool_calls=calls or None, model=turn.model or model))
    for key, part in tools:
        error = ToolCallError("unknown", _how_failed(part)) if part.failed else None
        text = part.output or ""
        found.append(ChatMessageTool(content=text, tool_call_id=key, function=part.tool or "tool", error=error))
    return found


def _how_failed(part: Part) -> str:
    how = "failed" if part.exit_code is None else f"exit code {part.exit_code}"
    return f"{how}\n{part.output or ''}".strip()  # the viewer shows either an error or an output


def _events(turn: Turn, messages: list[Any], when: dict[str, Any], model: str) -> Iterator[Any]:
    from inspect_ai.event import InfoEvent, ModelEvent, ToolEvent
    from inspect_ai.model import ChatCompletionChoice, GenerateConfig, ModelOutput, ModelUsage

    answer = next((m for m in messages if m.role == "assistant"), None)
    if answer is not None:
        counts = {name: int(turn.figures.get(name, 0)) for name in ("tokens_in", "tokens_out", "tokens_cached")}
        usage = ModelUsage(
            input_tokens=counts["tokens_in"],
            output_tokens=counts["tokens_out"],
            total_tokens=counts["tokens_in"] + counts["tokens_out"],
            input_tokens_cache_read=counts["tokens_cached"],
            total_cost=turn.figures.get("cost_usd"),
        )
        output = ModelOutput(model=turn.model or model, choices=[ChatCompletionChoice(message=answer)])
        output.usage = usage if turn.figures and not turn.is_total else None
        yield ModelEvent(
            model=turn.model or model,
            input=[m for m in messages if m.role in ("user", "system")],
            tools=[],
            tool_choice="auto",
            config=GenerateConfig(),
            output=output,
            **when,
        )
    results = {m.tool_call_id: m for m in messages if m.role == "tool"}
    for call in answer.tool_calls or () if answer is not None else ():
        said = results[call.id]
        yield ToolEvent(
            id=call.id, function=call.function, arguments=call.arguments, result=said.text, error=said.error, **when
        )
    for part in turn.parts:
        if part.kind in ("output", "error", "end"):
            yield InfoEvent(source="agent.log", data={part.kind: part.text}, **when)
