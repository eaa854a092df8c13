# Shell functions of the scripted agents; source it from a start.sh that runs in the workspace.

SCRIPTED="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

# Number of GPUs given to this run; without CUDA_VISIBLE_DEVICES there is none.
gpu_count() {
  local devices="${CUDA_VISIBLE_DEVICES:-}"
  case "$devices" in
    "" | -1 | NoDevFiles) echo 0 ;;
    *) tr ',' '\n' <<<"$devices" | grep -c . ;;
  esac
}

# train STAGE FROM SHARE: runs code/train_STAGE.py from the model folder FROM with that share of the time left, and
# writes output/STAGE. A stage that a run finished before it was interrupted is not done again.
train() {
  local stage="$1" from="$2" share="$3" gpus
  if [[ -e "output/$stage.done" ]] && compgen -G "output/$stage/*.safetensors" >/dev/null; then
    echo "$stage: finished before, kept"
    return 0
  fi
  mkdir -p code output
  cp "$SCRIPTED"/{texts,machine,"train_$stage"}.py code/
  gpus="$(gpu_count)"
  local where=(--num_processes "$((gpus > 1 ? gpus : 1))" --num_machines 1 --main_process_port 0)
  ((gpus > 1)) && where+=(--multi_gpu)
  ((gpus == 0)) && where+=(--cpu)
  accelerate launch "${where[@]}" --mixed_precision no --dynamo_backend no \
    "code/train_$stage.py" --model "$from" --out "output/$stage" --share "$share"
}
