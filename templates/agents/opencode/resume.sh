#!/usr/bin/env bash
# Goes on with the last session, which lies in the home in the workspace; without one it begins. The program makes folder and
# database when it starts, before there is a session: its id is looked for (in the log of writes too, and as a file of older versions).
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
data="$HOME/.local/share/opencode"
if grep -Eaqs 'ses_[0-9A-Za-z]{20}' "$data"/opencode*.db* || [ -n "$(find "$data" -name 'ses_*' -print -quit 2> /dev/null)" ]; then
    exec bash "$here/start.sh" --continue
fi
exec bash "$here/start.sh" < "$WORKSPACE/prompt.md"
