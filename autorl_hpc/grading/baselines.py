"""Base models' scores: once per model, split, recipe and engine hash, measured twice for the engine's own noise."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from autorl_hpc.files import atomic
from autorl_hpc.files.baselines import baseline_key, read_baseline
from autorl_hpc.files.claims import Claims
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.grading.evaluate import Bench
from autorl_hpc.grading.items import offer, settle
from autorl_hpc.records.exchange import Baseline
from autorl_hpc.records.run import Science
from autorl_hpc.states import Split

log = logging.getLogger("autorl_hpc.grader")


@dataclass
class Baselines:
    """The baselines folder, as one grader uses it."""

    experiment: ExperimentDir
    claims: Claims
    bench: Bench
    grader: str
    _known: dict[str, Baseline] = field(default_factory=dict)

    def get(self, science: Science, split: Split) -> Baseline | None:
        """The baseline by the engine that is up, if it has been measured."""
        engine = self.bench.engine(science.base_model, science.recipe)
        key = baseline_key(science, split, engine.identity.digest())
        if key not in self._known:
            found = read_baseline(self.experiment.baselines, key)
            if found is None:
                return None
            settle(self._items(key), found.evaluation.items_sha256)  # who published it may have died before this
            self._known[key] = found  # it is measured once, and never replaced
        return self._known[key]

    def ensure(self, science: Science, split: Split) -> Baseline | None:
        """The baseline, measured now if need be; None while another living grader is measuring it."""
        found = self.get(science, split)
        if found is not None:
            return found
        engine = self.bench.engine(science.base_model, science.recipe)
        key = baseline_key(science, split, engine.identity.digest())
        entry = f"baseline-{key[:32]}"
        generation = self.claims.take(entry, self.claims.current())
        if generation is None:
            return None
        try:
            if self.get(science, split) is None:  # another grader may have ended between our look and our claim
                self._measure(science, split, key)
        finally:
            self.claims.give_back(entry, generation)
        return self.get(science, split)

    def _measure(self, science: Science, split: Split, key: str) -> None:
        log.info("measuring the base model %s on the %s split of %s", science.base_model, split, science.task)
        weights = self.bench.root.model(science.base_model)
        content = science.base_model_content_hash
        first = self.bench.evaluate(science, weights, content, split)
        backwards = list(range(first.evaluation.n))[::-1]
        second = self.bench.evaluate(science, weights, content, split, order=backwards)
        changed = sum(a.outcome != b.outcome for a, b in zip(first.outcomes, second.outcomes, strict=True))
        if self.get(science, split) is not None:
            return  # we were slow and were taken over
        items = offer(self._items(key), first.outcomes)
        identity = self.bench.identity
        assert identity is not None  # evaluate() has just used it
        record = Baseline(
            key=key,
            task=science.task,
            base_model=science.base_model,
            evaluation=first.evaluation.model_copy(update={"items_sha256": items}),
            repeat_score=second.evaluation.score,
            repeat_changed_items=changed,
            engine=identity,
            grader=self.grader,
        )
        atomic.publish_bytes(self.experiment.baselines / f"{key}.json", record.canonical() + b"\n")
        found = self.get(science, split)
        if found is not None:
            settle(self._items(key), found.evaluation.items_sha256, own=items)

    def _items(self, key: str) -> Path:
        return self.experiment.baselines / f"{key}.items.jsonl.gz"
