#!/usr/bin/env bash
# install-grader.sh CLONE: installs the suite with graders' extras, and vLLM in a venv of its own, into an image of Debian 12.
#   TORCH_INDEX   index of torch's wheels (default: PyPI's CUDA build)
#   WITHOUT       vllm: leave it out
set -euo pipefail
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
  bash bubblewrap ca-certificates g++ gcc git procps python3 python3-dev python3-venv
python3 -m venv /opt/autorl
pip=(/opt/autorl/bin/pip install --no-cache-dir --disable-pip-version-check -q)
"${pip[@]}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' "$1/constraints.txt")"
"${pip[@]}" -c "$1/constraints.txt" "$1[train,alpacaeval,webshop,mini]"
if [[ " ${WITHOUT:-} " != *" vllm "* ]]; then
  python3 -m venv /opt/vllm && /opt/vllm/bin/pip install --no-cache-dir -q vllm==0.23.0
fi
rm -rf /var/lib/apt/lists/*
