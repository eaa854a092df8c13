"""Evaluation of one checkpoint on one split: prompts, answers by the engine, outcomes by the scorer, items files. Also the
judges of a grader (`Judging`) and the environments of interactive tasks (`Playground`)."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.layout import Root
from autorl_hpc.files.processes import host_name
from autorl_hpc.files.store import verify_base_model
from autorl_hpc.grading.background import RATED_AT_ONCE, GraderOverdue, RatingOverdue, within
from autorl_hpc.records.entries import CLUSTERS, Evaluation, Timings
from autorl_hpc.records.exchange import Engine as EngineIdentity
from autorl_hpc.records.experiment import GraderSpec, JudgeSpec
from autorl_hpc.records.run import Science
from autorl_hpc.records.task import HARNESSES, Recipe
from autorl_hpc.rollouts.child import ChildFailed
from autorl_hpc.rollouts.cores import usable_cores
from autorl_hpc.rollouts.engine import Answer, ServingEngine
from autorl_hpc.rollouts.environment import Episode
from autorl_hpc.rollouts.episodes import run_episodes
from autorl_hpc.rollouts.pool import CALL_LIMIT_S, Pool
from autorl_hpc.rollouts.source import EnvironmentBroken, Source
from autorl_hpc.scoring.harness import library
from autorl_hpc.scoring.judges import JUDGE_MODEL, JUDGE_REVISION, JudgeUsage, MeteredJudge, make_judge
from autorl_hpc.scoring.outcome import Clocked, Context, Fact, JudgeFailed, Outcome
from autorl_hpc.scoring.registry import encode, scorer
from autorl_hpc.scoring.stats import standard_error
from autorl_hpc.states import Fault, Split
from autorl_hpc.tasks.check import ENVIRONMENT_TIMEOUT
from autorl_hpc.tasks.folders import OWN_SCORER
from autorl_hpc.tasks.heldout import Item, asked_items, load_judge_prompt, load_shots
from autorl_hpc.tasks.loader import Task, check_played, load_task

log = logging.getLogger("autorl_hpc.grader")
MAX_WHAT_CHARS = 500

# --- judges
# A failing judge is the grader's fault: the entry returns to the queue and the artifact is not blamed. The model's answers are
# kept for the next try, because writing them took longer than judging them.

MAX_KEPT: Final = 16  # Evaluations whose answers are kept; a few megabytes each at most


class Judging:
    """The judges of one grader, and answers that could not be judged yet. `spec` returns the experiment's current judge; a later
    launch may change it."""

    def __init__(self, root: Root, spec: Callable[[], JudgeSpec | None]) -> None:
        self.root = root
        self._spec = spec
        self._judges: dict[tuple[str, str | None], tuple[JudgeSpec | None, MeteredJudge]] = {}
        self._unjudged: dict[Hashable, tuple[list[list[Answer]], str]] = {}

    def context(self, science: Science) -> Context:
        """Return the scorer's context for a run. AutorlError: the judge can't be created, or its prompt is not staged."""
        recipe = science.recipe
        return Context(
            options=recipe.options,
            workers=os.cpu_count() or 1,
            seed=science.seed,
            judge=self._judge(recipe),
            judge_mode=recipe.judge,
            judge_prompt=load_judge_prompt(self.root, science.task, recipe),
        )

    def usage(self, recipe: Recipe) -> JudgeUsage:
        """Return the usage of the recipe's judge so far."""
        judge = self._judge(recipe)
        return JudgeUsage() if judge is None else judge.usage

    def _judge(self, recipe: Recipe) -> MeteredJudge | None:
        if recipe.judge == "none":
            return None
        revision, spec = recipe.options.get(JUDGE_REVISION), self._spec()
        key = (str(recipe.options.get(JUDGE_MODEL, "")), None if revision is None else str(revision))
        if key not in self._judges or self._judges[key][0] != spec:
            self._judges[key] = (spec, make_judge(spec, key[0], self.root.judge_cache, key[1]))
        return self._judges[key][1]

    def kept(self, key: Hashable) -> tuple[list[list[Answer]], str] | None:
        """Return, once, the answers that the judge failed to judge in the last try, with the hash of their prompts."""
        return self._unjudged.pop(key, None)

    def keep(self, answered: SplitAnswers) -> None:
        """Keep answers for the next try."""
        while len(self._unjudged) >= MAX_KEPT:
            self._unjudged.pop(next(iter(self._unjudged)))
        self._unjudged[answered.asked] = answered.answers, answered.prompts_sha256


