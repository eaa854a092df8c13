"""The process that holds vLLM: `python -m autorl_hpc.grading.engines.vllm_worker FD PARENT`.

It exchanges frames over the inherited socket, sends nothing while it starts, and afterwards a sign of life at least every few
seconds. It ends when the daemon is gone. Its interpreter needs vLLM with its dependencies; of the suite it imports only
standard library code.
"""

from __future__ import annotations

import hashlib
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import deque
from typing import Any

from autorl_hpc.files.processes import deny_inspection, die_with_parent
from autorl_hpc.grading.engines import framing
from autorl_hpc.grading.engines.framing import Frame

BEAT_S = 1.0
IDLE_BEAT_S = 5.0
FETCH_WAIT_S = 0.5  # Seconds between two signs of life while a checkpoint is being read
ADD_AT_ONCE = 64  # Prompts added between two steps, so that the first are answered while the last still arrive
SETTLE_STEPS = 8  # Steps to drain the pipeline. vLLM plans one step ahead, so two would be enough.

BLOCK = 64
"""Tokens per cache block. vLLM hashes every block of a prompt; with its default of 16 this is most of a long prompt's cost."""

ITEM_BYTES = {"float32": 4}
EXTENSION = "autorl_hpc.grading.engines.vllm_extension.Weights"
END_REASON, LENGTH_REASON = "stop", "length"


class Broken(Exception):
    """The engine can't be used any more."""


