"""`python -m autorl_hpc.recorder`: see main.py."""

import os
import sys

NICE = 5
"""Behind the agent, whose start it comes with, but not so far that cores which are all at work would starve it."""

if __name__ == "__main__":
    try:
        os.nice(NICE)  # before the imports, which are most of what it costs
    except OSError:
        pass
    from autorl_hpc.recorder.run_recorder import main

    sys.exit(main())
