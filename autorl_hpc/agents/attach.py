"""`attach`: a terminal of this host shows the shell that agent `shell` runs in its sandbox."""

from __future__ import annotations

import json
import runpy

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import reading
from autorl_hpc.files.layout import RunDir
from autorl_hpc.files.share import share


def attach_to(run: RunDir) -> None:
    """Until the shell exits or is let go of.

    Raises:
        AutorlError: it has not begun, is over, or is on another node.
    """
    terminal = runpy.run_path(str(share("templates") / "agents" / "shell" / "terminal.py"))
    try:
        workspace = json.loads(reading.read_bytes(run.workspace_link))["workspace"]
        terminal["attach"](workspace)
    except (OSError, ValueError, KeyError) as error:
        raise AutorlError(
            f"no shell answers: {error}",
            where=run.path,
            next_step="see with `autorl-hpc status` that the run is under way; a shell is reached on its own node alone: "
            "srun --overlap --jobid NUMBER --pty autorl-hpc attach ...",
            exit_code=Exit.FAILED,
        ) from None
