"""A real `vllm serve` by the driver job's code, asked through the real gateway. Needs a GPU and vllm; skips by name elsewhere.

    AUTORL_TEST_DRIVER_MODEL=/path/to/SmolLM2-135M-Instruct pytest tests/gpu/test_driver_gpu.py -s

The model is a folder as `stage NAME --from` takes it; without the variable one with random weights is served.
$AUTORL_VLLM names the program, where it is not beside this Python or on PATH. On the CPU build of vLLM: AUTORL_TEST_DRIVER_CPU=1.
Prints, every 10 s, what the server said last; how long it took to answer, the first byte's delay through the gateway, and how
long it took to come back. $AUTORL_TEST_DRIVER_PATIENCE_S (900) ends a start that takes longer: the server's processes then write
where they stand, and the end of the log is shown. docs/drivers.md, "When it does not come up", says how to read it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
from gateways import TOKEN, GatewayProcess
from helpers import Cluster, alive, wait_for

from autorl_hpc.cluster.vllm_program import PROGRAM_VARIABLE
from autorl_hpc.files.processes import descendants
from autorl_hpc.files.store import EndpointWatch, read_endpoint, read_key
from autorl_hpc.records.driver import DriverEndpoint
from autorl_hpc.sandbox.prove import cuda_works

ON_CPU = os.environ.get("AUTORL_TEST_DRIVER_CPU") == "1"
MODEL = os.environ.get("AUTORL_TEST_DRIVER_MODEL")
VLLM = os.environ.get(PROGRAM_VARIABLE) or shutil.which(
    "vllm", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
)
pytestmark = [
    needs.needs("vllm", VLLM is not None, "no vllm here"),
    needs.needs("gpu", ON_CPU or cuda_works(), "no GPU here"),
    pytest.mark.timeout(1800),
]
START_S = float(os.environ.get("AUTORL_TEST_DRIVER_PATIENCE_S", "900"))
"""Three imports of vLLM in a row, weights, graphs: 45 s on an H100 with a small model, minutes on a busy CPU."""

TELL_S = 10.0
TAIL_BYTES = 12_000

NAME = "own/driver"


@pytest.fixture
def world(staged: Path, tmp_path: Path) -> Iterator[Cluster]:
    """A root with the model staged, and a driver of it."""
    made = Cluster(staged, tmp_path)
    source = Path(MODEL) if MODEL else wide(made.root.model("autorl/tiny"), tmp_path / "wide")
    made.run("stage", NAME, "--from", str(source), "--root", str(made.root.path))
    try:
        yield made
    finally:
        made.end()


def wide(tiny: Path, folder: Path) -> Path:
    """A model like the tiny one with random weights and heads of 64: vLLM's kernels on a CPU have none of 16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors", "MANIFEST.json", "config.json"))
    config = AutoConfig.from_pretrained(
        tiny, hidden_size=256, head_dim=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def ready(world: Cluster, after: int = 0) -> DriverEndpoint:
    """The endpoint, once it has been started more often than that."""
    watch = EndpointWatch(world.experiment.driver_endpoint("local"))
    begun = told_at = time.monotonic()

    def look() -> DriverEndpoint | None:
        nonlocal told_at
        found, now = watch.ready(), time.monotonic()
        if now - told_at > TELL_S:
            told_at, last = now, watch.last
            said = (
                "no endpoint yet" if last is None else f"{last.state}, start {last.starts}: {last.said or last.problem}"
            )
            print(f"{now - begun:.0f} s: {said}", flush=True)
        assert watch.last is None or watch.last.state != "failed", watch.last
        return found if found is not None and found.starts > after else None

    try:
        found: DriverEndpoint = wait_for(look, "vllm to answer", patience_s=START_S)
    except AssertionError as error:
        for pid in servers(world):  # faulthandler: each writes where it stands
            os.kill(pid, signal.SIGABRT)
        time.sleep(3)
        said = world.experiment.driver_log("local")
        tail = said.read_bytes()[-TAIL_BYTES:].decode(errors="replace") if said.exists() else "no server was started"
        raise AssertionError(
            f"{error}\n{watch.last}\n--- the server ---\n{tail}\n--- jobs ---\n{world.logs()}"
        ) from None
    return found


def servers(world: Cluster) -> list[int]:
    """What the driver's job started, the first process first."""
    return sorted(pid for pid in descendants(world.processes[0].pid) if alive(pid))


def asked(gateway: GatewayProcess, **fields: Any) -> tuple[int, bytes, float]:
    """Status, body, and seconds to the first byte of a question."""
    messages = [{"role": "user", "content": "Say a word."}]
    body = json.dumps({"model": NAME, "messages": messages, "max_tokens": 16, "temperature": 0, **fields})
    connection = gateway.connect()
    begun = time.monotonic()
    connection.request(
        "POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    first = answer.read(1)
    first_s = time.monotonic() - begun
    return answer.status, first + answer.read(), first_s


def test_vllm_is_served_asked_through_the_gateway_and_comes_back(world: Cluster, tmp_path: Path) -> None:
    args = ["--enforce-eager"] + ([] if ON_CPU else ["--gpu-memory-utilization=0.3"])
    drivers = {
        "local": {"kind": "vllm", "model": NAME, "gpus": 0 if ON_CPU else 1, "context_tokens": 512, "args": args}
    }
    world.prepare(["null"], matrix={"driver": "local"}, drivers=drivers)
    begun = time.monotonic()
    job = world.start("job", "driver", str(world.experiment.path), "local")
    one = ready(world)
    print(f"\nvllm answered after {time.monotonic() - begun:.1f} s at {one.url}")
    key_file = world.experiment.driver_key("local")
    endpoint = str(world.experiment.driver_endpoint("local"))
    upstream = {"endpoint_file": endpoint, "key_file": str(key_file), "timeout_s": 300, "retries": 2}
    gateway = GatewayProcess(tmp_path, upstream, model=NAME)
    try:
        status, body, _ = asked(gateway)
        assert status == 200, (body, world.experiment.driver_log("local").read_text()[-3000:])
        answer = json.loads(body)
        assert answer["model"] == NAME and answer["choices"][0]["message"]["role"] == "assistant"
        status, body, first_s = asked(gateway, stream=True, stream_options={"include_usage": True})
        assert status == 200 and body.rstrip().endswith(b"data: [DONE]"), body
        totals = gateway.totals(2)
        assert totals["tokens_in"] >= 2 * answer["usage"]["prompt_tokens"] > 0 and totals["tokens_out"] >= 2
        print(f"first byte of a stream through the gateway after {first_s * 1000:.0f} ms; totals {totals}")
        running = servers(world)
        key = read_key(key_file)
        assert running and not any(key.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in running)
        killed_at = time.monotonic()
        os.kill(running[0], signal.SIGKILL)
        two = ready(world, after=one.starts)
        assert asked(gateway)[0] == 200, "the gateway finds it at its new port"
        print(f"killed, it answered again after {time.monotonic() - killed_at:.1f} s at {two.url}")
        job.terminate()
        assert job.wait(120) == 0
        wait_for(lambda: not any(alive(pid) for pid in running), "no server to be left")
        told = read_endpoint(world.experiment.driver_endpoint("local"))
        assert told is not None and told.state == "ended"
    finally:
        gateway.process.kill()
        gateway.process.wait()
