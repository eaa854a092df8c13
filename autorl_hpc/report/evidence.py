"""What stands beside a score: the sandbox that was in force, where weights come from, what of the held-out items lay about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autorl_hpc.files.masking import masked
from autorl_hpc.files.view import RunView
from autorl_hpc.records.ledger import Contamination, Fingerprint, SandboxUsed, Submission
from autorl_hpc.report.hiding import Hidden, hidden_of
from autorl_hpc.report.summary import Found, RunSummary
from autorl_hpc.report.text import clean
from autorl_hpc.states import SandboxLevel, Split

NEVER_RANKS = (str(SandboxLevel.NONE),)
"""Sandbox levels that stop nothing: an agent could have read what it is scored on."""

UNRANKING = ("untrained_copy", "foreign_weights")
"""Flags of the selected checkpoint with which a run does not rank: its score is that of a model which the agent did not make."""

UNSEEN = (
    "What a model memorised, or was distilled from others who know the items, leaves no text in a workspace: this look can't "
    "see it."
)
MANY_FILES = 20
"""Files named in a run's summary for one look; the ledger names more."""


def sandboxes(view: RunView) -> tuple[SandboxUsed, ...]:
    """What each attempt's agent ran in, as it was proven on its node; texts made harmless."""
    return tuple(_clean_sandbox(used) for used in view.sandboxes)


def _clean_sandbox(used: SandboxUsed) -> SandboxUsed:
    refused = {clean(name) or "": clean(why) or "" for name, why in used.refused.items()}
    return used.model_copy(update={"holes": tuple(clean(hole) or "" for hole in used.holes), "refused": refused})


def fingerprint_of(view: RunView, submission: Submission) -> Fingerprint | None:
    """A submission's fingerprint, its texts made harmless."""
    known = view.fingerprint_of(submission)
    if known is None:
        return None
    texts = {
        name: clean(getattr(known, name)) for name in ("reason", "largest_tensor", "nearest_model", "exchanged_of")
    }
    if all(text is getattr(known, name) or text == getattr(known, name) for name, text in texts.items()):
        return known
    return known.model_copy(update=texts)


def contamination_of(view: RunView, number: int | None, hidden: Hidden | None = None) -> Contamination | None:
    """The look at the workspace when submission `number` was made, None for that at the end; the first, if there are more."""
    known = next((one for one in view.contaminations if one.submission_id == number), None)
    return None if known is None else shown_look(known, hidden or hidden_of(view.contaminations))


def shown_look(known: Contamination, hidden: Hidden) -> Contamination:
    """A look as the report shows it. File names are the agent's: made harmless, and not shown if items stood in them."""
    if not known.found and known.reason is None:
        return known
    files = tuple(one.model_copy(update={"file": clean(masked(hidden.name(one.file))) or "?"}) for one in known.found)
    more = known.found_unlisted + max(0, len(files) - MANY_FILES)
    update = {"found": files[:MANY_FILES], "found_unlisted": more, "reason": clean(known.reason)}
    return known.model_copy(update=update)


def worst_found(looks: Iterable[Contamination]) -> tuple[Found, ...]:
    """By split, the most held-out items that any look found, and at which look first: what was deleted later was there."""
    most: dict[Split, Found] = {}
    for look in looks:
        for split in Split:
            count, of = look.items.get(split, 0), look.of.get(split, 0)
            if count and (split not in most or count > most[split].items):
                most[split] = Found(split=split, items=count, of=of, submission_id=look.submission_id)
    return tuple(most[split] for split in Split if split in most)


def looks(run: RunSummary) -> list[Contamination]:
    """All looks at a run's workspace, in order."""
    found = [point.contamination for point in run.trajectory]
    return [look for look in (*found, run.contamination_end) if look is not None]


def selected_fingerprint(run: RunSummary) -> Fingerprint | None:
    """That of the selected checkpoint."""
    return next((p.fingerprint for p in run.trajectory if p.submission_id == run.selected), None)


def ranks(sandbox: str, flags: Sequence[str]) -> bool:
    """Whether a run's score may stand in a ranking."""
    return sandbox not in NEVER_RANKS and not set(flags) & set(UNRANKING)
