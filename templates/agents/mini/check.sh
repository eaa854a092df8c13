#!/usr/bin/env bash
# The parts of mini-swe-agent that mini uses are still there.
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
cd "$here"
MSWEA_SILENT_STARTUP=1 PYTHONDONTWRITEBYTECODE=1 python3 -c 'import mini_hpc.agent, mini_hpc.last, mini_hpc.options' 2>&1 | tail -n 1
