"""Which accepted checkpoints stay while a run is open: those that may still be selected, and those that are still needed.

Kept are the best, the last, what the agent marked final, and whatever waits for a score or a fingerprint.
"""

from __future__ import annotations

from autorl_hpc.files import artifacts, reading
from autorl_hpc.files.layout import ExperimentDir
from autorl_hpc.files.ledger import Ledger
from autorl_hpc.files.view import RunView


def kept_while_open(view: RunView) -> set[str]:
    """Content hashes of the artifacts that an open run needs."""
    accepted = view.accepted()
    named = [view.best(), view.final(), *accepted[-1:], *view.unscored(), *view.unfingerprinted()]
    # What could not be evaluated has no fingerprint; its artifact may be wanted by whoever looks for the reason.
    failed = [s for s in accepted if (score := view.score_of(s)) is not None and score.evaluation.score is None]
    # A final mark that is not scored yet may come to be the one that counts.
    unscored_finals = [s for s in accepted if s.final and view.score_of(s) is None]
    return {s.content_hash for s in (*named, *failed, *unscored_finals) if s is not None and s.content_hash}


def release_spare(experiment: ExperimentDir, run_id: str, ledger: Ledger) -> int:
    """Lets go of artifacts that an open run no longer needs; how many.

    Its references are looked at before the ledger is read: one that a supervisor renews meanwhile, for the same content
    submitted again, is another one and is left alone.
    """
    here = set(reading.list_names(experiment.artifacts))
    seen = {content: artifacts.reference(experiment.artifacts, content, run_id) for content in here}
    view = RunView.of(ledger.read())
    if view.closed is not None:
        return 0
    spare = {s.content_hash for s in view.accepted() if s.content_hash} - kept_while_open(view)
    released = 0
    for content in sorted(spare & here):
        reference = seen[content]
        if reference is not None:
            released += artifacts.release_if_same(experiment.artifacts, content, run_id, reference)
    return released
