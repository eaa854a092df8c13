"""Read a run's folder for a report: the ledger up to any damage, base models' scores, items files, and what qualifies a score.

The last is sandbox, fingerprints and contamination. Baselines and items files are used only if their hashes are as recorded.
"""

from __future__ import annotations

import datetime as dt
import gzip
import hashlib
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import IO, Any, cast
from zipfile import BadZipFile, ZipFile

from pydantic_core import from_json

from autorl_hpc.errors import AutorlError, Refused
from autorl_hpc.files import reading
from autorl_hpc.files.checkpoint import folder_content_hash, hash_span, tensors_of
from autorl_hpc.files.frozen_records import baseline_key, read_baseline, recorded_hashes
from autorl_hpc.files.layout import ExperimentDir, RunDir
from autorl_hpc.files.ledger import Ledger, Linked, sha256_hex
from autorl_hpc.files.redact import masked
from autorl_hpc.files.run_view import RunView
from autorl_hpc.records.base import NewerVersion
from autorl_hpc.records.entries import Contamination, Evaluation, Fingerprint, SandboxUsed, Sealed
from autorl_hpc.records.exchange import Baseline
from autorl_hpc.records.recorded import RECORDED
from autorl_hpc.records.run import RunRecord, Science
from autorl_hpc.report.format import clean
from autorl_hpc.report.hidden_items import Hidden
from autorl_hpc.report.summary import Found, RunSummary
from autorl_hpc.states import EntryKind, SandboxLevel, Split
from autorl_hpc.tasks.loader import PUBLIC_SPLITS

CHUNK_BYTES = 1 << 20
LOOK = "look at the run's folder and its permissions, and report again; `autorl-hpc verify` says more"
EMPTIED = "the ledger has no entry, but the run went on: {} is there"


@dataclass(frozen=True)
class ReadableLedger:
    """The readable part of a ledger: the entries before any damage."""

    view: RunView
    damage: str | None  # what is wrong; None for a whole chain. A damaged run is shown but never counted
    genesis: str  # hash of run.json, with which the chain begins
    hashes: tuple[str, ...]  # of the entries, in order; copies of one run have equal first hashes
    entries: tuple[Linked, ...] = ()  # with the writer and time of each


def genesis_of(run: RunDir) -> str:
    """Return the hash of run.json, with which the chain begins. Raises AutorlError: run.json can't be read."""
    try:
        return sha256_hex(reading.read_bytes(run.record))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise AutorlError(f"run.json can't be read: {why}", where=run.record, next_step=LOOK) from None


def read_chain(run: RunDir) -> ReadableLedger:
    """Read a ledger, damaged or not. Raises AutorlError: run.json can't be read; or a newer autorl-hpc wrote the
    ledger, which is not damage."""
    ledger, genesis, damage = Ledger(run), genesis_of(run), None
    try:
        if not ledger.read() and (left := left_of_a_run(run)) is not None:
            # the first entry may have been written between the two looks
            damage = None if ledger.read() else EMPTIED.format(left)
    except NewerVersion:
        raise
    except AutorlError as error:
        damage = error.what
    except (OSError, ValueError) as error:
        damage = f"the ledger can't be read: {error}"
    hashes = tuple(linked.sha256 for linked in ledger.entries)
    damage = damage or _shorter_than_sealed(run, hashes)
    return ReadableLedger(RunView.of(ledger.entries), damage, genesis, hashes, tuple(ledger.entries))


def unlike_the_seal(run: RunDir, sealed: Sealed | None) -> list[str]:
    """Return which of the recorder's files are not as they were when the run was sealed; none for a seal that names none."""
    if sealed is None or sealed.recorded is None:
        return []
    try:
        here = recorded_hashes(run)
    except OSError as error:
        return [f"{error.filename} can't be read: {error.strerror}"]
    names = sorted({*here, *sealed.recorded})
    return [
        f"{name} {'is missing' if name not in here else 'is not the one that was there'}"
        for name in names
        if here.get(name) != sealed.recorded.get(name)
    ]


