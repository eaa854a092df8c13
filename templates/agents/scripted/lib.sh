# Shell functions of the scripted agents; source it from a start.sh that runs in the workspace.

SCRIPTED="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
mkdir -p code output
cp "$SCRIPTED"/*.py "$SCRIPTED"/learner/*.py code/

# Number of GPUs given to this run: those of CUDA_VISIBLE_DEVICES; where it is not set, all whose devices are here.
gpu_count() {
  local devices="${CUDA_VISIBLE_DEVICES-unset}"
  case "$devices" in
    unset) compgen -G '/dev/nvidia[0-9]*' | grep -c . || true ;;
    "" | -1 | none | void | NoDevFiles) echo 0 ;;
    *) tr ',' '\n' <<<"$devices" | grep -c . ;;
  esac
}

# launch MODEL SCRIPT ARGUMENT...: a trainer by the configuration that the model needs on the GPUs that are there: by accelerate, or by
# Python itself for one process, which needs no launcher and saves its start.
launch() {
  local model="$1" script="$2" gpus processes config parts where
  shift 2
  gpus="$(gpu_count)"
  read -r config parts gpus < <(python3 code/fit.py "$model" "$gpus") || return 1
  processes="${EXPERT_PROCESSES:-$((gpus > 1 ? gpus : 1))}"
  [[ "$config" == cpu ]] && ((processes > 1)) && config=multi-cpu
  where=(--config_file "$SCRIPTED/../accelerate/$config.yaml" --num_processes "$processes")
  [[ "$config" == zero* ]] && where+=(--deepspeed_config_file "$SCRIPTED/../deepspeed/$config.json")
  [[ "$parts" == lora ]] && set -- "$@" --lora
  echo "$script: $config, $parts parameters"
  if ((processes == 1)) && [[ "$config" != zero* ]]; then
    python3 "code/$script" --model "$model" "$@"
  else
    python3 -m accelerate.commands.launch "${where[@]}" "code/$script" --model "$model" "$@"
  fi
}

# finished STAGE: whether a run did it before it was interrupted.
finished() {
  [[ -e "output/$1.done" ]] || return 1
  echo "$1: finished before, kept"
}

# played: whether the task is played in episodes. Said, not shown by an exit code: a program that fails would count as a failure of the agent's.
played() {
  [[ "$(python3 -c 'import json; print(bool(json.load(open("run_meta.json"))["recipe"].get("max_steps")))')" == True ]]
}

# train_sft FROM SHARE: supervised training of the model folder FROM with that share of the time left, to output/sft. For a task
# that is played an expert plays the training games first.
train_sft() {
  finished sft && return 0
  if played; then
    finished traces || { python3 code/collect.py --model "$1" --out output/traces --share "$(python3 -c "print($2 / 2)")" && touch output/traces.done; }
    launch "$1" train_episodes.py --out output/sft --share "$2" --traces output/traces
  else
    launch "$1" train_sft.py --out output/sft --share "$2"
  fi
}

# train_grpo FROM SHARE: RL, to output/grpo; on whole episodes where the task is played.
train_grpo() {
  finished grpo && return 0
  if played; then
    launch "$1" train_online.py --out output/grpo --share "$2"
  else
    launch "$1" train_grpo.py --out output/grpo --share "$2"
  fi
}

# train_online FROM OPTION...: RL on whole episodes, to output/online. Where it fails it goes on from its last state once more, and samples by vLLM or
# transformers.
train_online() {
  finished online || launch "$1" train_online.py --out output/online --share 0.95 "${@:2}" ||
    EXPERT_SAMPLER=vllm launch "$1" train_online.py --out output/online --share 0.9 "${@:2}" || echo "RL failed; what was best before is submitted" >&2
}

# submit_best FOLDER...: the one that is best on the validation part, marked final.
submit_best() {
  local best
  best="$(python3 code/choose.py "$@" | tail -n 1)"
  [[ -n "$best" ]] || { echo "nothing was trained: there is nothing to submit" >&2; return 1; }
  python3 ./submit "$best" --final --wait --note "best of $* on own validation"
}
