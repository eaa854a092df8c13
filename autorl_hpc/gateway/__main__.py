"""Start the gateway: `python -m autorl_hpc.gateway`."""

import sys

from autorl_hpc.gateway.run_gateway import main

if __name__ == "__main__":
    sys.exit(main())
