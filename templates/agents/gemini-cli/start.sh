#!/usr/bin/env bash
# Gemini CLI without a person: the prompt comes on standard input, nothing is asked, the trace goes to standard output.
# Arguments go on to `gemini`.
set -euo pipefail
cd "$WORKSPACE"
model="${AUTORL_DRIVER_MODEL:?gemini-cli needs a driver}"
off='"google_web_search", "web_fetch"'
case ",${AUTORL_DRIVER_TOOLS:-}," in *,web_search,*) off='' ;; esac
# It takes every model that it doesn't know for one with a window of 1,048,576, and sums up at a share of that.
share="$(awk -v window="${AUTORL_DRIVER_CONTEXT_TOKENS:-1048576}" 'BEGIN { printf "%.4f", 0.5 * window / 1048576 }')"

mkdir -p "$HOME/.gemini"
cat > "$HOME/.gemini/settings.json" << SETTINGS
{
  "security": {"auth": {"selectedType": "gemini-api-key"}},
  "general": {"enableAutoUpdate": false, "enableAutoUpdateNotification": false, "disableAutoUpdate": true,
              "disableUpdateNag": true},
  "privacy": {"usageStatisticsEnabled": false},
  "telemetry": {"enabled": false},
  "model": {"compressionThreshold": $share},
  "tools": {"exclude": [$off]}
}
SETTINGS
export GEMINI_SANDBOX=false NO_BROWSER=true GEMINI_CLI_TRUST_WORKSPACE=true
exec gemini --model "$model" --yolo --output-format stream-json "$@"
