#!/usr/bin/env bash
# OpenCode without a person: the prompt comes on standard input, nothing is asked, the trace goes to standard output.
# Arguments go on to `opencode run`.
set -euo pipefail
cd "$WORKSPACE"
model="${AUTORL_DRIVER_MODEL:?opencode needs a driver}"
quoted() { # as a string of JSON
    local text="${1//\\/\\\\}"
    printf '"%s"' "${text//\"/\\\"}"
}
web=deny
case ",${AUTORL_DRIVER_TOOLS:-}," in *,web_search,*) web=allow ;; esac

export XDG_CONFIG_HOME="$HOME/.config" XDG_DATA_HOME="$HOME/.local/share" XDG_CACHE_HOME="$HOME/.cache"
export XDG_STATE_HOME="$HOME/.local/state" OPENCODE_CONFIG="$HOME/.config/opencode/opencode.json"
mkdir -p "$HOME/.config/opencode"
# It wants to know the window, and keeps the conversation within it; 200,000 is what most have.
cat > "$OPENCODE_CONFIG" << CONFIG
{
  "provider": {
    "autorl": {
      "npm": "@ai-sdk/openai-compatible",
      "name": "driver",
      "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
      "models": {
        $(quoted "$model"): {
          "limit": {"context": ${AUTORL_DRIVER_CONTEXT_TOKENS:-200000}, "output": ${AUTORL_DRIVER_MAX_OUTPUT_TOKENS:-8192}}
        }
      }
    }
  },
  "model": $(quoted "autorl/$model"),
  "small_model": $(quoted "autorl/$model"),
  "enabled_providers": ["autorl"],
  "autoupdate": false,
  "share": "disabled",
  "permission": {"*": "allow", "webfetch": "$web", "websearch": "$web", "codesearch": "$web"}
}
CONFIG
export OPENCODE_DISABLE_AUTOUPDATE=1 OPENCODE_DISABLE_MODELS_FETCH=1 OPENCODE_DISABLE_LSP_DOWNLOAD=1
export OPENCODE_DISABLE_SHARE=1 OPENCODE_DISABLE_DEFAULT_PLUGINS=1
exec opencode run --format json "$@"
