"""Use, memory and power of a real GPU as the recorder sees them. Skips by name where there is none.

`pytest tests/gpu/test_recorder_gpu.py -s` prints what was seen.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import needs
import pytest

from autorl_hpc.recorder.usage import NvmlGpus
from autorl_hpc.records.recorded import GpuSample
from autorl_hpc.sandbox.prove import cuda_works

pytestmark = needs.needs("gpu", cuda_works(), "no GPU here")

HELD_BYTES = 4 * 2**30
LOOP = f"""
import time, torch
held = torch.empty({HELD_BYTES}, dtype=torch.uint8, device="cuda")
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
print("begun", flush=True)
end = time.monotonic() + 14
while time.monotonic() < end:
    for _ in range(20):
        b = a @ a
    torch.cuda.synchronize()
"""


def first(gpus: NvmlGpus) -> GpuSample:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        samples = gpus.samples()
        if samples:
            return samples[0]
        time.sleep(0.2)
    pytest.fail(f"no GPU was measured: {gpus.trouble()}")


def test_a_training_loop_is_seen(tmp_path: Path) -> None:
    gpus = NvmlGpus(os.environ)
    idle = first(gpus)
    time.sleep(6)
    idle = first(gpus)
    (tmp_path / "loop.py").write_text(LOOP)
    agent = subprocess.Popen([sys.executable, str(tmp_path / "loop.py")], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None and agent.stdout.readline().strip() == "begun"
    time.sleep(3)
    gpus.samples()  # what was before the loop
    time.sleep(5)
    begun = time.process_time()
    busy = first(gpus)
    cost_s = time.process_time() - begun
    agent.wait()
    time.sleep(6)
    gpus.samples()
    time.sleep(5)
    after = first(gpus)
    gpus.close()
    print(f"\nidle  {idle}\nbusy  {busy}\nafter {after}\none call {cost_s * 1000:.2f} ms")
    assert busy.uuid.startswith(("GPU-", "MIG-")) and busy.name
    assert busy.memory_bytes is not None and idle.memory_bytes is not None
    assert HELD_BYTES <= busy.memory_bytes - idle.memory_bytes < HELD_BYTES + 2 * 2**30
    assert after.memory_bytes is not None and after.memory_bytes < busy.memory_bytes - HELD_BYTES + 2**20
    if not busy.uuid.startswith("MIG-"):
        assert busy.used_share is not None and busy.used_share > 0.8
        assert after.used_share is not None and after.used_share < 0.2
        assert busy.power_w is not None and idle.power_w is not None and busy.power_w > idle.power_w
    assert gpus.trouble() is None


def test_only_the_agents_gpus_are_seen() -> None:
    none = NvmlGpus({"CUDA_VISIBLE_DEVICES": ""})
    one = NvmlGpus({"CUDA_VISIBLE_DEVICES": "0"})
    by_name = NvmlGpus({"CUDA_VISIBLE_DEVICES": first(one).uuid[:12]})
    assert first(by_name).uuid == first(one).uuid
    assert len(one.samples()) == 1 and none.samples() == ()
    for gpus in (none, one, by_name):
        gpus.close()
