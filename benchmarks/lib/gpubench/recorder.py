"""An engine that writes down what it is asked and says, and one that says it again at once."""

from __future__ import annotations

import json
import queue
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from autorl_hpc.rollouts.engine import Answer, Streaming

Deliver = Callable[[int, "Answer | Exception"], None]


class Recorder:
    """Passes everything on.

    Attributes:
        asked: prompts and their answers, in the order of the answers.
        texts: what was encoded; the answers by them are `said`.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.asked: list[tuple[list[int], Answer]] = []
        self.said: dict[str, Answer] = {}
        self.has_chat = True
        self._text_of: dict[bytes, str] = {}
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    @property
    def texts(self) -> list[str]:
        return list(self.said)

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self.engine.encode(text)
        self._text_of[_key(tokens)] = text
        return tokens

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        tokens: list[int] | None = self.engine.chat(messages)
        if tokens is None:
            self.has_chat = False
        else:
            self._text_of[_key(tokens)] = json.dumps(list(messages))
        return tokens

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Any, seed: int) -> list[Answer]:
        answers: list[Answer] = self.engine.generate(prompts, sampling, seed)
        for prompt, answer in zip(prompts, answers, strict=True):
            self.note(prompt, answer)
        return answers

    def note(self, prompt: Sequence[int], answer: Answer) -> None:
        """One answer."""
        with self._lock:
            self.asked.append((list(prompt), answer))
            self.said[self._text_of[_key(prompt)]] = answer


class StreamRecorder(Recorder):
    """The same of an engine that streams."""

    def stream(self, sampling: Any, seed: int, deliver: Deliver) -> _Noted:
        asked: dict[int, Sequence[int]] = {}

        def noted(key: int, answer: Answer | Exception) -> None:
            if isinstance(answer, Answer):
                self.note(asked.pop(key), answer)
            deliver(key, answer)

        return _Noted(self.engine.stream(sampling, seed, noted), asked)


class _Noted:
    def __init__(self, stream: Any, asked: dict[int, Sequence[int]]) -> None:
        self._stream, self._asked = stream, asked

    def ask(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> None:
        self._asked.update(prompts)
        self._stream.ask(prompts)

    def close(self) -> None:
        self._stream.close()


def recorded(engine: Any) -> Recorder:
    """A recorder of this engine, which streams if that one does."""
    return (StreamRecorder if isinstance(engine, Streaming) else Recorder)(engine)


def _key(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()


class Replay:
    """Gives the answers that a recorder wrote down, by the prompt's text, without a moment's thought; streams if that one did.

    Games with the same words were answered differently where the engine's batches differed; what follows on the other answer was
    never asked, and gets an answer of another prompt.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._texts: list[str] = []
        if isinstance(recorder, StreamRecorder):
            self.stream = self._stream

    def encode(self, text: str) -> list[int]:
        self._texts.append(text)
        return [len(self._texts) - 1]

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int] | None:
        return self.encode(json.dumps(list(messages))) if self._recorder.has_chat else None

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Any, seed: int) -> list[Answer]:
        said = self._recorder.said
        return [said.get(self._texts[prompt[0]]) or next(iter(said.values())) for prompt in prompts]

    def _stream(self, sampling: Any, seed: int, deliver: Deliver) -> _Echo:
        return _Echo(lambda prompt: self.generate([prompt], sampling, seed)[0], deliver)


class _Echo:
    """A stream whose answers come from a thread of its own, as an engine's do."""

    def __init__(self, answer: Callable[[Sequence[int]], Answer], deliver: Deliver) -> None:
        self._asked: queue.SimpleQueue[tuple[int, Sequence[int]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(answer, deliver), name="echo", daemon=True)
        self._thread.start()

    def ask(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> None:
        for prompt in prompts:
            self._asked.put(prompt)

    def close(self) -> None:
        self._asked.put(None)
        self._thread.join()

    def _run(self, answer: Callable[[Sequence[int]], Answer], deliver: Deliver) -> None:
        while (asked := self._asked.get()) is not None:
            try:
                said: Answer | Exception = answer(asked[1])
            except Exception as error:
                deliver(-1, error)
                return
            deliver(asked[0], said)