# --- interactive tasks: items are goals, and the model's answer is an episode

BY_REWARD = "episodes"  # The scorer that uses episodes' rewards; other scorers rate the answer that ended an episode
MAX_WORKERS = 64
"""Environment processes at most, one per core. A split has about 140 goals; each process takes a second to start and 100 MB."""
GATHER_S = 30.0
"""How long a batch waits for slow environments if the engine answers in batches. Long enough to collect all running episodes
normally: the batch composition can change an answer, and one checkpoint should always get the same score."""


class Playground:
    """Keeps one task's environments warm between evaluations, so that parsed games are reused."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self._pool: Pool | None = None

    def play(
        self, science: Science, items: Sequence[Item], engine: ServingEngine, order: Sequence[int] | None = None
    ) -> tuple[list[list[Answer]], str]:
        """Play each item's episodes, one per sample, begun in this order; return them as answers for the scorer, in the items' order,
        and the hash of the prompts that they began with. AutorlError if the environment failed, which is the grader's fault: nothing is scored."""
        recipe = science.recipe
        pool = self._warm(science)
        places = range(len(items)) if order is None else order
        goals = [{**items[place].data, "id": items[place].id, "question": items[place].question} for place in places]
        limit = recipe.options.get("max_prompt_tokens")
        drawn: list[dict[int, Answer]] = []
        begun: list[dict[int, tuple[int, ...]]] = []
        for number in range(recipe.samples):
            try:
                episodes = run_episodes(
                    engine,
                    goals,
                    pool.source,
                    recipe.sampling,
                    max_steps=recipe.max_steps or 1,
                    seed=science.seed + number,
                    pool=pool,
                    gather_s=GATHER_S,
                    max_prompt_tokens=None if limit is None else int(limit),
                    all_or_none=True,
                )
            except EnvironmentBroken as error:
                self.close()
                what = f"the environment of task {science.task} failed: {error}"
                advice = "the submission waits and is scored again; see the grader's log, and the task's `needs`"
                raise AutorlError(what, fault=Fault.GRADER, next_step=advice, exit_code=Exit.ENVIRONMENT) from error
            drawn.append({place: _answer(episode, recipe) for place, episode in zip(places, episodes, strict=True)})
            begun.append({place: episode.first_prompt for place, episode in zip(places, episodes, strict=True)})
        answers = [[sample[place] for sample in drawn] for place in range(len(items))]
        return answers, prompts_sha256(sample[place] for place in range(len(items)) for sample in begun)

    def close(self) -> None:
        """End the environments' processes; the next evaluation starts new ones."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def _warm(self, science: Science) -> Pool:
        task = load_task(science.task)
        source = source_of(self.root, task, science)
        if self._pool is None or self._pool.source != source:
            self.close()
            check_played(self.root, task, science.recipe.options)
            limit_s = float(science.recipe.options.get(ENVIRONMENT_TIMEOUT, CALL_LIMIT_S))
            self._pool = Pool(source, min(MAX_WORKERS, usable_cores()), call_limit_s=limit_s)
        return self._pool


def source_of(root: Root, task: Task, science: Science) -> Source:
    """Return a task's environment with its vault. Raises AutorlError: the task has no environment."""
    if task.file.environment is None:
        what = f"recipe {science.recipe.name} of task {task.name} asks for episodes, and the task has no environment"
        advice = "set `environment`, or leave `max_steps` out of the recipe"
        raise AutorlError(what, where=task.folder / "task.yaml", next_step=advice)
    file, _, name = task.file.environment.partition(":")
    return Source(
        file=task.folder / file,
        name=name,
        data=root.task_vault(task.name),
        held_out=True,
        options={**science.recipe.options, "max_steps": science.recipe.max_steps},
    )


