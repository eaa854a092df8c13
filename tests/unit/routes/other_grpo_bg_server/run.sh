set -e
CUDA_VISIBLE_DEVICES=0 trl vllm-serve --model $MODEL_PATH &
SERVER=$!
trap "kill $SERVER" EXIT
until curl -s localhost:8000/health; do sleep 2; done
CUDA_VISIBLE_DEVICES=1 timeout 3h accelerate launch --num_processes 1 grpo.py || echo failed
