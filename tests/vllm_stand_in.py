"""In the place of `vllm serve`: the same arguments and key, /health and /v1/models, a scripted model behind them.

What it says is `turn(conversation, folder, port)` of the module here that $STAND_IN_SPEAKS names; without, one word. What it does wrong
lies as files in $STAND_IN: `fail` (it ends at once, with errors as vLLM prints them, the cause first), `hang` (it is there and answers
nothing, until the process is started anew after the file is gone).
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from driver_server import Conversation, DriverServer, Entry, Turn


def make_program(folder: Path, speaks: str = "") -> Path:
    """An executable `vllm` in the folder, which is its $STAND_IN too."""
    program = folder / "vllm"
    given = f'STAND_IN="{folder}" STAND_IN_SPEAKS="{speaks}"'
    program.write_text(f'#!/bin/sh\n{given} exec "{sys.executable}" "{Path(__file__).resolve()}" "$@"\n')
    program.chmod(0o755)
    return program


def main() -> int:
    """Serves until it is killed."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model_path")
    for name in ("served-model-name", "host"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "tensor-parallel-size", "max-model-len"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--enable-prefix-caching", action="store_true")
    given = parser.parse_args()
    faults = Path(os.environ["STAND_IN"])
    if not Path(given.model_path, "config.json").is_file():
        raise SystemExit(f"{given.model_path} holds no model")
    if (faults / "fail").exists():
        print("INFO starting\nValueError: Free memory on device is less than desired", flush=True)
        print(
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}", flush=True
        )
        return 1
    server = DriverServer(
        _script(faults, given.port),
        key=os.environ["VLLM_API_KEY"],
        model=given.served_model_name,
        host=given.host,
        port=given.port,
    )
    print(f"serving {given.model_path} at {server.url}", flush=True)
    while not (faults / "hang").exists():
        time.sleep(0.05)
    server.end()
    print("hanging", flush=True)
    threading.Event().wait()
    return 0


def _script(folder: Path, port: int) -> Callable[[Conversation], Entry]:
    if name := os.environ.get("STAND_IN_SPEAKS"):
        speaker = importlib.import_module(name)
        return lambda conversation: speaker.turn(conversation, folder, port)
    return lambda conversation: Turn("stand-in")


if __name__ == "__main__":
    sys.exit(main())
