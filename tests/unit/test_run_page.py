"""The page of one run: what stands on it, and that nothing of an agent's does anything there but stand."""

from __future__ import annotations

import html
import html.parser
import re

import pytest
import recordmaker as make
from markdown_it import MarkdownIt
from treemaker import Tree, TreeRun, outcomes

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import atomic
from autorl_hpc.files.frozen_records import JOBS_NAME
from autorl_hpc.files.queue import append_event
from autorl_hpc.records.entries import DriverUse
from autorl_hpc.records.recorded import ObservedFact
from autorl_hpc.report import pages, report, status
from autorl_hpc.report.run_page import sentence
from autorl_hpc.report.run_story.story import shown_lines, shown_settings
from autorl_hpc.report.run_summary import digest
from autorl_hpc.report.story_records import EvidenceLine, Failure, RouteTold, Setting
from autorl_hpc.report.summary import RunSummary
from autorl_hpc.report.terminal import print_logs
from autorl_hpc.states import EndedBy, FailureKind, Fault, Route

EVIL = "</code></pre><script>alert(1)</script>|`\x1b[31m\u202egnp\x00[x](http://e/) <img src=x onerror=a> # h \"'&lt;"

Capture = pytest.CaptureFixture[str]
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
        "Planned GRPO, executed SFT; 2 submissions, 1 refused, 1 not scored; +20.0 [+13.3, +28.9] over the base model",
        "planned grpo, executed sft; mode rl-only: not kept",
        "Why it did not help: reward or data design",
        "time 10 min of 20 min",
        "GPU-hours 0.50 no limit",
        "driver tokens 1,500 no limit",
        "driver cost 1.25 USD no limit",
        "starts 2 1 after an end of its own with budget left",
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
    assert {"add", "del", "hunk"} <= set(classes)
    headings = re.findall(r"Iterations|More|Scores|Route|Budget and use", page.text)
    assert headings[0] == "Iterations" and page.text.index("Iterations") < page.text.index("More")


def test_evidence_opens_its_line_and_a_diff_shows_every_file(tree: Tree) -> None:
    """Catches evidence of a file and a line that nobody can open, and a diff of only the first files."""
    run = tree.run(agent="codex", driver="gpt-x").start()
    code = {f"code/f{number}.py": f"x = {number}\n" * 90 for number in range(9)}
    run.dir.agent_log.write_text(
        'before\nTraceback (most recent call last):\n  File "code/f1.py", line 2\nOSError: no\n'
    )
    run.submit(100.0, outcomes(40, range(12)), code_revision=make.code(run, 1.0, {**code, "code/train.py": make.SFT}))
    found = make.told(run.seal(600.0, exit_code=1).close(outcomes(100, range(45))))
    page = Page(pages.run_html(found))
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    links = {str(attributes["href"]) for tag, attributes in page.tags if tag == "a"}
    assert links and all(link.startswith("#") and link[1:] in ids for link in links)
    assert any(line.where.startswith("train.py:") for line in found.story.route.planned_by)
    assert {one.path for one in found.story.quoted} >= {"train.py"} and "+x = 8" in page.text
    assert sum(tag == "details" and a.get("class") == "file" for tag, a in page.tags) >= 10


def test_a_page_reloads_while_its_run_goes_on(tree: Tree) -> None:
    def reloads(run: TreeRun) -> bool:
        return any(a.get("http-equiv") == "refresh" for _, a in Page(pages.run_html(digest(run.dir))).tags)

    assert reloads(tree.run(seed=1).start()) and not reloads(tree.finished(seed=0, solved=40))


def test_a_page_without_a_recorder_leaves_out_empty_blocks(tree: Tree) -> None:
    run = digest(tree.finished(seed=0, solved=40).dir)
    page = Page(pages.run_html(run))
    assert "GPU-hours" not in page.text and "tokens" not in page.text and "Held-out" not in page.text
    assert "not logged" not in page.text and "Trace" not in page.text
    for live in (tree.run(seed=1), tree.run(seed=2).start()):
        assert Page(pages.run_html(digest(live.dir))).open == []


def test_hostile_words_only_stand_there(tree: Tree) -> None:
    page_text = pages.run_html(whole(tree, EVIL))
    page = Page(page_text)
    assert page.open == []
    assert not {"img", "link", "iframe", "object", "base", "form"} & {tag for tag, _ in page.tags}
    assert sum(tag == "script" for tag, _ in page.tags) == 1, "ours, which the policy names by its hash"
    for _, attributes in page.tags:
        assert not {"src", "srcset", "data", "style"} & set(attributes)
        assert re.fullmatch(r"#[a-z0-9-]+", str(attributes.get("href", "#a")))
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
    told = ["Route and outcome", "Iterations", "Submission 1", "Submission 2", "Submission 3"]
    assert len(headings) == 6 and all(h.startswith(w) for h, w in zip(headings[1:], told, strict=True))
    # Every table row that was written became a row of a table.
    rows = sum(line.startswith("|") and not re.match(r"^[|:\- ]+$", line) for line in text.splitlines())
    empty_heads = sum(bool(re.match(r"^\|( \|)+$", line)) for line in text.splitlines())
    assert kinds.count("tr_open") == rows + empty_heads


CODES = {"crash": 1, "killed": -9, "odd": 163}
"""The last one is no signal that Python has a name for."""


