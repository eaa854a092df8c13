#!/usr/bin/env bash
# RD-Agent makes its own prompts from description.md, writes code/main.py, runs it, and submits by $GRADING_SERVER_URL/submit.
set -euo pipefail
model="${AUTORL_DRIVER_MODEL:?rd-agent needs a driver}"
program="$(command -v rdagent)"
first="$(head -n 1 "$program")"
read -r -a python <<< "${first#\#!}" # of its own venv, or `/usr/bin/env python3`; the code that it writes is run by `python` of the PATH
mkdir -p "$WORKSPACE/.rdagent"
cd "$WORKSPACE/.rdagent" # logs and sessions lie where it is started
export CHAT_MODEL="openai/$model" OPENAI_API_BASE="$OPENAI_BASE_URL" RL_FILE_PATH="$WORKSPACE"
if [ -n "${AUTORL_DRIVER_MAX_OUTPUT_TOKENS:-}" ]; then
    export CHAT_MAX_TOKENS="$AUTORL_DRIVER_MAX_OUTPUT_TOKENS"
fi
exec "${python[@]}" "$(dirname "$0")/loop.py" --base-model "$BASE_MODEL" --benchmark "$TASK"
