#!/usr/bin/env bash
# After an interruption or for a reprompt: mini finds its conversation again.
exec bash "$(dirname -- "${BASH_SOURCE[0]}")/start.sh"