def ended(tree: Tree, how: str) -> TreeRun:
    """A run that ended, or goes on, in one of the ways that its page tells in a sentence."""
    run = tree.run(agent="codex", driver="gpt-x")
    if how == "queued":
        return run
    run.start()
    if how == "crash, no log":
        facts = {"type": "KeyError", "message": "'question'", "where": "/w/code/train.py:5"}
        seen = {"elapsed_s": 3.0, "at": "x", "pid": 7, "program": "train.py", "what": "crashed", "facts": facts}
        make.add(run, "observed", ObservedFact.model_validate(seen))
        return run.seal(14.0, exit_code=1).close(fault=Fault.AGENT, reason="no submission")
    if how in CODES:
        run.dir.agent_log.write_text(
            "begun\nTraceback (most recent call last):\nModuleNotFoundError: No module named 'trl'\n"
        )
        return run.seal(14.0, exit_code=CODES[how]).close(fault=Fault.AGENT, reason="no submission")
    if how in ("budget", "quiet"):
        return run.seal(1200.0, EndedBy.BUDGET if how == "budget" else EndedBy.AGENT_EXIT, 0).close()
    if how == "lost":
        run.seal(1.0, EndedBy.CRASHED, None, fault=Fault.CLUSTER)
        return run.close(selected_by="infrastructure", report=None, fault=Fault.CLUSTER, reason="node lost")
    run.submit(100.0, outcomes(40, range(24)))
    if how in ("gain", "noise"):
        run.refuse(120.0, "no such folder")
        run.seal(600.0).close(outcomes(100, range(70 if how == "gain" else 26)))
    return run


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("queued", "waits for its start"),
        ("crash", "exited with code 1|14 s|ModuleNotFoundError: No module named 'trl'|nothing submitted"),
        ("crash, no log", "exited with code 1|14 s|KeyError: 'question' (train.py:5)|nothing submitted"),
        ("killed", "SIGKILL|14 s|nothing submitted"),
        ("odd", "exited with code 163|nothing submitted"),
        ("budget", "stopped after 20 min|time was used up|nothing submitted"),
        ("quiet", "ended by itself|nothing submitted"),
        ("lost", "infrastructure|node lost|not counted"),
        ("running", "1 submission|60.0|running"),
        ("gain", "1 submission|1 refused|+45.0 [|, more than noise|no failure"),
        ("noise", "1 submission|+1.0 [|no more than noise"),
    ],
)
def test_one_sentence_tells_the_outcome(tree: Tree, how: str, told: str) -> None:
    """Catches a page, or a terminal, that leaves a reader to find out how a run ended."""
    run = digest(ended(tree, how).dir)
    said = sentence(run)
    assert all(words in said.lower() or words in said for words in told.split("|")), said
    assert said.count(".") < 9 and "\n" not in said and said in html.unescape(pages.run_html(run))


@pytest.mark.parametrize(
    ("how", "error"),
    [("crash", "ModuleNotFoundError: No module named 'trl'"), ("crash, no log", "KeyError: 'question'")],
)
def test_status_and_report_tell_how_a_run_without_a_submission_ended(
    how: str, error: str, tree: Tree, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With names that a narrow terminal does not cut, and of one run its submissions; catches `agent: no submission` alone."""
    monkeypatch.setenv("COLUMNS", "30")  # shorter than the run's name
    run = ended(tree, how)
    error = f"exited with code 1 after 14 s: {error}"
    for facts in (status.collect([tree.path]), status.collect([run.dir.path])):
        status.show(facts)
        told = " ".join(capsys.readouterr().out.split())
        assert error in told.replace("Exited", "exited") and run.dir.run_id in told
    done = report.refresh([tree.path])
    report.show(done)
    assert error in " ".join(capsys.readouterr().out.replace("Exited", "exited").split())
    assert error in html.unescape(done.index.read_text()).replace("Exited", "exited")


def test_logs_of_one_run(tree: Tree, capsys: Capture) -> None:
    """Without terminal escapes, secrets, a bar's earlier states and lines on other runs; catches a log that steers a terminal."""
    run, other = tree.run(seed=1).start().seal(1.0), tree.run(seed=2)
    run.dir.agent_log.write_bytes(f"\x1b[31mred\x1b[0m\n  1%\r 99%\nHF_TOKEN={make.KEY}\nlast".encode())
    tree.experiment.jobs.mkdir(exist_ok=True)
    rows = [{"role": "grader-0", "pid": 7, "started": "x"}]
    atomic.write_json(tree.experiment.jobs / JOBS_NAME, {"schema_version": 1, "jobs": rows})
    (tree.experiment.jobs / "7_0_log.out").write_text(f"{run.dir.run_id}: 1.0\n{other.dir.run_id}: 2.0\nbegun\n")
    (tree.experiment.finished / run.dir.run_id).touch()
    print_logs(run.dir, "agent", True, print)
    assert capsys.readouterr().out == "red\n 99%\nHF_TOKEN=***\nlast\n"
    print_logs(run.dir, "grader", False, print)
    assert capsys.readouterr().out == f"{run.dir.run_id}: 1.0\nbegun\n"
    with pytest.raises(AutorlError, match="no log of its gateway"):
        print_logs(run.dir, "gateway", False, print)
