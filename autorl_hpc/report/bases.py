"""The base models' scores of an experiment, taken only if they are what their names and the run say."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from autorl_hpc.files import reading
from autorl_hpc.files.baselines import baseline_key, read_baseline
from autorl_hpc.records.exchange import Baseline
from autorl_hpc.records.run import Science
from autorl_hpc.states import Split

SUFFIX = ".json"


@dataclass
class Bases:
    """The baselines folder of one experiment, read once."""

    folder: Path
    _known: dict[str, Baseline] | None = field(default=None)
    _digests: dict[str, str] = field(default_factory=dict)

    def by_engine(self, science: Science, split: Split, engine_hash: str) -> Baseline | None:
        """The base model's score on a split by one engine."""
        found = self._all().get(baseline_key(science, split, engine_hash))
        return found if found is not None and _fits(found, science, split) else None

    def any_engine(self, science: Science, split: Split) -> Baseline | None:
        """The base model's score on a split where no engine is known yet; None if there are several engines."""
        engines = {b.evaluation.engine_hash for b in self._all().values() if b.evaluation.engine_hash}
        found = [b for engine in sorted(engines) if (b := self.by_engine(science, split, engine)) is not None]
        return found[0] if len(found) == 1 else None

    def digest(self, baseline: Baseline) -> str:
        """`Baseline.digest`, computed once: each run of the experiment asks for it."""
        if baseline.key not in self._digests:
            self._digests[baseline.key] = baseline.digest()
        return self._digests[baseline.key]

    def items_path(self, baseline: Baseline) -> Path:
        """Where its outcomes lie."""
        return self.folder / f"{baseline.key}.items.jsonl.gz"

    def _all(self) -> dict[str, Baseline]:
        if self._known is None:
            keys = [n.removesuffix(SUFFIX) for n in reading.list_names(self.folder) if n.endswith(SUFFIX)]
            read = {key: read_baseline(self.folder, key) for key in keys}
            self._known = {
                key: baseline
                for key, baseline in read.items()
                if baseline is not None
                and baseline.key == key
                and baseline.evaluation.engine_hash == baseline.engine.digest()
            }
        return self._known


def _fits(baseline: Baseline, science: Science, split: Split) -> bool:
    evaluation = baseline.evaluation
    return (
        evaluation.split is split
        and evaluation.content_hash == science.base_model_content_hash
        and evaluation.recipe_hash == science.recipe.hash()
        and evaluation.n == science.asked(split)
    )