def _answer(episode: Episode, recipe: Recipe) -> Answer:
    last = episode.transcript.turns[-1].observation if episode.done else ""
    answer = None if recipe.scorer == BY_REWARD else last
    text = encode(episode.reward or 0.0, episode.steps, episode.done, episode.transcript_sha256, answer)
    return Answer(text, episode.tokens, episode.truncated > 0)


def engine_group(base_model: str, recipe: Recipe) -> str:
    """Return the engine group; runs of one group share an engine that only swaps weights between them."""
    return f"{base_model} {recipe.dtype} {recipe.date}"


@dataclass(frozen=True)
class ItemOutcome:
    """One line of an items file; holds no texts and no gold answers."""

    id: str
    outcome: float | None
    output_sha256: str
    tokens: int
    facts: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True)
class SplitAnswers:
    """An engine's answers on a split; rating them needs no engine."""

    science: Science
    split: Split
    content_hash: str
    items: Sequence[Item]
    answers: list[list[Answer]]
    prompts_sha256: str
    engine_hash: str
    asked: Hashable
    timings: Timings


@dataclass(frozen=True)
class Scored:
    """An evaluation with its outcomes per item."""

    evaluation: Evaluation
    outcomes: tuple[ItemOutcome, ...]


class Bench:
    """Keeps the engine and the held-out items between evaluations."""

    def __init__(self, root: Root, spec: GraderSpec, judge: Callable[[], JudgeSpec | None] = lambda: None) -> None:
        self.root = root
        self.spec = spec
        self.group: str | None = None  # engine group that the running engine can score
        self._engine: ServingEngine | None = None
        self._items: dict[tuple[str, str, str], list[Item]] = {}
        self._prompts: dict[tuple[str, str, str, str], list[list[int]]] = {}
        self._playground = Playground(root)
        self._judging = Judging(root, judge)
        self._rating = threading.Lock()
        self.likely_next: Callable[[], tuple[Path, str] | None] = lambda: None  # returns weights and content hash

    def engine(self, science: Science) -> ServingEngine:
        """Return the running engine for a run's base model and dtype; closes another one first. AutorlError or OSError if it does not
        start: the node is at fault, because no artifact has been loaded yet."""
        from autorl_hpc.grading.engines import make_engine

        base_model, recipe = science.base_model, science.recipe
        wanted = engine_group(base_model, recipe)
        if self._engine is not None and self.group == wanted:
            return self._engine
        self.drop_engine()
        verify_base_model(self.root, science)
        try:
            self._engine = make_engine(self.spec, self.root.model(base_model), recipe.dtype, recipe.date)
        except (AutorlError, OSError):
            raise
        except Exception as error:
            log.exception("the engine does not start")
            raise AutorlError(
                f"the engine `{self.spec.engine}` does not start with {base_model}: {error}"[:MAX_WHAT_CHARS],
                where=host_name(),
                fault=Fault.CLUSTER,
                next_step="see the grader's log: the engine's memory or GPU may be in use by others, or its libraries be broken",
                exit_code=Exit.ENVIRONMENT,
            ) from error
        self.group = wanted
        return self._engine

    @property
    def identity(self) -> EngineIdentity | None:
        """Identity of the running engine, if any."""
        return None if self._engine is None else self._engine.identity

    @property
    def engine_hash(self) -> str | None:
        """Hash of the running engine's identity, if any."""
        return None if self._engine is None else self._engine.identity.digest()

    def drop_engine(self) -> None:
        """Close the engine; the next evaluation starts a new one."""
        if self._engine is not None:
            self._engine.close()
        self._engine = self.group = None
        self._prompts.clear()

    def items(self, science: Science, split: Split) -> list[Item]:
        """Return the split's items for the run's models, from the vault."""
        key = (science.task, split, science.split_hash(split))
        if key not in self._items:
            self._items[key] = asked_items(self.root, science, split, load_task(science.task).file)
        return self._items[key]

    def evaluate_base(
        self, science: Science, split: Split, *, order: Sequence[int] | None = None, limit: int | None = None
    ) -> Scored:
        """Score the run's base model on a split; arguments and errors as for `answer` and `rate`."""
        weights, content = self.root.model(science.base_model), science.base_model_content_hash
        return self.rate(self.answer(science, weights, content, split, order=order, limit=limit))

    def answer(
        self,
        science: Science,
        weights: Path,
        content_hash: str,
        split: Split,
        *,
        order: Sequence[int] | None = None,
        limit: int | None = None,
    ) -> SplitAnswers:
        """Let the engine answer a split's questions with the weights in `weights`. `order`: prompt in this order, for another
        batch composition. `limit`: use only the first items, to check that the engine works."""
        recipe = science.recipe
        items = self.items(science, split)[:limit]
        scorer(recipe.scorer, recipe.scorer_version, science.task)
        self._judging.context(science)  # fail before the engine works if the answers can't be rated
        engine = self.engine(science)
        prompts = [] if recipe.max_steps or recipe.scorer in HARNESSES else self._tokens(science, split, engine)[:limit]
        loaded = engine.load(weights, content_hash)
        self._load_ahead(engine)
        started = time.monotonic()
        engine_hash = engine.identity.digest()
        asks = (science.split_hash(split), recipe.hash(), engine_hash, science.seed, tuple(order or ()), limit)
        asked = (content_hash, science.base_model_prompting_hash, split, *asks)
        if kept := self._judging.kept(asked):
            answers, digest = kept
        elif recipe.max_steps:
            answers, digest = self._playground.play(science, items, engine, order)
        elif recipe.scorer in HARNESSES:
            answers, digest = self._by_library(science, items, engine, order)
        else:
            answers, digest = samples(engine, prompts, recipe, science.seed, order), prompts_sha256(prompts)
        timings = Timings(load_s=loaded.load_s, swap_s=loaded.swap_s, generate_s=time.monotonic() - started)
        return SplitAnswers(science, split, content_hash, items, answers, digest, engine_hash, asked, timings)

    def _by_library(
        self, science: Science, items: Sequence[Item], engine: ServingEngine, order: Sequence[int] | None
    ) -> tuple[list[list[Answer]], str]:
        """Let the task's library ask the engine and score. AutorlError if it or a judge failed, which is the grader's fault."""
        recipe, rows = science.recipe, [item.data for item in items]
        vault, context = self.root.task_vault(science.task), self._judging.context(science)
        try:
            answers, asked = library(recipe.scorer).play(rows, recipe, vault, engine, context, order=order)
        except (JudgeFailed, ChildFailed) as error:
            what = f"{recipe.scorer} could not score task {science.task}: {error}"
            advice = "see the grader's log; the submission waits and is scored again"
            raise AutorlError(what, fault=Fault.GRADER, next_step=advice, exit_code=Exit.ENVIRONMENT) from error
        return [[answer] for answer in answers], prompts_sha256(asked)

    def rate(self, answered: SplitAnswers) -> Scored:
        """Rate the answers. May run in another thread while the engine answers the next submission. RatingOverdue or GraderOverdue
        if it exceeds `rating_limit_s` and the sum of its calls' limits."""
        with self._rating if _is_alone(answered) else nullcontext():
            try:
                return within(self._limit_s(answered), lambda: self._rate(answered))
            except RatingOverdue as error:
                raise self._overdue(answered, error) from error

    def _limit_s(self, answered: SplitAnswers) -> float:
        science, recipe = answered.science, answered.science.recipe
        rater = scorer(recipe.scorer, recipe.scorer_version, science.task)
        if not isinstance(rater, Clocked):
            return self.spec.rating_limit_s
        calls = sum(map(len, answered.answers)) * (1 if _is_alone(answered) else RATED_AT_ONCE)
        return max(self.spec.rating_limit_s, rater.longest_s(calls, self._judging.context(science)))

    def _overdue(self, answered: SplitAnswers, error: RatingOverdue) -> Exception:
        """Return the error to raise. The artifact is not blamed for a judge, a task's own scorer, or if the base model's answers
        can't be rated either."""
        science, recipe = answered.science, answered.science.recipe
        if recipe.judge != "none":
            self._judging.keep(answered)
            who = "judge"
        elif recipe.scorer == OWN_SCORER:
            who = "own scorer"
        elif answered.content_hash == science.base_model_content_hash:
            who = "rating of the base model's answers"
        else:
            return error
        what = f"{error}: the {who} of task {science.task} is too slow, or hangs"
        advice = "a grader tries it again by itself, after as long a wait; where so much time is needed, raise `grader.rating_limit_s`"
        return GraderOverdue(what, where=host_name(), fault=Fault.GRADER, next_step=advice, exit_code=Exit.ENVIRONMENT)

    def _rate(self, answered: SplitAnswers) -> Scored:
        started = time.monotonic()
        science, items, recipe = answered.science, answered.items, answered.science.recipe
        rater = scorer(recipe.scorer, recipe.scorer_version, science.task)
        context, asked_before = self._judging.context(science), self._judging.usage(recipe)
        try:
            rated = rater.score(items, [[answer.text for answer in drawn] for drawn in answered.answers], context)
        except JudgeFailed as error:
            if recipe.scorer not in HARNESSES:  # of a library, the answers hold the judge's words
                self._judging.keep(answered)
            what = f"the judge failed, nothing was scored: {error}"
            advice = "check the endpoint that the experiment's field `judge` names; the same is tried again by itself"
            raise AutorlError(what, fault=Fault.GRADER, next_step=advice, exit_code=Exit.ENVIRONMENT) from error
        cluster_field = load_task(science.task).file.cluster_field
        outcomes = tuple(
            _outcome(item, drawn, outcome, cluster_field)
            for item, drawn, outcome in zip(items, answered.answers, rated, strict=True)
        )
        counted = [outcome for outcome in outcomes if outcome.outcome is not None]
        values = [outcome.outcome for outcome in counted if outcome.outcome is not None]
        clusters = [str(outcome.facts["cluster"]) for outcome in counted if "cluster" in outcome.facts]
        metrics = dict(rater.metrics(items, rated))
        error_points, mean = metrics.pop("standard_error", None), 100.0 * sum(values) / len(values)
        score = metrics.pop("score", None)
        if context.judge is not None:
            metrics |= self._judging.usage(recipe).since(asked_before)
        if clusters:
            whole = len(clusters) == len(counted)
            metrics[CLUSTERS] = float(len(set(clusters)) + (not whole))  # items without a cluster count as one
        if len(counted) < len(outcomes):
            metrics["unrated"] = float(len(outcomes) - len(counted))
        if score is None:
            spread = standard_error(values, clusters if clusters and whole else None)
            error_points = None if spread is None else 100.0 * spread
        else:
            metrics["mean_outcome"] = mean
        evaluation = Evaluation(
            split=answered.split,
            content_hash=answered.content_hash,
            score=mean if score is None else score,
            standard_error=error_points,
            n=len(outcomes),
            correct=int(sum(values)) if score is None and set(values) <= {0.0, 1.0} else None,
            metrics=metrics,
            recipe_hash=recipe.hash(),
            engine_hash=answered.engine_hash,
            prompts_sha256=answered.prompts_sha256,
            truncated=sum(answer.truncated for drawn in answered.answers for answer in drawn),
            timings=answered.timings.model_copy(update={"score_s": time.monotonic() - started}),
        )
        return Scored(evaluation, outcomes)

    def _load_ahead(self, engine: ServingEngine) -> None:
        """Prefetch the next likely checkpoint while the engine answers. Only a hint: any failure here is seen again when that
        checkpoint is scored."""
        try:
            if likely := self.likely_next():
                engine.prefetch(*likely)
        except Exception as error:
            log.info("nothing is loaded ahead: %s", error)

    def _tokens(self, science: Science, split: Split, engine: ServingEngine) -> list[list[int]]:
        key = (science.task, split, science.split_hash(split), science.recipe.hash())
        if key not in self._prompts:
            shots = load_shots(self.root, science.task, science.recipe)
            self._prompts[key] = [
                prompt_tokens(engine, science.recipe, shots, item.question) for item in self.items(science, split)
            ]
        return self._prompts[key]


