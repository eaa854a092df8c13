#!/usr/bin/env bash
# Goes on with the last session, which lies in the home in the workspace; without one it begins.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
if [ -n "$(find "$HOME/.gemini/tmp" -path '*/chats/*' -type f -print -quit 2> /dev/null)" ]; then
    exec bash "$here/start.sh" --resume latest
fi
exec bash "$here/start.sh" < "$WORKSPACE/prompt.md"
