"""The engine Protocol. Prompts are passed as token ids, so that only the recipe decides them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:  # agents get this package without the records
    from autorl_hpc.records.exchange import Engine as EngineIdentity
    from autorl_hpc.records.task import Sampling


CONVERSATION = 1 << 16
"""Prompts whose keys have the same `key // CONVERSATION` are one conversation and mostly share a prefix. An engine with several
workers sends them to the same one to reuse its prefix cache."""


class Answer(NamedTuple):
    """One completion."""

    text: str
    tokens: int
    truncated: bool  # ended by the token limit, not by an end token or a stop string


class LogLikelihood(NamedTuple):
    """How likely a continuation is after its context."""

    logprob: float  # sum over the continuation's tokens, natural logarithm
    is_greedy: bool  # each of its tokens is the most likely one


Pair = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context and of its continuation."""


def fitted(pairs: Sequence[Pair], window: int) -> list[Pair]:
    """Return the pairs, contexts cut at their beginning so that both together fit a window of so many tokens.

    Raises ValueError: a continuation that leaves no room for a token of context, an empty one, or an empty context.
    """
    if any(not context or not 0 < len(continuation) < window for context, continuation in pairs):
        raise ValueError(f"each pair needs a context, and a continuation of 1 to {window - 1} tokens")
    return [(context[-(window - len(continuation)) :], continuation) for context, continuation in pairs]


@dataclass(frozen=True)
class Loaded:
    """Times of loading weights, in seconds."""

    load_s: float  # time the caller waited for reading and checking files; shorter after a prefetch
    swap_s: float  # time to put them into the model


class WeightsChanged(Exception):
    """The artifact's data no longer have the content hash in the ledger."""


class EngineFailed(Exception):
    """The engine could not answer. The caller finds out whether the grader or the artifact is at fault."""


class ServingEngine(Protocol):
    """An engine that stays up between submissions; only weights are swapped."""

    @property
    def identity(self) -> EngineIdentity:
        """Backend, versions, device and dtype; hashed into every score."""

    def prefetch(self, weights: Path, content_hash: str) -> None:
        """Start to read and check a folder into host memory while the engine works. Returns at once and raises nothing; errors
        appear at `load`. Does nothing for more than the cache holds."""

    def load(self, weights: Path, content_hash: str) -> Loaded:
        """Load the weights in a folder of safetensors, named and shaped like the base model's. Raises WeightsChanged: they
        don't have `content_hash`; OSError: they can't be read; EngineFailed: the engine can't be used any more."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a plain prompt, begun as the base model's tokenizer begins a text (BOS, if it has one)."""

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        """Return the token ids of a conversation in the base model's template with generation prompt; None without a template."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Answer]:
        """Return one answer per prompt, in order."""

    @property
    def context_tokens(self) -> int:
        """The window: tokens of a context and its continuation that `loglikelihood` takes together."""

    def loglikelihood(self, pairs: Sequence[Pair]) -> list[LogLikelihood]:
        """Return the log-likelihood of each continuation after its context, in order. See `fitted` for contexts that are too long,
        and for errors."""

    def close(self) -> None:
        """Free the memory."""


class Stream(Protocol):
    """An open stream: prompts can be added while others are being answered."""

    def ask(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Add prompts, each with a key that is unique in the stream. Sampling depends only on the stream's seed and the key, as
        far as the engine can. Prompts of one conversation use keys of one block of CONVERSATION."""

    def close(self) -> None:
        """Drop unanswered prompts; nothing is delivered after it returns. It waits for a delivery in progress, so don't call it
        under a lock that `deliver` takes."""


@runtime_checkable
class Streaming(Protocol):
    """Optional for engines that need no batches: episodes then ask as soon as they can."""

    def stream(self, sampling: Sampling, seed: int, deliver: Callable[[int, Answer | Exception], None]) -> Stream:
        """Open the engine's one stream. `deliver`: called by an engine thread with each key and its answer, in any order; if
        the engine fails, once with -1 and an exception."""