def _is_alone(answered: SplitAnswers) -> bool:
    """Return whether no similar rating may run beside it: judge usage is counted per evaluation, and a task's own scorer gets
    memory and time for one."""
    return answered.science.recipe.judge != "none" or answered.science.recipe.scorer == OWN_SCORER


def prompts_sha256(prompts: Iterable[Sequence[int]]) -> str:
    """Return the hash (hex) of prompts as token ids, in the items' order."""
    return hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode()).hexdigest()


def prompt_tokens(engine: ServingEngine, recipe: Recipe, shots: Sequence[dict[str, str]], question: str) -> list[int]:
    """Return the prompt's token ids. Uses `str.replace`, because a question may hold braces."""
    text = recipe.prompt.replace("{question}", question)
    if recipe.chat == "auto":
        system = [{"role": "system", "content": recipe.system}] if recipe.system else []
        tokens = engine.chat([*system, *shots, {"role": "user", "content": text}])
        if tokens is not None:
            return tokens
    turns = "".join(m["content"] + ("\n\n" if m["role"] == "assistant" else "\n") for m in shots)
    lead = f"{recipe.system}\n\n" if recipe.system else ""
    return engine.encode(lead + turns + text)


def samples(
    engine: ServingEngine, prompts: list[list[int]], recipe: Recipe, seed: int, order: Sequence[int] | None
) -> list[list[Answer]]:
    """Return the answers to each prompt, of all samples. Each sample has its own seed; another `order` is asked in two halves, for another
    composition of the batches."""
    places = list(range(len(prompts)) if order is None else order)
    half = len(places) if order is None else len(places) // 2
    drawn: list[list[Answer]] = [[] for _ in prompts]
    for number in range(recipe.samples):
        for part in filter(None, (places[:half], places[half:])):
            answers = engine.generate([prompts[place] for place in part], recipe.sampling, seed + number)
            for place, answer in zip(part, answers, strict=True):
                drawn[place].append(answer)
    return drawn


def _outcome(item: Item, drawn: Sequence[Answer], outcome: Outcome, cluster_field: str | None) -> ItemOutcome:
    value = outcome.value
    if value is not None and not 0.0 <= value <= 1.0:  # also catches NaN
        raise ValueError(f"the scorer gave {value!r} for item {item.id}: an outcome lies between 0 and 1")
    digest = hashlib.sha256("\0".join(answer.text for answer in drawn).encode("utf-8", "replace")).hexdigest()
    tokens = sum(answer.tokens for answer in drawn)
    facts = outcome.facts
    if cluster_field is not None and cluster_field in item.data:  # the unit of the statistics
        facts = {**facts, "cluster": str(item.data[cluster_field])}
    return ItemOutcome(id=item.id, outcome=value, output_sha256=digest, tokens=tokens, facts=facts)


def items_bytes(outcomes: Sequence[ItemOutcome]) -> bytes:
    """Return an items file: gzipped JSON lines without a timestamp."""
    rows = ({name: value for name, value in vars(one).items() if name != "facts" or value} for one in outcomes)
    lines = "".join(json.dumps(row, sort_keys=True, separators=(",", ":")) + "\n" for row in rows)
    return gzip.compress(lines.encode(), compresslevel=6, mtime=0)
