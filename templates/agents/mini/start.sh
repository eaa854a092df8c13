#!/usr/bin/env bash
# mini in the workspace. A command of the LLM's that kills it (`pkill python`, a memory limit) is no end: it goes on with its conversation.
set -uo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
cd "$WORKSPACE"
ended=
trap 'ended=1' TERM INT
for _ in 1 2 3 4 5; do
    python3 -u "$here/run.py"
    code=$?
    if [ -n "$ended" ] || [ "$code" -le 128 ]; then break; fi
    echo "mini was ended by signal $((code - 128)) and is started again"
done
exit "$code"
