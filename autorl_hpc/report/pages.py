"""HTML and Markdown from the templates in templates/report/. Everything that is not a number of ours is escaped."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from autorl_hpc.files.share import share
from autorl_hpc.report import figures, index_parts, plot, run_parts
from autorl_hpc.report import format as fmt
from autorl_hpc.report import run_html as run_html_parts
from autorl_hpc.report import run_md as run_md_parts
from autorl_hpc.report.board import OverRuns
from autorl_hpc.report.charts import svg
from autorl_hpc.report.evidence import UNSEEN
from autorl_hpc.report.measured import how_measured
from autorl_hpc.report.run_parts import Shown
from autorl_hpc.report.spent import limits_told
from autorl_hpc.report.summary import Gain, MergedReport, Point, RunSummary, ScoreSummary
from autorl_hpc.report.text import markdown
from autorl_hpc.report.versus import Versus

if TYPE_CHECKING:
    from jinja2 import Environment, Template

NUMBERS = {
    "points": fmt.points,
    "signed": fmt.signed,
    "p_value": fmt.p_value,
    "duration": fmt.duration,
    "short": fmt.short_hash,
    "two": "{:.2f}".format,
    "delta": fmt.delta,
    "size": fmt.size,
    "percent": fmt.percent,
    "figure": figures.shown,
    "published": lambda score: fmt.UNKNOWN if score is None else f"{score:.2f}",
}


def index_html(merged: MergedReport, links: dict[int, str]) -> str:
    """The merged report as one page without a request to anywhere. `links`: by place in `runs`, the run's own page."""
    return _template("html", "index.html.j2").render(**index_parts.parts(merged, links))


def index_md(merged: MergedReport) -> str:
    """The merged report as Markdown."""
    found = index_parts.parts(merged, {}, drawn=False)
    return _template("md", "index.md.j2").render(**found)


def versus_html(versus: Versus) -> str:
    """One against another as a page."""
    return _template("html", "versus.html.j2").render(v=versus, script=index_parts.script())


def versus_md(versus: Versus) -> str:
    """One against another as Markdown."""
    return _template("md", "versus.md.j2").render(v=versus)


def run_html(run: RunSummary, shown: Shown | None = None) -> str:
    """One run as a page. `shown`: its words, where they were made already."""
    found = run_html_parts.parts(shown or run_parts.shown(run))
    return _template("html", "run.html.j2").render(found)


def run_md(run: RunSummary, shown: Shown | None = None) -> str:
    """One run as Markdown."""
    found = run_md_parts.parts(shown or run_parts.shown(run))
    return _template("md", "run.md.j2").render(found)


def outcome(run: RunSummary) -> str:
    """What became of a run, in a few words."""
    if run.excluded == "infrastructure":
        return f"lost: {run.fault or 'cluster'}"
    if run.excluded == "unfinished":
        return str(run.state)
    if run.excluded is not None:
        return run.excluded
    if run.flags:
        return f"{run.state}, {', '.join(run.flags)}"
    if run.improvement is not None and run.improvement.how == "base_kept":
        return f"base kept: {run.fault or 'agent'}"
    return f"{run.state}, {run.fault}" if run.fault else str(run.state)


def _score(score: ScoreSummary | Point | None) -> str:
    return fmt.UNKNOWN if score is None else f"{fmt.points(score.score)} {fmt.between(score.low, score.high)}".strip()


def _gain(gain: Gain | None) -> str:
    return (
        fmt.UNKNOWN
        if gain is None
        else f"{fmt.signed(gain.difference)} {fmt.signed_between(gain.low, gain.high)}".strip()
    )


def _over(over: OverRuns) -> str:
    return f"{fmt.signed(over.mean)} {fmt.over_between(over.interval, over.low, over.high)}".strip()


@cache
def _template(kind: str, name: str) -> Template:
    return _environment(kind).get_template(name)


@cache
def _environment(kind: str) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    html = kind == "html"
    environment = Environment(
        loader=FileSystemLoader(share("templates") / "report"),
        autoescape=html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=None if html else lambda value: value if isinstance(value, Markup) else markdown(value),
    )
    for name, number in NUMBERS.items():
        environment.filters[name] = number if html else _plain(number)
    between = (fmt.between, fmt.signed_between)
    environment.globals.update(
        between=between[0] if html else _plain(between[0]),
        signed_between=between[1] if html else _plain(between[1]),
        score=_plain(_score),
        gain=_plain(_gain),
        over=_plain(_over),
        outcome=outcome,
        how_measured=how_measured,
        unseen=UNSEEN,
        sample=lambda figure, place: Markup(svg.sample(figure, place)),
        counts=index_parts.counts,
        beside=index_parts.beside,
        share_between=_plain(fmt.share_between),
        amount=_plain(fmt.amount),
        limits_told=_plain(limits_told),
        gpus=fmt.gpus,
        over_between=fmt.over_between,
        drawn=lambda panel: Markup(svg.drawn(panel)),
        trajectory=lambda run: Markup(plot.trajectory(run)),
        strip=lambda *args: Markup(plot.strip(*args)),
    )
    return environment


def _plain(number: Any) -> Any:
    """A formatted number goes into Markdown as it is, but for the sign that would begin a tag."""
    from markupsafe import Markup

    return lambda *args: Markup(number(*args).replace("<", "&lt;"))