def seed_of(seed: int, key: int) -> int:
    """Return the seed of one request from the stream's seed and the request's key."""
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class Worker:
    """The loop between the daemon and vLLM's engine."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._inbox: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._pending: deque[tuple[str, list[int], Any]] = deque()
        self._open: dict[str, tuple[int, int]] = {}  # by request: stream and key
        self._scored: dict[str, int] = {}  # by request: how many of its last tokens are scored
        self._engine: Any = None
        self._context = 0
        self._ends: list[int] = []
        self._sleep_after_s = 0.0
        self._asleep = False
        self._holds: tuple[str, str] | None = None  # folder and content hash
        self._greedy: dict[tuple[str, int], Any] = {}  # parameters by sampling and token limit
        self._steps = 0
        self._last_sent = self._last_work = time.monotonic()

    def run(self) -> None:
        """Serve until the daemon says stop or is gone."""
        first = framing.receive(self._sock)
        if first is None:
            return
        self._start(first.head)
        threading.Thread(target=self._listen, name="listener", daemon=True).start()
        while True:
            busy = bool(self._pending) or bool(self._open)
            for frame in self._received(busy):
                if frame.head["op"] == "end":
                    return
                self._do(frame)
                self._last_work = time.monotonic()
            if self._pending or self._open:
                self._step()
                self._last_work = time.monotonic()
            elif self._sleep_after_s and not self._asleep and time.monotonic() - self._last_work > self._sleep_after_s:
                self._engine.sleep(level=2)
                self._asleep = True
            if time.monotonic() - self._last_sent >= BEAT_S:
                self._send({"beat": self._steps})

    def _listen(self) -> None:
        """Read frames at once, so that the daemon never blocks; end the process when the daemon is gone."""
        try:
            while (frame := framing.receive(self._sock)) is not None:
                self._inbox.put(frame)
        finally:
            os.killpg(0, signal.SIGKILL)

    def _received(self, busy: bool) -> list[Frame]:
        frames: list[Frame] = []
        try:
            if not busy:
                frames.append(self._inbox.get(timeout=IDLE_BEAT_S))
            while True:
                frames.append(self._inbox.get_nowait())
        except queue.Empty:
            return frames

    def _send(self, head: dict[str, Any], block: bytes = b"") -> None:
        framing.send(self._sock, head, block)
        self._last_sent = time.monotonic()

    def _start(self, told: dict[str, Any]) -> None:
        import torch
        import transformers
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        on_gpu = not current_platform.is_cpu()
        can_sleep = on_gpu and current_platform.is_sleep_mode_available() and bool(told["sleep_after_s"])
        _allow_uuids()
        arguments = EngineArgs(
            model=told["base"],
            tokenizer=told["base"],
            trust_remote_code=False,
            dtype=told["dtype"],
            load_format="dummy",  # the first weights are loaded like all others
            generation_config="vllm",  # ignore the folder's own file
            max_model_len=told["context"],
            tensor_parallel_size=told["tensor_parallel"],
            gpu_memory_utilization=told["gpu_memory"],
            enforce_eager=not on_gpu,
            enable_sleep_mode=can_sleep,
            enable_prefix_caching=True,
            disable_log_stats=True,
            seed=0,
            worker_extension_cls=EXTENSION,
            **(_on_gpu(told) if on_gpu else {}),
        )
        self._engine = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
        self._rpc("autorl_prepare", told["cache_bytes"], told["tied"], told["shapes"])
        self._context = int(self._engine.model_config.max_model_len)
        self._ends = told["ends"]
        self._sleep_after_s = told["sleep_after_s"] if can_sleep else 0.0
        versions = {"vllm": vllm.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
        device = f"cuda: {torch.cuda.get_device_name(0)}" if on_gpu else "cpu"
        self._send({"ready": versions, "device": device, "context": self._context})

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        return list(self._engine.collective_rpc(method, args=args))

    def _do(self, frame: Frame) -> None:
        head = frame.head
        if head["op"] == "ask":
            self._ask(head, frame.block)
        elif head["op"] == "drop":
            self._drop(head["stream"])
        elif head["op"] == "prefetch":
            self._rpc("autorl_prefetch", head["folder"], head["hash"])
        else:
            self._send({"loaded": head["id"], **self._load(head["folder"], head["hash"])})

    def _load(self, folder: str, wanted: str) -> dict[str, Any]:
        """Return times and counts; {"changed": why}, {"misfit": why} or {"unread": why, "errno"} leave the model unchanged."""
        started = time.monotonic()
        self._drop(None)
        if self._holds is not None and self._holds[1] == wanted and not self._asleep:
            self._forget_prompts()
            return {"load_s": 0.0, "swap_s": 0.0, "checked": 0, "tensors": 0}
        found = self._rpc("autorl_fetch", folder, wanted, FETCH_WAIT_S)
        while any(part[0] == "waiting" for part in found):  # each process reads for itself
            self._send({"beat": self._steps})
            found = self._rpc("autorl_fetch", folder, wanted, FETCH_WAIT_S)
        for part in found:
            if part[0] == "unread":
                return {"errno": part[1], "unread": part[2]}
            if part[0] != "ready":
                return {part[0]: part[1]}
        loaded = time.monotonic()
        self._holds = None
        if self._asleep:
            self._engine.wake_up(["weights"])
        told = self._rpc("autorl_swap", wanted)
        if wrong := [part["wrong"] for part in told if "wrong" in part]:
            raise Broken(f"the weights of {folder} did not get into the model: {wrong[0]}")
        if self._asleep:
            self._engine.wake_up(["kv_cache"])
            self._asleep = False
        self._forget_prompts()
        self._holds = (folder, wanted)
        counts = {name: min(part[name] for part in told) for name in ("checked", "tensors")}
        return {"load_s": loaded - started, "swap_s": time.monotonic() - loaded, **counts}

    def _forget_prompts(self) -> None:
        """Empty the prefix cache: what was asked before decides which parts of a prompt are computed anew, and so changes answers."""
        if not self._engine.reset_prefix_cache():
            raise Broken("vLLM did not empty its prefix cache")

    def _ask(self, head: dict[str, Any], block: bytes) -> None:
        if self._holds is None:
            raise Broken("it is asked before it has weights")
        if self._asleep:
            told = self._load(*self._holds)
            if "swap_s" not in told:
                raise Broken(f"its weights can't be read again after it slept: {told}")
        stream, sampling, too_long = head["stream"], head["sampling"], []
        prompts = framing.unpack_tokens(head["lengths"], block)
        for key, prompt, scored in zip(head["keys"], prompts, head["scored"], strict=True):
            if len(prompt) >= self._context:
                too_long.append(key)
                continue
            params = self._params(sampling, seed_of(head["seed"], key), self._context - len(prompt), scored > 0)
            self._pending.append((f"{stream}.{key}", prompt, params))
            if scored:
                self._scored[f"{stream}.{key}"] = scored
        if too_long:
            self._send({"answers": stream, "keys": too_long, "lengths": [0] * len(too_long)})

    def _params(self, sampling: dict[str, Any], seed: int, room: int, scored: bool) -> Any:
        """Return the recipe's sampling parameters and nothing else. Greedy prompts share one object's inner ones: vLLM copies only
        the outermost, and adds the same to the inner ones for all prompts."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        limit, is_greedy = min(sampling["max_new_tokens"], room), sampling["temperature"] <= 0
        known = (f"{sampling} {scored}", limit)
        if is_greedy and known in self._greedy:
            return self._greedy[known]
        made = SamplingParams(
            n=1,
            temperature=sampling["temperature"],
            top_p=1.0 if is_greedy else sampling["top_p"],
            top_k=0,
            min_p=0.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            min_tokens=0,
            seed=None if is_greedy else seed,
            max_tokens=limit,
            stop=list(sampling["stop"]) or None,
            stop_token_ids=self._ends,
            ignore_eos=False,
            detokenize=bool(sampling["stop"]),
            skip_special_tokens=True,
            prompt_logprobs=1 if scored else None,  # the most likely token, and always the prompt's own
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        if is_greedy:
            self._greedy[known] = made
        return made

    def _drop(self, stream: int | None) -> None:
        """Drop a stream's unanswered prompts; those of all streams if `stream` is None."""
        self._pending = deque(entry for entry in self._pending if stream is not None and _stream_of(entry[0]) != stream)
        given_up = [name for name, (other, _) in self._open.items() if stream is None or other == stream]
        if given_up:
            self._engine.abort_request(given_up)
        for name in given_up:
            del self._open[name]
        self._scored = {
            name: count for name, count in self._scored.items() if stream is not None and _stream_of(name) != stream
        }
        if not self._open:  # a step may still run on the device
            core = getattr(self._engine.engine_core, "engine_core", None)
            for _ in range(SETTLE_STEPS):
                if self._engine.has_unfinished_requests() or getattr(core, "batch_queue", None):
                    self._engine.step()

    def _step(self) -> None:
        from vllm.inputs.engine import tokens_input

        for _ in range(min(ADD_AT_ONCE, len(self._pending))):
            name, prompt, params = self._pending.popleft()
            self._engine.add_request(name, tokens_input(prompt), params)
            self._open[name] = (_stream_of(name), int(name.partition(".")[2]))
        answers: dict[int, list[tuple[int, list[int]]]] = {}
        scores: dict[int, list[tuple[int, tuple[float, bool]]]] = {}
        for output in self._engine.step():
            asked = self._open.pop(output.request_id, None) if output.finished else None
            if asked is not None and (scored := self._scored.pop(output.request_id, 0)):
                scores.setdefault(asked[0], []).append((asked[1], _likelihood(output, scored)))
            elif asked is not None:
                tokens = list(output.outputs[0].token_ids)
                ending = output.outputs[0]
                if ending.finish_reason == END_REASON and not isinstance(ending.stop_reason, str):
                    if not tokens or tokens[-1] not in self._ends:
                        tokens.append(self._ends[0])
                elif ending.finish_reason not in (END_REASON, LENGTH_REASON):
                    raise Broken(f"vLLM ended an answer with {ending.finish_reason!r}")
                answers.setdefault(asked[0], []).append((asked[1], tokens))
        self._steps += 1
        for stream, found in answers.items():
            lengths, block = framing.pack_tokens(tokens for _, tokens in found)
            self._send({"answers": stream, "keys": [key for key, _ in found], "lengths": lengths}, block)
        for stream, rated in scores.items():
            self._send({"answers": stream, "keys": [key for key, _ in rated], "scores": [score for _, score in rated]})
        if self._open and not self._engine.has_unfinished_requests():  # otherwise the daemon would wait for ever
            raise Broken(f"vLLM has nothing left to do, and {len(self._open)} prompts are not answered")


def _on_gpu(told: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's arguments for a GPU; several workers on one GPU get fixed sizes, so that they don't measure each other."""
    arguments: dict[str, Any] = {"block_size": BLOCK}
    if told["copies"] > 1:
        import torch

        share = int(torch.cuda.get_device_properties(0).total_memory * told["gpu_memory"])
        room = framing.cache_bytes(share, told["shapes"], ITEM_BYTES.get(told["dtype"], 2))
        if room <= 0:
            raise Broken(
                f"{told['copies']} workers on one GPU have {share / 2**30:.1f} GiB each, {-room / 2**30:.1f} GiB too few: fewer "
                "`workers_per_gpu`, or more `gpu_memory`"
            )
        arguments |= {"kv_cache_memory_bytes": room}
        arguments |= {"max_num_seqs": framing.SEQUENCES, "max_num_batched_tokens": framing.STEP_TOKENS}
    return arguments


def _likelihood(output: Any, scored: int) -> tuple[float, bool]:
    """Return the sum of the log-probabilities of a prompt's last `scored` tokens, and whether each is the most likely one."""
    places = zip(output.prompt_token_ids[-scored:], output.prompt_logprobs[-scored:], strict=True)
    found = [(place[token].logprob, max(entry.logprob for entry in place.values())) for token, place in places]
    return sum(own for own, _ in found), all(own >= best for own, best in found)


def _stream_of(request: str) -> int:
    return int(request.partition(".")[0])


def _allow_uuids() -> None:
    """Let vLLM query a GPU that CUDA_VISIBLE_DEVICES names by UUID, and not as a number; for a slice it gets the whole GPU's properties,
    which decide kernels and default batch sizes."""
    entries = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if all(entry.isdigit() or not entry for entry in entries):
        return
    from vllm.platforms.interface import Platform

    Platform.device_id_to_physical_device_id = classmethod(lambda cls, device_id: _index(entries[device_id]))


def _index(entry: str) -> int:
    from vllm.third_party import pynvml

    if entry.isdigit():
        return int(entry)
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(entry)
        if entry.startswith("MIG-"):
            handle = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        return int(pynvml.nvmlDeviceGetIndex(handle))
    finally:
        pynvml.nvmlShutdown()


def main(arguments: list[str]) -> int:
    """Serve one daemon; return the exit code."""
    descriptor, parent = int(arguments[0]), int(arguments[1])
    deny_inspection()
    die_with_parent()
    if os.getppid() != parent:
        return 0
    os.set_inheritable(descriptor, False)
    sock = socket.socket(fileno=descriptor)
    worker = Worker(sock)
    try:
        worker.run()
    except Exception as error:
        import traceback

        traceback.print_exc()
        try:
            framing.send(sock, {"broken": f"{type(error).__name__}: {error}"[:500]})
        except OSError:
            pass
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # vLLM's own shutdown may hang; the daemon ends the children