def left_of_a_run(run: RunDir) -> str | None:
    """Return the name of a file that is only written after the first entry; None if there is none."""
    for path in (run.items, run.code_git, *map(run.recorded, RECORDED)):
        try:
            there = bool(reading.list_names(path)) if path == run.items else path.exists()
        except OSError:
            continue
        if there:
            return str(path.relative_to(run.path))
    return None


def _shorter_than_sealed(run: RunDir, hashes: tuple[str, ...]) -> str | None:
    """Return what differs from the sealed copy. Entries missing at the end break no link; only this copy shows it."""
    try:
        lines = [line + b"\n" for line in reading.read_bytes(run.sealed_ledger).split(b"\n") if line]
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return f"ledger.jsonl can't be read: {error}"
    if not lines:
        return "ledger.jsonl is empty: it was altered"
    sealed = tuple(map(sha256_hex, lines))
    if sealed == hashes[: len(sealed)]:
        return None
    if hashes == sealed[: len(hashes)]:
        return f"ledger.jsonl has {len(sealed)} entries and ledger/ only {len(hashes)}: entries were removed"
    return "ledger/ and its sealed copy ledger.jsonl differ: one of them was altered"


# --- base models' scores, used only if they fit their name and the run


class Bases:
    """The baselines folder of an experiment, read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        keys = [name.removesuffix(".json") for name in reading.list_names(folder) if name.endswith(".json")]
        read = {key: one for key in keys if (one := read_baseline(folder, key)) is not None and one.key == key}
        self._known = {key: one for key, one in read.items() if one.evaluation.engine_hash == one.engine.digest()}

    def by_engine(self, science: Science, split: Split, engine_hash: str) -> Baseline | None:
        """Return the base model's score on a split, measured by one engine; None if there is none."""
        found = self._known.get(baseline_key(science, split, engine_hash))
        return found if found is not None and _fits(found, science, split) else None

    def any_engine(self, science: Science, split: Split) -> Baseline | None:
        """Return the base model's score on a split if exactly one engine measured it, else None."""
        engines = {b.evaluation.engine_hash for b in self._known.values() if b.evaluation.engine_hash}
        found = [b for engine in sorted(engines) if (b := self.by_engine(science, split, engine)) is not None]
        return found[0] if len(found) == 1 else None

    def items_path(self, baseline: Baseline) -> Path:
        return self.folder / f"{baseline.key}.items.jsonl.gz"


def _fits(baseline: Baseline, science: Science, split: Split) -> bool:
    evaluation = baseline.evaluation
    return (
        evaluation.split is split
        and evaluation.content_hash == science.base_model_content_hash
        and evaluation.recipe_hash == science.recipe.hash()
        and evaluation.n == science.asked(split)
    )


# --- items files (`items/<submission>.<split>.jsonl.gz`)

_NOTHING: Mapping[str, Any] = {}
SCORE_TOLERANCE = 1e-6  # points; summing the same outcomes in another order changes a mean by far less


class Unusable(Exception):
    """The reason why an items file can't be used."""


@dataclass(frozen=True)
class Items:
    """Outcomes of one model on one split, in the split's order."""

    ids: tuple[str, ...]
    outcomes: tuple[float, ...]
    commonest_output_share: float
    wrong: tuple[
        tuple[str, str, int], ...
    ] = ()  # of each answer that is not wholly right: item, hash of its text, tokens
    facts: tuple[Mapping[str, Any], ...] = ()  # by item, what its scorer recorded for the statistics; empty if nothing
    lc_c: float | None = None  # the penalty that a length-controlled win rate was fitted with
    clusters: tuple[str, ...] | None = None  # by item, the name of its cluster; None if the items are independent

    @property
    def binary(self) -> bool:
        return set(self.outcomes) <= {0.0, 1.0}


def read_items(path: Path, evaluation: Evaluation) -> Items:
    """Return the items behind a score. Raises Unusable: the file is absent, altered (its sha256 is not the recorded
    one), or doesn't add up to the score."""
    if evaluation.items_sha256 is None:
        raise Unusable("the score names no items file")
    items = _parse(path, evaluation.items_sha256)
    score = 100.0 * sum(items.outcomes) / len(items.outcomes)
    recorded = evaluation.metrics.get("mean_outcome", evaluation.score)
    if evaluation.score is None or recorded is None or abs(score - recorded) > SCORE_TOLERANCE:
        raise Unusable(f"{path.name} gives {score:.4f}, not the score of the record")
    return replace(items, lc_c=evaluation.metrics.get("lc_c"))


