#!/usr/bin/env bash
# Goes on with the last session, which lies in the home in the workspace; without one it begins.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
if [ -d "$HOME/.local/share/opencode" ]; then
    exec bash "$here/start.sh" --continue
fi
exec bash "$here/start.sh" < "$WORKSPACE/prompt.md"
