"""What the driver of the tutorial's day says: `vllm_stand_in.py` speaks by it. Standard library alone."""

from __future__ import annotations

from pathlib import Path

from driver_server import Conversation, Turn
from miniturns import DONE, changed, say

CALLS = 3


def turn(conversation: Conversation, folder: Path, port: int) -> Turn:
    """The answer to a conversation: it looks around, submits, and ends."""
    looks = 'cat description.md; ls data; ./time; python3 -c "import sys; print(sys.prefix)"'
    return [say(looks), say(changed('"$MODEL_PATH"', "v1")), say(DONE)][min(conversation.turns, CALLS - 1)]
