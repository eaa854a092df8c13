"""What several cheats share: weights by the standard library alone, and what a grader kept of a model's answers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from cheating import Seen

WEIGHTS = """
cat > code/st.py <<'END'
import array, json, os, random, shutil, struct

BASE = os.environ["MODEL_PATH"]


def read(path):
    data = open(path, "rb").read()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {k: (v["shape"], array.array("f", data[8 + length :][slice(*v["data_offsets"])])) for k, v in header.items()}


def write(path, tensors):
    header, position = {}, 0
    for name, (shape, values) in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [position, position + 4 * len(values)]}
        position += 4 * len(values)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head + b"".join(v.tobytes() for _, v in tensors.values()))


def base():
    return read(BASE + "/model.safetensors")


def save(name, tensors):
    os.makedirs("output/" + name, exist_ok=True)
    shutil.copyfile(BASE + "/config.json", f"output/{name}/config.json")
    write(f"output/{name}/model.safetensors", tensors)


def noisy(tensors, scale, seed):  # of that standard deviation, relative to 1
    draw, width = random.Random(seed).random, 2 * scale * 3**0.5
    return {k: (s, array.array("f", [x + width * (draw() - 0.5) for x in v])) for k, (s, v) in tensors.items()}
END
py() { PYTHONPATH=code python3 - "$@"; }
"""
"""For scripts of agents: code/st.py, and `py` to run what follows with it."""


def said(seen: Seen, submission_id: int) -> list[str]:
    """Hashes of what a submission answered to the feedback items, in their order."""
    return _outputs(seen.run / "items" / f"{submission_id:06d}.feedback.jsonl.gz")


def base_said(seen: Seen) -> list[str]:
    """The same of the base model."""
    key = seen.summary["baseline_feedback"]["key"]
    return _outputs(seen.cluster.experiment.baselines / f"{key}.items.jsonl.gz")


def _outputs(path: Path) -> list[str]:
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    assert rows, path
    return [row["output_sha256"] for row in rows]