@lru_cache(maxsize=16)  # a base model's are needed for each submission
def _parse(path: Path, wanted: str) -> Items:
    try:
        data = reading.read_bytes(path)
    except FileNotFoundError:
        raise Unusable(f"{path.name} is missing") from None
    except (OSError, ValueError) as error:
        raise Unusable(f"{path.name} can't be read: {error}") from None
    if hashlib.sha256(data).hexdigest() != wanted:
        raise Unusable(f"{path.name} was altered: its sha256 is not the one that was recorded")
    try:
        lines = reading.gunzip(data).rstrip(b"\n").replace(b"\n", b",")
        rows = from_json(b"[" + lines + b"]")  # one call takes a tenth of the time of one per line
        ids = tuple([str(row["id"]) for row in rows])
        outcomes = tuple([float(row["outcome"]) for row in rows])
        outputs = Counter([row.get("output_sha256") for row in rows])
        answers = zip(ids, rows, outcomes, strict=True)
        wrong = tuple(
            [(name, str(row.get("output_sha256")), row.get("tokens") or 0) for name, row, o in answers if o < 1.0]
        )
        facts = tuple([row.get("facts") or _NOTHING for row in rows]) if b"facts" in lines else ()
        clusters = _clusters(ids, [one.get("cluster") for one in facts]) if any(facts) else None
    except (RecursionError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Unusable(f"{path.name} is not an items file: {type(error).__name__}") from None
    if not rows or len(set(ids)) != len(ids):
        raise Unusable(f"{path.name} is empty or has an item twice")
    share = max(outputs.values()) / len(rows)
    return Items(ids, outcomes, share, wrong, facts if any(facts) else (), clusters=clusters)


def _clusters(ids: Sequence[str], named: Sequence[object]) -> tuple[str, ...] | None:
    """Return the cluster of each item; an item without one is its own cluster. None if no two items share one."""
    if not any(name is not None for name in named):
        return None
    clusters = tuple(f"item {key}" if name is None else str(name) for key, name in zip(ids, named, strict=True))
    return clusters if len(set(clusters)) < len(clusters) else None


# --- what qualifies a score: sandbox, fingerprints, contamination

# sandbox levels without protection: the agent could have read the items that it is scored on
NEVER_RANKS = (str(SandboxLevel.NONE),)
# flags of the selected checkpoint that exclude a run from ranking: the agent did not make the model that was scored
UNRANKING = ("untrained_copy", "foreign_weights")
IN_DOUBT = "in doubt: "  # begins the notes on `RunSummary.doubts`

UNSEEN = (
    "What a model memorised, or was distilled from others who know the items, leaves no text in a workspace: this look can't "
    "see it."
)
MANY_FILES = 20  # number of file names per look in a run's summary; the ledger names more


def sandboxes(view: RunView) -> tuple[SandboxUsed, ...]:
    """Return the sandbox of each attempt, as proven on its node, with texts cleaned."""
    return tuple(
        used.model_copy(
            update={
                "holes": tuple(clean(hole) or "" for hole in used.holes),
                "refused": {clean(name) or "": clean(why) or "" for name, why in used.refused.items()},
            }
        )
        for used in view.sandboxes
    )


def shown_look(known: Contamination, hidden: Hidden) -> Contamination:
    """Return a look as the report shows it. File names are the agent's: cleaned, and masked if they contain held-out items."""
    if not known.found and known.reason is None:
        return known
    files = tuple(one.model_copy(update={"file": clean(masked(hidden.name(one.file))) or "?"}) for one in known.found)
    more = known.found_unlisted + max(0, len(files) - MANY_FILES)
    update = {"found": files[:MANY_FILES], "found_unlisted": more, "reason": clean(known.reason)}
    return known.model_copy(update=update)


def worst_found(looks: Iterable[Contamination]) -> tuple[Found, ...]:
    """Return, by split, the most held-out items in any look, and the first look that found so many: deleted later or not."""
    most: dict[Split, Found] = {}
    for look in looks:
        for split in Split:
            count, of = look.items.get(split, 0), look.of.get(split, 0)
            if count and (split not in most or count > most[split].items):
                most[split] = Found(split=split, items=count, of=of, submission_id=look.submission_id)
    return tuple(most[split] for split in Split if split in most)


def looks(run: RunSummary) -> list[Contamination]:
    found = [point.contamination for point in run.trajectory]
    return [look for look in (*found, run.contamination_end) if look is not None]


def selected_fingerprint(run: RunSummary) -> Fingerprint | None:
    return next((p.fingerprint for p in run.trajectory if p.submission_id == run.selected), None)


def ranks(splits: Iterable[str], sandbox: str, flags: Sequence[str]) -> bool:
    """Return whether a run's score on these held-out splits may be ranked."""
    return not PUBLIC_SPLITS & set(splits) and sandbox not in NEVER_RANKS and not set(flags) & set(UNRANKING)


def in_doubt(run: RunSummary, doubts: Sequence[str]) -> RunSummary:
    """Return a run with doubts, which is shown and does not rank."""
    every = tuple(dict.fromkeys((*run.doubts, *doubts)))
    notes = [note for note in run.notes if not note.startswith(IN_DOUBT)]
    told = [f"{IN_DOUBT}{doubt}; does not rank" for doubt in every]
    return run.model_copy(update={"ranked": False, "doubts": every, "notes": (*told, *notes)})


# --- the same run twice: what only one run can have, and weights that came with the agent

# two models that answer everything rightly, or with one text, may agree word for word; with three different wrong texts hardly
MIN_WRONG_TEXTS = 3
SAME_SHARE, MIN_LONG, LONG_TOKENS, MAX_LONG = 0.95, 20, 32, 100
"""Share of equal texts that two runs don't reach, among wrong answers of so many tokens that are not the base model's, of which there are
so many different ones; and the most that are compared. Of short answers two honest seeds share 99 % (arithmetic, SFT: 244 of 246)."""
MIN_TIMES = 2  # measured times that two runs must share: among thousands of runs one time may be equal to the nanosecond by chance
LEAST_TIME_S = 0.1
MAX_TIMES = 24
# A container numbers its processes from 1 at each start, so its two runs of one machine may share a small pid
CONTAINER_PIDS = 1000
Marks = Mapping[str, Sequence[str]]
MARKS = {
    "weights": "the same weights",
    "answers": "the same answer to every held-out item",
    "texts": "nearly all of the long wrong answers",
    "times": "the same measured times",
    "processes": "one supervisor process",
}


def marks_of(run: RunDir, view: RunView, entries: Sequence[Linked]) -> dict[str, tuple[str, ...]]:
    """Return what no other run can have, by the names in `MARKS`: of a closed run its selected weights and their answers, if the
    agent made them; of any run its measured times and its supervisors' processes."""
    closed = view.closed
    chosen = view.submissions.get(closed.selected) if closed is not None and closed.selected is not None else None
    found: dict[str, tuple[str, ...]] = {}
    if chosen is not None and not chosen.is_base and chosen.content_hash is not None:
        found["weights"] = (chosen.content_hash,)
        found |= _own_answers(run, view)
    copies = {number for number, one in view.submissions.items() if one.is_base}
    own = [e for e in entries if e.kind is not EntryKind.SCORE or e.body.submission_id not in copies]
    if closed is not None and "weights" not in found:  # its times are those of the base model's, which runs share
        own = [e for e in own if e.kind is not EntryKind.CLOSED]
    times = list(dict.fromkeys(f"{value:.9f}" for e in own for value in _measured(e.entry.body)))
    if times:
        found["times"] = tuple(times[:MAX_TIMES])
    began: dict[tuple[str, str | None, int], list[str]] = defaultdict(list)
    for entry in entries:
        if (writer := entry.writer).role == "supervisor":
            began[writer.host, writer.job_id, writer.pid].append(entry.at)
    if began:
        found["processes"] = tuple(" ".join([*map(str, who), at[0], at[-1]]) for who, at in began.items())
    return found


def _own_answers(run: RunDir, view: RunView) -> dict[str, tuple[str, ...]]:
    """Return the marks by the selected checkpoint's answers on the report split, without those that another model could give."""
    closed, folder = view.closed, ExperimentDir(run.path.parent).baselines
    assert closed is not None and closed.selected is not None
    score = view.score_of(view.submissions[closed.selected])
    if closed.report is None or score is None or closed.report.items_sha256 is None:
        return {}
    base = read_baseline(folder, closed.baseline_report or "")
    if base is not None and base.evaluation.items_sha256 == closed.report.items_sha256:
        return {}  # hardly changed: it answers as the base model
    found: dict[str, tuple[str, ...]] = {}
    for number in (closed.selected, score.submission_id):
        with suppress(Unusable):
            items = read_items(run.items / f"{number:06d}.report.jsonl.gz", closed.report)
            if len({text for _, text, _ in items.wrong}) >= MIN_WRONG_TEXTS:
                found["answers"] = (
                    sha256_hex(f"{score.evaluation.items_sha256} {closed.report.items_sha256}".encode()),
                )
            if base is not None:
                theirs = read_items(folder / f"{base.key}.items.jsonl.gz", base.evaluation).wrong
                found["texts"] = _long_texts(items.wrong, {one[:2] for one in theirs})
            break
    return {kind: marks for kind, marks in found.items() if marks}


def _long_texts(wrong: Iterable[tuple[str, str, int]], of_base: Set[tuple[str, str]]) -> tuple[str, ...]:
    """Return the marks of some long wrong answers that are not the base model's, of all runs on the same items."""
    own = sorted(
        (sha256_hex(item.encode()), text) for item, text, n in wrong if n >= LONG_TOKENS and (item, text) not in of_base
    )
    if len({text for _, text in own}) < MIN_LONG:
        return ()
    return tuple(sha256_hex(f"{item} {text}".encode())[:10] for item, text in own[:MAX_LONG])


def _measured(value: object, name: str = "") -> Iterator[float]:
    """Yield the times in a body that a clock gave: no round figures."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _measured(each, key)
    elif isinstance(value, float) and name.endswith("_s") and value >= LEAST_TIME_S and round(value, 6) != value:
        yield value


def same_runs(marks: Sequence[Marks]) -> list[dict[int, tuple[str, ...]]]:
    """Return, for each run, the other runs that share a mark with it, with what they share in words."""
    holders: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    for place, own in enumerate(marks):
        for kind, values in own.items():
            for value in values if kind != "texts" else ():
                key = value.rsplit(" ", 2)[0] if kind == "processes" else value
                holders[kind, key].append((place, value))
    shared: Counter[tuple[int, int, str]] = Counter()
    for (kind, _), several in holders.items():
        for (a, one), (b, other) in combinations(several, 2):
            if a != b and (kind != "processes" or _one_process(one, other)):
                shared[a, b, kind] += 1
    texts = {place: set(own["texts"]) for place, own in enumerate(marks) if own.get("texts")}
    for (a, one_set), (b, other_set) in combinations(texts.items(), 2):
        enough = SAME_SHARE * max(len(one_set), len(other_set))
        if not shared[a, b, "answers"] and min(len(one_set), len(other_set)) >= enough <= len(one_set & other_set):
            shared[a, b, "texts"] = 1
    found: list[dict[int, tuple[str, ...]]] = [{} for _ in marks]
    for (a, b, kind), count in sorted(shared.items(), key=lambda one: list(MARKS).index(one[0][2])):
        if count >= (MIN_TIMES if kind == "times" else 1):
            for place, twin in ((a, b), (b, a)):
                found[place][twin] = (*found[place].get(twin, ()), MARKS[kind])
    return found


def _one_process(one: str, other: str) -> bool:
    """Return whether two runs of the same host, job and pid had one supervisor: at the same time, or by a pid of no container."""
    _, job, pid, *_ = one.rsplit(" ", 4)
    if job != "None" and int(pid) > CONTAINER_PIDS:
        return True
    with suppress(ValueError, TypeError):  # a damaged entry's time
        (begin, end), (begins, ends) = (map(dt.datetime.fromisoformat, each.split(" ")[-2:]) for each in (one, other))
        return max(begin, begins) < min(end, ends)
    return False


def came_with_agent(run: RunDir, record: RunRecord, content: str) -> str | None:
    """Return a file or folder of the agents' frozen folders that holds these weights, or most of their bytes; None if there is none."""
    experiment = ExperimentDir(run.path.parent)
    folders, shipped = _shipped(experiment.code / record.code_hash / "templates" / "agents")
    if content in folders:
        return folders[content]
    sizes, held = {size for size, _ in shipped}, Counter[str]()
    with suppress(Refused, OSError, ValueError):  # freed, or never whole: `verify` says so
        tensors = tensors_of(experiment.artifacts / content)
        for tensor in tensors:
            size = tensor.end - tensor.begin
            if size in sizes:
                with open(experiment.artifacts / content / tensor.file, "rb") as file:
                    key = size, hash_span(file.fileno(), tensor.begin, tensor.end)
                held[shipped.get(key, "")] += size
        del held[""]
        if 2 * held.total() >= sum(tensor.end - tensor.begin for tensor in tensors) > 0:
            return held.most_common(1)[0][0]
    return None


@lru_cache(maxsize=8)
def _shipped(agents: Path) -> tuple[dict[str, str], dict[tuple[int, str], str]]:
    """Return what lies below the agents' frozen folders: folders with safetensors files by content hash, and each file, tensor or
    packed file by size and hash."""
    folders: dict[str, str] = {}
    parts: dict[tuple[int, str], str] = {}
    for folder in sorted({path.parent for path in agents.rglob("*.safetensors")}):
        with suppress(Refused, OSError, ValueError):
            folders[folder_content_hash(folder)] = folder.relative_to(agents).as_posix()
    for path in sorted(path for path in agents.rglob("*") if path.is_file() and not path.is_symlink()):
        with suppress(*UNREADABLE), open(path, "rb") as file:
            for part in _parts(file, [MAX_UNPACKED], 2):
                parts.setdefault(part, path.relative_to(agents).as_posix())
    return folders, parts


MAX_UNPACKED = 64 << 30
UNREADABLE = (OSError, ValueError, EOFError, KeyError, TypeError, AttributeError, RuntimeError, BadZipFile, zlib.error)


def _parts(file: IO[bytes], left: list[int], depth: int) -> Iterator[tuple[int, str]]:
    """Yield size and hash of each tensor of a safetensors file or file of a zip (as torch saves), also packed by gzip; else of the
    whole. `left`: bytes that may still be read. ValueError: more, or no such file."""
    head = file.read(9)
    file.seek(0)
    if depth and head.startswith(b"\x1f\x8b"):
        with gzip.GzipFile(fileobj=file) as inner:
            yield from _parts(cast(IO[bytes], inner), left, depth - 1)
    elif depth and head.startswith(b"PK\x03\x04"):
        with ZipFile(file) as packed:
            for name in packed.namelist():
                with packed.open(name) as inner_file:
                    yield from _parts(inner_file, left, depth - 1)
    elif head[8:] == b"{" and (length := int.from_bytes(head[:8], "little")) <= reading.MAX_RECORD_BYTES:
        file.seek(8)
        header = from_json(file.read(length))
        for begin, end in sorted(one["data_offsets"] for name, one in header.items() if name != "__metadata__"):
            yield _hashed(file, end - begin, left)
    else:
        yield _hashed(file, None, left)


def _hashed(file: IO[bytes], size: int | None, left: list[int]) -> tuple[int, str]:
    digest, done = hashlib.sha256(), 0
    while done != size and (data := file.read(CHUNK_BYTES if size is None else min(CHUNK_BYTES, size - done))):
        digest.update(data)
        done += len(data)
        left[0] -= len(data)
        if left[0] < 0:
            raise ValueError("too much is packed")
    return done, digest.hexdigest()
