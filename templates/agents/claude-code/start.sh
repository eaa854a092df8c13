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

# A training may run for hours, in the background too, after the last turn. Versions after 2.1.197 end background commands after the
# default limit of a command, and the session ten minutes after its last turn; they move what is slow in the foreground to the background.
export BASH_MAX_TIMEOUT_MS=86400000 BASH_DEFAULT_TIMEOUT_MS=86400000
export CLAUDE_CODE_PRINT_BG_WAIT_CEILING_MS=0 CLAUDE_CODE_AUTO_BACKGROUND_TIMEOUT_MS=600000
case "$(claude --version < /dev/null 2> /dev/null)" in
2.1.197*) BASH_DEFAULT_TIMEOUT_MS=600000 ;; # this one moves nothing to the background: it would wait for a command that hangs
esac

options=(--print --verbose --output-format stream-json --dangerously-skip-permissions)
case ",${AUTORL_DRIVER_TOOLS:-}," in
*,web_search,*) ;;
*) options+=(--disallowedTools "WebSearch,WebFetch") ;;
esac
exec claude "${options[@]}" "$@"
