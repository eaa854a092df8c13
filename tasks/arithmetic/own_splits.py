"""Writes a task like `arithmetic` whose splits follow from a secret of this installation, so that its held-out items can't be made
from the public script alone.

    python own_splits.py --to ~/tasks          # prints how to stage it
    autorl-hpc stage arithmetic-1a2b3c4d --tasks ~/tasks --from ~/tasks/.secret-1a2b3c4d

The secret decides which problems are held out and what they wear. The task's name and hashes are its own, so its runs are compared
and ranked among themselves only. Keep the secret's folder out of what agents can read. The problems are still few: who trains on
all of them meets the held-out ones too.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import secrets
import shutil
import tempfile
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
SECRET = "secret"


def write_task(target: Path, secret: bytes) -> tuple[str, Path]:
    """Writes the task's folder and the folder of its secret below `target`; returns the name and the latter.

    Raises:
        FileExistsError: there is a task of this secret already.
    """
    digest = hashlib.sha256(secret).hexdigest()
    name, source = f"arithmetic-{digest[:8]}", target / f".secret-{digest[:8]}"
    folder = target / name
    folder.mkdir(parents=True)
    source.mkdir(mode=0o700)
    with open(os.open(source / SECRET, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    for file_name in ("description.md", "prepare.py"):
        shutil.copyfile(HERE / file_name, folder / file_name)
    value = yaml.safe_load((HERE / "task.yaml").read_text(encoding="utf-8"))
    value |= {"name": name, "sources": [{"file": SECRET, "sha256": digest}]}
    value["title"] += ", its splits by a secret"
    spec = importlib.util.spec_from_file_location("arithmetic_by_secret", folder / "prepare.py")
    assert spec is not None and spec.loader is not None
    prepare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    with tempfile.TemporaryDirectory() as made:
        prepare.prepare(source, Path(made))
        pin = {file: hashlib.sha256((Path(made) / file).read_bytes()).hexdigest() for file in prepare.FILES}
    for file in value["train_files"]:
        value["train_files"][file] = pin[file]
    for split in value["splits"]:
        value["splits"][split]["sha256"] = pin[f"{split}/items.jsonl"]
    (folder / "task.yaml").write_text(yaml.safe_dump(value, sort_keys=False), encoding="utf-8")
    return name, source


def main() -> None:
    """Parses the command line and writes the task."""
    parser = argparse.ArgumentParser(description="A task like arithmetic with splits of this installation's own.")
    parser.add_argument("--to", type=Path, required=True, help="folder with your own tasks")
    target = parser.parse_args().to.resolve()
    name, source = write_task(target, secrets.token_bytes(32))
    print(f"written: {target / name}\nnext: autorl-hpc stage {name} --tasks {target} --from {source}")


if __name__ == "__main__":
    main()
