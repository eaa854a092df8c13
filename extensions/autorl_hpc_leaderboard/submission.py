"""A submission: a folder with `submission.yaml` and bundles of `autorl-hpc export`. Everything in it is untrusted."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, StringConstraints, field_validator

from autorl_hpc.errors import AutorlError
from autorl_hpc.evidence.unpack import verify_bundle
from autorl_hpc.files.reading import read_yaml
from autorl_hpc.records.base import Record, Strict, parse_record
from autorl_hpc.records.exchange import EvidenceManifest

FILE = "submission.yaml"
FAILS = "does not hold"
NEXT_STEP = "see docs/leaderboard.md for every field"


def _plain(text: str) -> str:
    if not text.isprintable():
        raise ValueError("one line of plain characters")
    return text


Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=200), AfterValidator(_plain)]


class SubmittedAgent(Strict):
    """The agent of a submission."""

    name: Text
    version: Text
    link: Text

    @field_validator("link")
    @classmethod
    def _https(cls, link: str) -> str:
        if not link.startswith("https://") or any(c in link for c in "\"'<> \\"):
            raise ValueError("give an address that begins with https://")
        return link


class SubmissionFile(Record):
    """submission.yaml."""

    submitter: Text
    contact: Text  # for the maintainer; never published
    date: datetime.date
    agent: SubmittedAgent
    driver: Text
    hardware: Text
    licence: Text  # of the weights


@dataclass
class Bundle:
    """One bundle of a submission, checked."""

    path: Path
    manifest: EvidenceManifest | None = None
    problems: list[str] = field(default_factory=list)
    verdict: dict[str, Any] | None = None  # of `rescore`: null: not measured again

    @property
    def rescored(self) -> str:
        """Return what rescoring found: `identical`, `within noise`, `older version`, `does not hold: ...`, or `not rescored`."""
        if self.verdict is None:
            return "not rescored"
        selected = self.verdict.get("selected") or self.verdict.get("base")
        word = str(selected.get("word")) if isinstance(selected, dict) else "no score"
        if self.verdict.get("older") is True:
            return "older version"  # which this one can't ask again: nothing speaks against it
        return word if self.verdict.get("holds") is True else f"{FAILS}: {word}"


@dataclass
class CheckedSubmission:
    """A submission with what is wrong with it."""

    folder: Path
    file: SubmissionFile | None = None
    bundles: list[Bundle] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def all_problems(self) -> list[str]:
        """Return the problems of the folder and of its bundles."""
        return [*self.problems, *(f"{bundle.path.name}: {what}" for bundle in self.bundles for what in bundle.problems)]


def submissions_in(paths: list[Path]) -> list[Path]:
    """Return the submission folders among `paths` and one level below, also those that are closed to this user. Raises AutorlError:
    there is none."""
    several = [one for path in paths for one in (path, *(sorted(path.iterdir()) if path.is_dir() else ()))]
    found = [one for one in several if os.path.isfile(one / FILE) or (one.is_dir() and not os.access(one, os.X_OK))]
    if not found:
        advice = "give a submission's folder, or the folder above several"
        raise AutorlError(f"no folder with {FILE}", where=paths[0], next_step=advice)
    return list(dict.fromkeys(found))


def check(folder: Path, work: Path, keep: Callable[[Bundle, Path], None] | None = None) -> CheckedSubmission:
    """Check a submission: its file, and every bundle by unpacking it below `work` and verifying chain, hashes and scores. Never raises for
    what it holds.

    Args:
        keep: called for each whole bundle with its unpacked experiment, which is removed afterwards.
    """
    done = CheckedSubmission(folder)
    try:
        _check_folder(done, work, keep)
    except (AutorlError, OSError, ValueError, RecursionError) as error:
        done.problems.append(f"can't be read: {error.what if isinstance(error, AutorlError) else type(error).__name__}")
    return done


def _check_folder(done: CheckedSubmission, work: Path, keep: Callable[[Bundle, Path], None] | None) -> None:
    folder, odd = done.folder, []
    if (folder / FILE).is_symlink():
        done.problems.append(f"{FILE} is a link")
    else:
        try:
            done.file = parse_record(SubmissionFile, read_yaml(folder / FILE), folder / FILE, next_step=NEXT_STEP)
            if done.file.date > datetime.date.today() + datetime.timedelta(days=1):
                done.problems.append(f"date: {done.file.date} is in the future")
        except AutorlError as error:
            done.problems.append(error.what)
    for path in sorted(folder.iterdir()):
        if path.name.endswith((".tar.zst", ".tar.gz", ".tar")):
            regular = path.is_file() and not path.is_symlink()
            done.bundles += [Bundle(path)] if regular else []
            odd += [] if regular else [path.name]
    done.problems += [f"{name} is a link, or no regular file" for name in odd]
    if not done.bundles:
        done.problems.append("no bundle: put the files that `autorl-hpc export` wrote beside submission.yaml")
    for bundle in done.bundles:
        with tempfile.TemporaryDirectory(dir=work) as into:
            verdict, bundle.manifest, experiment = verify_bundle(bundle.path, Path(into))
            bundle.problems += verdict.problems
            if keep is not None and experiment is not None and not bundle.problems:
                keep(bundle, experiment.path)
