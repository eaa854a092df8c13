"""One bare `LLM.generate` call in a process of its own: what the engine's rate is measured against.

`python bare_vllm.py FILE`: FILE holds the question as JSON; the rates are printed as the last line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def bare_rate(base: Path, prompts: list[list[int]], sampling: Any, dtype: str, gpu_memory: float) -> list[float]:
    """Answered tokens a second of each of two calls, end tokens not counted in neither."""
    value = {
        "base": str(base),
        "prompts": prompts,
        "max_tokens": sampling.max_new_tokens,
        "dtype": dtype,
        "gpu_memory": gpu_memory,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "question.json"
        path.write_text(json.dumps(value))
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        done = subprocess.run(
            [sys.executable, __file__, str(path)], capture_output=True, text=True, check=False, timeout=900, env=env
        )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    rates: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return rates


def main() -> None:
    """Asks twice, after a warm-up."""
    from vllm import LLM, SamplingParams

    value = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(value["base"], dtype=value["dtype"], gpu_memory_utilization=value["gpu_memory"], generation_config="vllm")
    params = SamplingParams(temperature=0, max_tokens=value["max_tokens"])
    asked = [{"prompt_token_ids": prompt} for prompt in value["prompts"]]
    llm.generate(asked[:64], params, use_tqdm=False)
    rates = []
    for _ in range(2):
        llm.reset_prefix_cache()
        begun = time.monotonic()
        outputs = llm.generate(asked, params, use_tqdm=False)
        tokens = sum(len(one.outputs[0].token_ids) - (one.outputs[0].finish_reason == "stop") for one in outputs)
        rates.append(tokens / (time.monotonic() - begun))
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
