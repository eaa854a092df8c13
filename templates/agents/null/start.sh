#!/usr/bin/env bash
# Does nothing and submits nothing: what a run looks like whose agent never gets to work.
set -euo pipefail
echo "null: nothing to do"
