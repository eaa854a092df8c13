"""Sampling by vLLM, where it is installed, in the training process and on a part of its GPU.

Copied into `code/` of a workspace and used from there; nothing here is part of the suite itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import machine
from words import Answer, Words, said

SWITCH = "EXPERT_VLLM"
"""Variable: 0 keeps vLLM out, whatever is installed."""
CACHE_SHARE, CACHE_MAX_BYTES = 0.25, 16 << 30
"""Keys and values: of the GPU's memory, and at most. 16 GiB hold 700,000 tokens of a 135M model, beginnings in common once."""
NEEDED_SHARE = 0.05
"""Of the GPU's memory that must be free for vLLM to start at all, beside the cache: it asks for a number, and the cache is given."""
BLOCK = 32
"""Tokens of a block: half as many hashes a prompt as by default."""
SEQUENCES = 512
GRAPHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Batches for which CUDA graphs are captured."""
QUICK: dict[str, Any] = {
    "block_size": BLOCK,
    "max_num_seqs": SEQUENCES,
    "enable_flashinfer_autotune": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(GRAPHS)},
}
"""No torch.compile, whose half a minute is more than it saves in ten; graphs for decoding, captured in seconds."""
PLAIN: dict[str, Any] = {"enforce_eager": True}
"""Where vLLM doesn't take the above."""
IDLE_S = 0.002


def vllm_is_there() -> bool:
    """Whether rollouts go through vLLM: installed, not switched off, a GPU."""
    import torch

    wanted = os.environ.get(SWITCH, "1") != "0"
    return wanted and torch.cuda.is_available() and importlib.util.find_spec("vllm") is not None


def open_vllm(folder: Path, words: Words, *, max_new_tokens: int, max_tokens: int, seed: int) -> VllmSampler | None:
    """A sampler by vLLM; None where it doesn't start, with the reason in the log: transformers samples then."""
    for settings in (QUICK, PLAIN):
        begun = time.monotonic()
        try:
            sampler = VllmSampler(folder, words, max_new_tokens, max_tokens, seed, settings)
        except Exception as error:
            print(f"vLLM does not start with {settings}: {type(error).__name__}: {error}"[:2000], flush=True)
        else:
            print(f"vLLM is up after {time.monotonic() - begun:.1f} s", flush=True)
            return sampler
    return None


class VllmSampler:
    """Answers as `Sampler` does. Draws come from the engine's own stream, which began with its seed. Weights are exchanged in a folder."""

    def __init__(
        self, folder: Path, words: Words, max_new_tokens: int, max_tokens: int, seed: int, settings: dict[str, Any]
    ) -> None:
        _prepare()
        import torch
        from vllm import LLM  # type: ignore[import-not-found,unused-ignore]

        self.words, self.max_new_tokens, self.temperature = words, max_new_tokens, 0.0
        self._stops = sorted({*words.ends, *words.stopping()})
        free, total = torch.cuda.mem_get_info()
        self._llm = LLM(
            model=str(folder),
            dtype="bfloat16",
            seed=seed + int(os.environ.get("RANK", "0")),
            max_model_len=max_tokens,
            kv_cache_memory_bytes=int(min(CACHE_SHARE * total, CACHE_MAX_BYTES, 0.8 * free)),
            gpu_memory_utilization=min(NEEDED_SHARE, 0.8 * free / total),  # what must be free; the cache is given above
            enable_prefix_caching=True,
            disable_log_stats=True,
            logprobs_mode="processed_logprobs",  # at the sampling temperature
            # With several processes each has an engine of its own: it takes the group that there is for one whose members sample apart.
            **({"distributed_executor_backend": "external_launcher"} if machine.processes() > 1 else {}),
            **settings,
        )

    encode = property(lambda self: self.words.encode)
    chat = property(lambda self: self.words.chat)

    def begin(self, seed: int, temperature: float) -> None:
        """As `Sampler.begin`; the seed is the engine's own."""
        del seed
        self.temperature = temperature

    def update(self, folder: Path) -> None:
        """Takes other weights of the same model from a folder of safetensors."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        self._llm.reset_prefix_cache()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Any = None, seed: int = 0) -> list[Answer]:
        """One answer a prompt, in order. `sampling` and `seed` are not used: see `begin`."""
        del sampling, seed
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(asked, self._asked(), use_tqdm=False)
        return [self._answer(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]

    def stream(self, sampling: Any, seed: int, deliver: Callable[[int, Answer | Exception], None]) -> Stream:
        """Takes prompts while others are being answered: `autorl_rollouts.engine.Streaming`."""
        del sampling, seed
        return Stream(self._llm.llm_engine, self._asked(), self._answer, deliver)

    def _asked(self) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found,unused-ignore]

        # A stop string that is in one token ends the answer in the engine, without any text being made.
        texts = {"stop": list(self.words.stop), "include_stop_str_in_output": True} if self.words.long_stops else {}
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=self.max_new_tokens,
            stop_token_ids=self._stops,
            logprobs=0,  # the sampled token's own
            detokenize=bool(texts),
            output_kind=RequestOutputKind.FINAL_ONLY,
            **texts,
        )

    def _answer(self, prompt: Sequence[int], output: Any) -> Answer:
        made = output.outputs[0]
        ids = list(made.token_ids)
        logps = [entry[token].logprob for token, entry in zip(ids, made.logprobs, strict=True)]
        text, ended = self.words.text(ids)
        return Answer(said(text, prompt, ids, logps), len(ids), not ended)


class Stream:
    """A thread that alone drives the engine while it is open."""

    def __init__(
        self,
        engine: Any,
        asked: Any,
        answer: Callable[[Sequence[int], Any], Answer],
        deliver: Callable[[int, Answer | Exception], None],
    ) -> None:
        self._engine, self._asked, self._answer, self._deliver = engine, asked, answer, deliver
        self._new: queue.SimpleQueue[tuple[int, Sequence[int]]] = queue.SimpleQueue()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._thread.start()

    def ask(self, prompts: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Hands prompts in, each with its key."""
        for each in prompts:
            self._new.put(each)

    def close(self) -> None:
        """Gives up what is not answered yet."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        live: dict[str, tuple[int, Sequence[int]]] = {}
        try:
            while not self._over.is_set():
                self._take(live)
                if not live:
                    continue
                for output in self._engine.step():
                    if output.finished and output.request_id in live:
                        key, prompt = live.pop(output.request_id)
                        self._deliver(key, self._answer(prompt, output))
        except Exception as error:
            if not self._over.is_set():
                self._deliver(-1, error)
        finally:
            if live:
                with contextlib.suppress(Exception):
                    self._engine.abort_request(list(live))

    def _take(self, live: dict[str, tuple[int, Sequence[int]]]) -> None:
        """Begins what was handed in; waits for it a moment where nothing else is to be done."""
        with contextlib.suppress(queue.Empty):
            each = self._new.get(timeout=IDLE_S) if not live else self._new.get_nowait()
            while True:
                name = str(each[0])
                self._engine.add_request(name, {"prompt_token_ids": list(each[1])}, self._asked)
                live[name] = each
                each = self._new.get_nowait()


def _prepare() -> None:
    """Settings of vLLM's that are read when it is imported: in this process, on this node, without a network."""
    alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    for name, value in {**alone, **quiet}.items():
        os.environ.setdefault(name, value)
