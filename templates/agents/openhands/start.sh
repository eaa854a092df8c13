#!/usr/bin/env bash
# OpenHands without a person: nothing is asked, the trace goes to standard output. Arguments go on to `openhands`.
set -euo pipefail
cd "$WORKSPACE"
model="${AUTORL_DRIVER_MODEL:?openhands needs a driver}"
export LLM_MODEL="openai/$model" LLM_BASE_URL="$OPENAI_BASE_URL" LLM_API_KEY="$OPENAI_API_KEY"
export LITELLM_LOCAL_MODEL_COST_MAP=True LITELLM_TELEMETRY=False OTEL_SDK_DISABLED=true DO_NOT_TRACK=1
cat > "$HOME/.prompt.md" # it reads no standard input, and takes a file
exec openhands --headless --json --always-approve --override-with-envs --file "$HOME/.prompt.md" "$@" < /dev/null
