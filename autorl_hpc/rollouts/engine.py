"""The engine Protocol: who answers prompts. Token ids go in, so that the prompt is the recipe's alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:  # agents get this room without the records
    from autorl_hpc.records.exchange import Engine as EngineIdentity
    from autorl_hpc.records.task import Sampling


CONVERSATION = 1 << 16
"""Keys of prompts with the same `key // CONVERSATION` are one conversation's, whose prompts mostly begin with the last one: an engine with
several workers gives them to the same one, whose cache knows that beginning."""


class Answer(NamedTuple):
    """One completion."""

    text: str
    tokens: int
    truncated: bool  # ended by the token limit, not by an end token or a stop string


@dataclass(frozen=True)
class Loaded:
    """How long it took to bring weights in."""

    load_s: float  # that the caller waited for files to be read and checked: less than that took, where they were read ahead
    swap_s: float  # putting them into the model


class WeightsChanged(Exception):
    """The artifact's data no longer have the content hash that the ledger names."""


class EngineFailed(Exception):
    """The engine could not answer: the grader's or the artifact's fault, which the caller finds out."""


class ServingEngine(Protocol):
    """An engine stays up between submissions; only weights are swapped."""

    @property
    def identity(self) -> EngineIdentity:
        """Backend, versions, device, dtype: hashed into every score."""
        ...

    def prefetch(self, weights: Path, content_hash: str) -> None:
        """Has a folder read and checked ahead, into host memory, while the engine works. Returns at once and raises nothing: what goes
        wrong comes out at `load`. More than the engine's cache holds is not read ahead."""
        ...

    def load(self, weights: Path, content_hash: str) -> Loaded:
        """Swaps in the weights of a folder of safetensors whose names and shapes equal the base model's.

        Raises:
            WeightsChanged: the data don't have `content_hash`.
            OSError: they can't be read.
            EngineFailed: they did not get into the model; the engine is of no use any more.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text by the base model's tokenizer, without special tokens added."""
        ...

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        """Token ids of a conversation in the base model's template with the answer's beginning, None without one."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Answer]:
        """One answer a prompt, in the order given."""
        ...

    def close(self) -> None:
        """Gives memory back."""
        ...


class Stream(Protocol):
    """Prompts that go in while others are being answered."""

    def ask(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Hands in prompts, each with a key that is used once in a stream. Draws follow from the stream's seed and the key alone,
        as far as the engine can. Prompts of one conversation have keys of one block of CONVERSATION, others keys of other blocks: what
        is answered does not depend on it, how fast does."""
        ...

    def close(self) -> None:
        """Gives up what is not answered yet; nothing is delivered after it returns. Not to be called under a lock that `deliver`
        takes: it waits for a delivery that is under way."""
        ...


@runtime_checkable
class Streaming(Protocol):
    """What an engine offers beside the Protocol above if it needs no batches: episodes then ask as soon as they can."""

    def stream(self, sampling: Sampling, seed: int, deliver: Callable[[int, Answer | Exception], None]) -> Stream:
        """Opens the engine's one stream.

        Args:
            deliver: called by a thread of the engine with each key and its answer, in any order; with -1 and an exception, once,
                where the engine failed.
        """
        ...
