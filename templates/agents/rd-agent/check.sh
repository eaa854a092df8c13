#!/usr/bin/env bash
# Its loop for RL post-training is there and whole: older versions have none, and in 1.0.0 of PyPI its scenario lacks methods.
set -euo pipefail
first="$(head -n 1 "$(command -v rdagent)")"
read -r -a python <<< "${first#\#!}"
"${python[@]}" - << 'END' 2> /dev/null || { echo "this rdagent's loop for RL post-training is not there, or incomplete"; exit 1; }
import sys

from rdagent.scenarios.rl.loop import RLPostTrainingRDLoop  # noqa: F401
from rdagent.scenarios.rl.scen.scenario import RLPostTrainingScen

sys.exit(bool(RLPostTrainingScen.__abstractmethods__))
END
