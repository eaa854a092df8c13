"""Start the recorder: `python -m autorl_hpc.recorder`, see run_recorder.py."""

import os
import sys

NICE = 5  # lower priority than the agent, which starts at the same time, but not so low that busy cores would starve the recorder

if __name__ == "__main__":
    try:
        os.nice(NICE)  # before the imports, which are most of the cost
    except OSError:
        pass
    from autorl_hpc.recorder.run_recorder import main

    sys.exit(main())
