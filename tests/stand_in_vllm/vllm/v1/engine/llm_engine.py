"""See the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autorl_hpc.grading.engines.vllm_extension import Weights

WINDOW = 64


class Model(Weights):
    """The worker class with the engine's own methods, of which the last is not for a model that is none."""

    def __init__(self, note: Any) -> None:
        self._note = note

    def autorl_swap(self, wanted: str) -> dict[str, Any]:
        checkpoint, self._autorl_next = self._autorl_next, None
        assert checkpoint is not None
        self._note(f"swap {checkpoint.content_hash}")
        wrong = {"wrong": "they don't fit"} if (Path(os.environ["STAND_IN"]) / "wrong").exists() else {}
        return {"checked": 1, "tensors": len(checkpoint.tensors), "swap_s": 0.0, **wrong}


class LLMEngine:
    """The part of vLLM's that the worker calls."""

    def __init__(self, args: SimpleNamespace) -> None:
        self.faults = Path(os.environ["STAND_IN"])
        if (self.faults / "fail").exists():
            raise ValueError("Free memory on device is less than desired")
        if (self.faults / "crowded").exists() and getattr(args, "kv_cache_memory_bytes", None):
            raise ValueError("No available memory for the cache blocks")
        print("a lot of words on stdout", flush=True)
        self.model_config = SimpleNamespace(max_model_len=args.max_model_len or WINDOW)
        self.engine_core = SimpleNamespace()
        self.model = Model(self.note)
        self.requests: dict[str, tuple[list[int], Any, list[int]]] = {}
        # As tensor parallelism has them: a child in a session of its own, which nothing tells that its parent is gone.
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        self.note(f"started {os.getpid()} {child.pid} {os.environ.get('CUDA_VISIBLE_DEVICES', 'all')}")
        given = {"memory": args.gpu_memory_utilization, "kv": getattr(args, "kv_cache_memory_bytes", None)}
        self.note(f"given {json.dumps({**given, 'threads': os.environ.get('OMP_NUM_THREADS')})}")

    @classmethod
    def from_engine_args(cls, args: SimpleNamespace, usage_context: int) -> LLMEngine:
        return cls(args)

    def note(self, line: str) -> None:
        with open(self.faults / "notes", "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(self.model, method)(*args)]

    def reset_prefix_cache(self) -> bool:
        self.note("reset")
        return not self.requests

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.requests[name]

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any) -> str:
        tokens = prompt["prompt_token_ids"]
        assert 0 < len(tokens) < self.model_config.max_model_len
        self.note(f"asked {os.getpid()} {name.partition('.')[2]}")
        self.requests[name] = (tokens[::-1], params, [])
        return f"{name}-internal"

    def step(self) -> list[Any]:
        if (self.faults / "die").exists():
            os._exit(3)
        while (self.faults / "hang").exists():
            time.sleep(0.05)
        if (self.faults / "forget").exists():
            self.requests.clear()
        time.sleep(0.002)
        ended = []
        for name, (wanted, params, said) in list(self.requests.items()):
            said.append(wanted[len(said)] if len(said) < len(wanted) else params.stop_token_ids[0])
            reason = (
                "stop" if said[-1] in params.stop_token_ids else "length" if len(said) == params.max_tokens else None
            )
            if reason is not None:
                output = SimpleNamespace(token_ids=said, finish_reason=reason, stop_reason=None)
                rated = {"prompt_token_ids": wanted[::-1], "prompt_logprobs": None}
                if params.prompt_logprobs is not None:
                    rated["prompt_logprobs"] = [None, *map(self._rated, wanted[-2::-1])]
                ended.append(SimpleNamespace(request_id=name, finished=True, outputs=[output], **rated))
                del self.requests[name]
        return ended

    @staticmethod
    def _rated(token: int) -> dict[int, Any]:
        """Token 5 is the most likely one everywhere, at -0.5; any other's logarithm is itself over -8."""
        return {5: SimpleNamespace(logprob=-0.5), token: SimpleNamespace(logprob=-0.5 if token == 5 else -token / 8)}
