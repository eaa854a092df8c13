#!/usr/bin/env bash
# Goes on with the last conversation, which lies in the home in the workspace; without one it begins.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
if compgen -G "$HOME/.openhands/conversations/*/base_state.json" > /dev/null; then
    exec bash "$here/start.sh" --resume --last
fi
exec bash "$here/start.sh" < "$WORKSPACE/prompt.md"
