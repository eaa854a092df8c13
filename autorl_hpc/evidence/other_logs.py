"""Write a closed run in the formats of other tools, each by its own library: an Inspect AI log, Trackio, an offline run of W&B.

What goes in is what a report shows: secrets masked, and no agent's words at all if held-out items were found in the workspace.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autorl_hpc import __version__
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.evidence.export import closed_run
from autorl_hpc.files.layout import RunDir
from autorl_hpc.files.redact import masked
from autorl_hpc.recorder.traces.turns import TraceTurn
from autorl_hpc.report.format import clean
from autorl_hpc.report.hidden_items import hidden_of
from autorl_hpc.report.run_folder import read_chain
from autorl_hpc.report.run_story.logs import read_recorded
from autorl_hpc.report.run_summary import digest
from autorl_hpc.report.summary import RunSummary
from autorl_hpc.report.trace_page import submitting, turns_of

FACTS = """run_id task agent driver base_model mode seed protocol network sandbox budget_s elapsed_s attempts accepted refused failed
selected selected_by ended_by exit_code flags counted ledger_entries ledger_head recipe_hash engine_hash task_hash agent_hash
base_model_content_hash code_hash"""
"""Fields of a summary that describe a run."""

STEP_FIGURES = ("step", "epoch", "loss", "reward", "kl", "learning_rate")


def library(name: str) -> Any:
    """Import a tool's library. Raises AutorlError: it is not installed."""
    extra = name.removesuffix("_ai")
    needs = "needs Python 3.11 or newer" if name == "inspect_ai" and sys.version_info < (3, 11) else None
    if needs is None:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            needs = f"can't be imported: {error}"
    advice = f"pip install 'autorl-hpc[{extra}]'"
    raise AutorlError(f"{name} {needs}", next_step=advice, exit_code=Exit.FAILED)


def final_scores(run: RunSummary) -> dict[str, float]:
    """Return a run's final figures in points, those that are known."""
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


# --- Trackio and W&B: training steps and feedback scores by budget time, as flat rows of figures


def curves(folder: RunDir, run: RunSummary) -> Iterator[dict[str, float]]:
    """Yield the rows of a run. Names of a trainer's own figures are an agent's words, sources are numbered."""
    hidden = hidden_of(read_chain(folder).view.contaminations)
    sources: dict[str, int] = {}
    rows: list[dict[str, float]] = []
    for point in read_recorded(folder).training.records:
        prefix = f"training-{sources.setdefault(point.source, len(sources) + 1)}/"
        own = {} if hidden.found else {clean(masked(name)) or "?": value for name, value in point.more.items()}
        figures = {**own, **{name: getattr(point, name) for name in STEP_FIGURES}}
        named = {prefix + name: value for name, value in figures.items() if value is not None}
        rows.append({"elapsed_s": point.elapsed_s, **named})
    for made in run.trajectory:
        scored = {"score": made.score, "low": made.low, "high": made.high, "submission": made.submission_id}
        named = {f"feedback/{name}": float(value) for name, value in scored.items() if value is not None}
        rows.append({"elapsed_s": made.elapsed_s, **named})
    yield from sorted(rows, key=lambda row: row["elapsed_s"])
    yield {f"final/{name}": value for name, value in final_scores(run).items()}


def to_trackio(path: Path, out: Path | None) -> Path:
    """Write training curves and scores into a folder of Trackio (TRACKIO_DIR); return it."""
    folder, out = closed_run(path), (out or Path("trackio")).absolute()
    os.environ["TRACKIO_DIR"] = str(out)  # read when trackio is imported
    trackio, run = library("trackio"), digest(folder)
    with contextlib.redirect_stdout(sys.stderr):  # it tells how to open its dashboard
        trackio.init(**_named(run), embed=False, auto_log_gpu=False, auto_log_cpu=False)
        for step, row in enumerate(curves(folder, run)):
            trackio.log(row, step=step)
        trackio.finish()
    return out


