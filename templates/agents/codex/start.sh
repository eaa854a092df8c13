#!/usr/bin/env bash
# Codex without a person: the prompt comes on standard input, nothing is asked, the trace goes to standard output.
# Arguments stand between `codex exec` and its last one, such as `resume --last`.
set -euo pipefail
cd "$WORKSPACE"
model="${AUTORL_DRIVER_MODEL:?codex needs a driver}"
quoted() { # as a string of TOML
    local text="${1//\\/\\\\}"
    printf '"%s"' "${text//\"/\\\"}"
}
search=disabled
case ",${AUTORL_DRIVER_TOOLS:-}," in *,web_search,*) search=live ;; esac

export CODEX_HOME="$HOME/.codex"
mkdir -p "$CODEX_HOME"
{
    echo "model = $(quoted "$model")"
    echo 'model_provider = "autorl"'
    if [ -n "${AUTORL_DRIVER_CONTEXT_TOKENS:-}" ]; then
        echo "model_context_window = $AUTORL_DRIVER_CONTEXT_TOKENS"
    fi
    echo "web_search = \"$search\""
    echo 'check_for_update_on_startup = false'
    echo 'analytics.enabled = false'
    echo 'feedback.enabled = false'
    echo 'shell_environment_policy.inherit = "all"'
    echo 'allow_login_shell = false' # a login shell would put the system's PATH in the place of the environment's
    echo '[model_providers.autorl]'
    echo 'name = "driver"'
    echo "base_url = $(quoted "$OPENAI_BASE_URL")"
    echo 'env_key = "OPENAI_API_KEY"'
    echo 'wire_api = "responses"'
    echo 'stream_idle_timeout_ms = 600000' # a driver on the cluster may think for minutes
} > "$CODEX_HOME/config.toml"

exec codex exec --json --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "$@" -
