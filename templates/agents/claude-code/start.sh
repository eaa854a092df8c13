#!/usr/bin/env bash
# Claude Code without a person: the prompt comes on standard input, nothing is asked, the trace goes to standard output.
# Arguments go on to `claude`.
set -euo pipefail
cd "$WORKSPACE"
model="${AUTORL_DRIVER_MODEL:?claude-code needs a driver}"

# Whatever size of model it would choose for side jobs, there is one driver.
export ANTHROPIC_MODEL="$model" ANTHROPIC_SMALL_FAST_MODEL="$model" CLAUDE_CODE_SUBAGENT_MODEL="$model"
export ANTHROPIC_DEFAULT_OPUS_MODEL="$model" ANTHROPIC_DEFAULT_SONNET_MODEL="$model" ANTHROPIC_DEFAULT_HAIKU_MODEL="$model"
if [ -n "${AUTORL_DRIVER_CONTEXT_TOKENS:-}" ]; then
    export CLAUDE_CODE_MAX_CONTEXT_TOKENS="$AUTORL_DRIVER_CONTEXT_TOKENS"
    export CLAUDE_CODE_AUTO_COMPACT_WINDOW="$AUTORL_DRIVER_CONTEXT_TOKENS"
fi
if [ -n "${AUTORL_DRIVER_MAX_OUTPUT_TOKENS:-}" ]; then
    export CLAUDE_CODE_MAX_OUTPUT_TOKENS="$AUTORL_DRIVER_MAX_OUTPUT_TOKENS"
fi

export CLAUDE_CONFIG_DIR="$HOME/.claude"
export IS_SANDBOX=1 # it refuses to skip permissions as root elsewhere, and user namespaces make root of everyone
export DISABLE_AUTOUPDATER=1 DISABLE_TELEMETRY=1 DISABLE_ERROR_REPORTING=1 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
export BASH_DEFAULT_TIMEOUT_MS=600000 BASH_MAX_TIMEOUT_MS=86400000 # a training may run for hours

options=(--print --verbose --output-format stream-json --dangerously-skip-permissions)
case ",${AUTORL_DRIVER_TOOLS:-}," in
*,web_search,*) ;;
*) options+=(--disallowedTools "WebSearch,WebFetch") ;;
esac
exec claude "${options[@]}" "$@"
