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

from autorl_hpc.recorder.usage import Gpus
from autorl_hpc.recorder.watch import Moment
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


NOW = Moment(1.0, "2030-01-01T00:00:00.000+00:00", 1)


def seen(gpus: Gpus, seconds: float = 0.0) -> GpuSample:
    """Measures for some seconds; what was used in them."""
    gpus.look(NOW)
    gpus.samples()
    time.sleep(seconds)
    gpus.look(NOW)
    samples = gpus.samples()
    assert samples
    return samples[0]


def test_a_training_loop_is_seen(tmp_path: Path) -> None:
    gpus = Gpus(os.environ)
    idle = seen(gpus, 6)
    (tmp_path / "loop.py").write_text(LOOP)
    agent = subprocess.Popen([sys.executable, str(tmp_path / "loop.py")], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None and agent.stdout.readline().strip() == "begun"
    time.sleep(3)
    busy = seen(gpus, 5)
    agent.wait()
    time.sleep(6)
    after = seen(gpus, 5)
    print(f"\nidle  {idle}\nbusy  {busy}\nafter {after}")
    assert busy.uuid.startswith(("GPU-", "MIG-")) and busy.name
    assert busy.memory_bytes is not None and idle.memory_bytes is not None
    assert HELD_BYTES <= busy.memory_bytes - idle.memory_bytes < HELD_BYTES + 2 * 2**30
    assert after.memory_bytes is not None and after.memory_bytes < busy.memory_bytes - HELD_BYTES + 2**20
    if not busy.uuid.startswith("MIG-"):
        assert busy.used_share is not None and busy.used_share > 0.8
        assert after.used_share is not None and after.used_share < 0.2
        assert busy.power_w is not None and idle.power_w is not None and busy.power_w > idle.power_w
    only = Gpus({"CUDA_VISIBLE_DEVICES": busy.uuid[:12]})
    none = Gpus({"CUDA_VISIBLE_DEVICES": ""})
    none.look(NOW)
    assert seen(only).uuid == busy.uuid and none.samples() == ()
    for each in (gpus, only, none):
        each.close(NOW)
