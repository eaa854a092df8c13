"""What the observer costs: `python benchmarks/observer_cost.py`. CPU time, the best of many, since other programs disturb it.

Per step: a loop of a tiny network, in turns with the observer's hook on and off, in one process. Per start: `python -c pass` with
and without the observer, its folder read-only and without compiled files, as the sandbox gives it.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

OBSERVER = Path(__file__).resolve().parent.parent / "autorl_hpc" / "recorder" / "observer"

LOOP = """
import sys, time, torch
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = torch.randn(32, 64), torch.randint(0, 8, (32,))
def steps(n=200):
    begun = time.process_time()
    for _ in range(n):
        torch.nn.functional.cross_entropy(model(x), y).backward(); optimizer.step(); optimizer.zero_grad()
    return (time.process_time() - begun) / n * 1e6
steps()
kept, found = dict(hooks), {True: [], False: []}
assert kept, "the observer is not there"
for turn in range(80):
    hooks.clear(); hooks.update(kept if turn % 2 else {})
    found[bool(turn % 2)].append(steps())
events = []
sys.addaudithook(lambda event, args: events.append(event))
steps(100); seen = len(events)
print(min(found[False]), min(found[True]), seen / 100)
"""


def start_ms(**env: str) -> float:
    """Return the CPU time of a Python's start in ms, the median of many."""
    found = []
    for _ in range(60):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", "pass"], env={**os.environ, **env}, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return 1e3 * statistics.median(found)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(shutil.copytree(OBSERVER, f"{folder}/observer", ignore=shutil.ignore_patterns("__pycache__")))
        env = {"PYTHONPATH": str(fresh), "AUTORL_OBSERVED": f"{folder}/observed", "PYTHONDONTWRITEBYTECODE": "1"}
        said = subprocess.check_output([sys.executable, "-c", LOOP], env={**os.environ, **env}, text=True)
        without, with_it, events = map(float, said.split())
        print(f"step: {without:.0f} us without, {with_it:.0f} us with; {events:.1f} audit events a step")
        print(f"start: {start_ms(PYTHONDONTWRITEBYTECODE='1'):.1f} ms without, {start_ms(**env):.1f} ms with")


if __name__ == "__main__":
    main()
