#!/usr/bin/env bash
# Goes on with the last session, which lies in the home in the workspace; without one it begins.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
if [ -n "$(find "$HOME/.codex/sessions" -name '*.jsonl*' -print -quit 2> /dev/null)" ]; then
    exec bash "$here/start.sh" resume --last
fi
exec bash "$here/start.sh" < "$WORKSPACE/prompt.md"
