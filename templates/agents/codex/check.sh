#!/usr/bin/env bash
# The options that start.sh uses are still there.
set -euo pipefail
help="$(codex exec --help 2>&1)"
for option in --json --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox resume; do
    grep -q -e "$option" <<< "$help" || { echo "this version of codex has no \`exec $option\`"; exit 1; }
done
