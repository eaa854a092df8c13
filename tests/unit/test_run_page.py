"""The page of one run: what stands on it, and that nothing of an agent's does anything there but stand."""

from __future__ import annotations

import html.parser
import re

import recordmaker as make
from markdown_it import MarkdownIt
from treemaker import Tree, TreeRun, outcomes

from autorl_hpc.files.queue import append_event
from autorl_hpc.records.entries import DriverUse
from autorl_hpc.report import pages
from autorl_hpc.report.axes import axes_of
from autorl_hpc.report.format import UNKNOWN
from autorl_hpc.report.run_story.story import shown_lines, shown_settings
from autorl_hpc.report.run_summary import digest
from autorl_hpc.report.story_records import EvidenceLine, Failure, RouteTold, Setting
from autorl_hpc.report.summary import RunSummary
from autorl_hpc.states import FailureKind, Fault, Route

EVIL = "</code></pre><script>alert(1)</script>|`\x1b[31m\u202egnp\x00[x](http://e/) <img src=x onerror=a> # h \"'&lt;"

NUL = "\0"  # no file name has one


no_fsync, tree = make.no_fsync, make.tree


class Page(html.parser.HTMLParser):
    """Tags with their attributes, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "line", "circle", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "circle", "path"):
            assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def whole(tree: Tree, words: str = "a note") -> RunSummary:
    """A run with everything in it; `words` wherever an agent can put some."""
    run: TreeRun = tree.run(agent="codex", driver="gpt-x", mode="rl-only").start()
    append_event(run.dir.events, "recorder_trouble", watch="usage", message=words)
    first = make.code(run, 1.0, {"code/a.py": f"x = 1  # {words}\n", "code/b.py": "y\n"})
    run.refuse(50.0, words, code_revision=first)
    second = make.code(
        run, 60.0, {"code/a.py": "x = 2\n", f"code/{words.replace('/', '_').replace(NUL, '')[:80]}.py": "z\n"}
    )
    run.submit(100.0, outcomes(40, range(12)), code_revision=second, note=words)
    broken = run.submit(200.0, code_revision=second)
    run.score(broken, None, fault=Fault.ARTIFACT, reason=words)
    make.add(run, "training", make.point(60.0, 5, loss=0.25, reward=0.75, trainer=words, source=words))
    make.add(run, "trace", make.event(10.0, "usage", tokens_in=1_500_000, tokens_out=50, cost_usd=1.25, model=words))
    make.add(run, "usage", make.usage(5.0, 1.0, (0.5,)), make.usage(10.0, 6.0, (0.7,)))
    make.add(run, "processes", make.process(20.0, words))
    use = DriverUse(tokens_in=1400, tokens_out=100, cost_usd=1.25, calls=3)
    run.seal(600.0, gpu_hours=0.5, driver=use, exit_codes=(3, 0), reprompts=1)
    found = digest(run.close(outcomes(100, range(45))).dir)
    lines = shown_lines([EvidenceLine(where=words, says=words)])
    route = RouteTold(planned=Route.GRPO, executed=Route.SFT, planned_by=lines, executed_by=lines)
    failure = Failure(kind=FailureKind.REWARD_OR_DATA, evidence=lines)
    settings = shown_settings([Setting(name=words, value=words, where=words)])
    told = [i.model_copy(update={"settings": settings, "failure": failure}) for i in found.story.iterations]
    more = {"iterations": tuple(told), "route": route, "failure": failure, "mode_kept": False}
    return found.model_copy(update={"story": found.story.model_copy(update=more)})


def test_the_page_tells_the_story(tree: Tree) -> None:
    run = whole(tree)
    page = Page(pages.run_html(run))
    for words in (
        "Score against time, submissions, tokens, GPU-hours",
        "planned grpo , executed sft",
        "rl-only: not kept",
        "Why it did not help: reward or data design",
        "without human help",
        "time 10 min of 20 min",
        "GPU-hours 0.50 no limit",
        "driver tokens 1,500 no limit",
        "driver cost 1.25 USD no limit",
        "starts 2 1 after an end of its own with budget left",
        "valid_submission_rate 33 %",
        f"monotonic_ratio {UNKNOWN}",
        "last_submit_gap 6.7 min",
        "GPU use 70 %",
        "1.5 M",
        "1.25 USD",
        "last loss 0.25, last reward 0.75",
        "2 items won, 0 lost",
        "+x = 2",
        "-y",
        "recorder trouble: watch usage",
        "supervisor on",
    ):
        assert words in page.text, words
    assert page.open == []
    classes = [attributes.get("class") for tag, attributes in page.tags if tag == "span"]
    assert {"add", "del", "hunk", "file"} <= set(classes)
    assert [axis.name for axis in axes_of(run)] == ["time", "submissions", "tokens", "GPU-hours"]


def test_a_page_without_a_recorder_has_neither_iterations_nor_use(tree: Tree) -> None:
    run = digest(tree.finished(seed=0, solved=40).dir)
    page = Page(pages.run_html(run))
    assert "Iterations" not in page.text and "GPU-hours" not in page.text and "tokens" not in page.text
    assert "Score against time, submissions" in page.text and "time_to_best 6.7 min" in page.text
    assert "Iterations" not in pages.run_md(run)
    for live in (tree.run(seed=1), tree.run(seed=2).start()):
        assert Page(pages.run_html(digest(live.dir))).open == []


def test_hostile_words_only_stand_there(tree: Tree) -> None:
    page_text = pages.run_html(whole(tree, EVIL))
    page = Page(page_text)
    assert page.open == []
    assert not {"script", "img", "link", "iframe", "object", "base", "a", "form"} & {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        assert not {"src", "href", "srcset", "data", "style"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f\u202a-\u202e\u2066-\u2069]", page_text)
    assert "<script>alert(1)</script>" in page.text  # literally, as words


def test_markdown_renders_with_hostile_words(tree: Tree) -> None:
    text = pages.run_md(whole(tree, EVIL))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f\u202a-\u202e\u2066-\u2069]", text)
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    inside = [child.type for token in tokens for child in token.children or ()]
    assert not {"html_inline", "link_open", "image", "code_inline"} & set(inside)
    kinds = [token.type for token in tokens]
    assert "html_block" not in kinds and "fence" not in kinds
    headings = [tokens[i + 1].content for i, kind in enumerate(kinds) if kind == "heading_open"]
    told = ["Route and outcome", "Iterations", "Submission 1", "Submission 2", "Submission 3", "Held-out items"]
    assert len(headings) == 7 and all(h.startswith(w) for h, w in zip(headings[1:], told, strict=True))
    diffs = [token.content for token in tokens if token.type == "code_block"]
    assert len(diffs) == 2 and "+x = 2" in diffs[1] and "<script>" in diffs[0]
    # Every table row that was written became a row of a table.
    rows = sum(line.startswith("|") and not re.match(r"^[|:\- ]+$", line) for line in text.splitlines())
    empty_heads = sum(bool(re.match(r"^\|( \|)+$", line)) for line in text.splitlines())
    assert kinds.count("tr_open") == rows + empty_heads


def test_one_axis_where_nothing_else_is_known(tree: Tree) -> None:
    queued = digest(tree.run(seed=3).dir)
    assert [axis.name for axis in axes_of(queued)] == ["time", "submissions"]
    assert "no feedback score" in pages.run_html(queued)
