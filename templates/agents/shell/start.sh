#!/usr/bin/env bash
# A person in an agent's place: a shell in the sandbox, which terminal.py shows to whoever attaches. The run goes on while it does.
set -euo pipefail
cd "$WORKSPACE"
exec python3 "$(dirname "$0")/terminal.py"