def to_wandb(path: Path, out: Path | None) -> Path:
    """Write training curves and scores as an offline run of W&B below a folder; return it. Nothing is sent."""
    folder, out = closed_run(path), (out or Path()).absolute()
    wandb, run = library("wandb"), digest(folder)
    out.mkdir(parents=True, exist_ok=True)
    of_this_host = {"disable_git": True, "disable_code": True, "x_disable_stats": True, "x_disable_meta": True}
    settings = wandb.Settings(mode="offline", console="off", silent=True, **of_this_host)
    with wandb.init(**_named(run), dir=str(out), settings=settings) as made:
        for step, row in enumerate(curves(folder, run)):
            made.log(row, step=step)
    return out / "wandb"


def _named(run: RunSummary) -> dict[str, Any]:
    return {"project": clean(run.experiment) or "autorl-hpc", "name": run.run_id, "config": _facts(run)}


def _facts(run: RunSummary) -> dict[str, Any]:
    return run.model_dump(mode="json", include=set(FACTS.split()))


# --- Inspect AI: one sample, whose transcript is the trace


def to_inspect(path: Path, out: Path | None) -> Path:
    """Write an Inspect AI log (`.eval`) and return its path."""
    library("inspect_ai")
    from inspect_ai import log as logs
    from inspect_ai.model import ModelUsage

    folder = closed_run(path)
    run = digest(folder)
    out = (out or Path(f"{run.run_id}.eval")).absolute()
    if out.suffix != ".eval":
        raise AutorlError(
            f"{out.name} does not end in .eval", where=out, next_step="give --out a name that ends in .eval"
        )
    begin = dt.datetime.fromisoformat(read_chain(folder).entries[0].at)
    times = {
        "started_at": begin.isoformat(),
        "completed_at": (begin + dt.timedelta(seconds=run.elapsed_s or 0.0)).isoformat(),
    }
    used, scores = run.story.resources, final_scores(run)
    total = ModelUsage(
        input_tokens=used.tokens_in or 0,
        output_tokens=used.tokens_out or 0,
        total_tokens=(used.tokens_in or 0) + (used.tokens_out or 0),
        input_tokens_cache_read=used.tokens_cached,
        total_cost=used.cost_usd,
    )
    usage = {_model(run): total} if total.total_tokens else {}
    metrics = {name: logs.EvalMetric(name=name, value=value) for name, value in scores.items()}
    failed = run.fault is not None and "report" not in scores
    why = logs.EvalError(message=run.reason or str(run.fault), traceback="", traceback_ansi="")
    log = logs.EvalLog(
        status="error" if failed else "success",
        eval=logs.EvalSpec(
            created=times["started_at"],
            task=f"autorl-hpc/{run.task}",
            model=_model(run),
            solver=run.agent,
            dataset=logs.EvalDataset(name=run.task, samples=1, sample_ids=[run.run_id]),
            config=logs.EvalConfig(time_limit=int(run.budget_s)),
            packages={"autorl_hpc": __version__},
            metadata=_facts(run),
        ),
        results=logs.EvalResults(
            total_samples=1,
            completed_samples=0 if failed else 1,
            scores=[logs.EvalScore(name="autorl-hpc", scorer="autorl-hpc", metrics=metrics)],
        ),
        stats=logs.EvalStats(model_usage=usage, **times),
        error=why if failed else None,
        samples=[_sample(run, turns_of(run, folder), begin, model_usage=usage, **times)],
    )
    logs.write_eval_log(log, str(out), format="eval")
    return out


def _model(run: RunSummary) -> str:
    return run.driver if run.driver != "none" else run.agent


