"""`python -m autorl_hpc.recorder`: see main.py."""

import sys

from autorl_hpc.recorder.main import main

if __name__ == "__main__":
    sys.exit(main())