def _sample(run: RunSummary, turns: list[TraceTurn], begin: dt.datetime, **figures: Any) -> Any:
    from inspect_ai import event
    from inspect_ai.log import EvalSample
    from inspect_ai.scorer import Score

    messages, events = list[Any](), list[Any]()
    places = submitting(turns, run.trajectory)
    for place, turn in enumerate(turns):
        when = {
            "timestamp": begin + dt.timedelta(seconds=turn.elapsed_s or 0.0),
            "working_start": turn.elapsed_s or 0.0,
        }
        of_turn = _messages(turn, f"e{place}", turn.model or _model(run))
        messages += of_turn
        events += _events(turn, of_turn, when)
        for point in run.trajectory:
            if places.get(point.submission_id) == place and point.score is not None:
                score = Score(value=point.score, explanation=f"feedback score of submission {point.submission_id}")
                events.append(event.ScoreEvent(score=score, intermediate=True, **when))
    prompt = next((m.text for m in messages if m.role == "user"), f"Improve {run.base_model} on {run.task}.")
    scores = {
        name: Score(value=value) for name, value in final_scores(run).items() if name in ("report", "improvement")
    }
    figures |= {"total_time": run.elapsed_s, "working_time": run.elapsed_s, "metadata": _facts(run)}
    told = {"messages": messages, "events": events, "scores": scores}
    return EvalSample(id=run.run_id, epoch=1, input=prompt, target="", **told, **figures)


def _messages(turn: TraceTurn, name: str, model: str) -> list[Any]:
    """Return words to the agent, its answer with tool calls, and what the tools said."""
    from inspect_ai import model as m
    from inspect_ai.tool import ToolCall, ToolCallError

    to = {"user": m.ChatMessageUser, "system": m.ChatMessageSystem}
    found = [to[part.kind](content=part.text) for part in turn.parts if part.kind in to]
    words = [part for part in turn.parts if part.kind in ("thought", "assistant")]
    content = [
        m.ContentReasoning(reasoning=p.text) if p.kind == "thought" else m.ContentText(text=p.text) for p in words
    ]
    tools = [(f"{name}-{n}", part) for n, part in enumerate(turn.parts) if part.kind == "tool"]
    if not content and not tools:
        return found
    calls = [ToolCall(id=key, function=part.tool or "tool", arguments={"input": part.text}) for key, part in tools]
    found.append(m.ChatMessageAssistant(content=content, tool_calls=calls or None, model=model))
    for key, part in tools:
        how = "failed" if part.exit_code is None else f"exit code {part.exit_code}"
        said = f"{how}\n{part.output or ''}".strip()  # the viewer shows either an error or an output
        error = ToolCallError("unknown", said) if part.failed else None
        answer = {"content": part.output or "", "function": part.tool or "tool", "error": error}
        found.append(m.ChatMessageTool(tool_call_id=key, **answer))
    return found


def _events(turn: TraceTurn, messages: list[Any], when: dict[str, Any]) -> Iterator[Any]:
    from inspect_ai import event
    from inspect_ai import model as m

    answer = next((each for each in messages if each.role == "assistant"), None)
    if answer is not None:
        output = m.ModelOutput(model=answer.model, choices=[m.ChatCompletionChoice(message=answer)])
        if turn.figures and not turn.is_total:
            given, made, cached = (int(turn.figures.get(f"tokens_{name}", 0)) for name in ("in", "out", "cached"))
            counts = {"input_tokens": given, "output_tokens": made, "total_tokens": given + made}
            cost = turn.figures.get("cost_usd")
            output.usage = m.ModelUsage(**counts, input_tokens_cache_read=cached, total_cost=cost)
        prompt = [each for each in messages if each.role in ("user", "system")]
        how = {"tools": [], "tool_choice": "auto", "config": m.GenerateConfig()}
        yield event.ModelEvent(model=answer.model, input=prompt, output=output, **how, **when)
        results = {each.tool_call_id: each for each in messages if each.role == "tool"}
        for call in answer.tool_calls or ():
            told = {"function": call.function, "arguments": call.arguments}
            said = results[call.id]
            yield event.ToolEvent(id=call.id, **told, result=said.text, error=said.error, **when)
    for part in turn.parts:
        if part.kind in ("output", "error", "end"):
            yield event.InfoEvent(source="agent.log", data={part.kind: part.text}, **when)
