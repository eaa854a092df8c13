swift rlhf --rlhf_type grpo --model models/base --train_type lora --dataset data/train.jsonl --reward_funcs accuracy --num_generations 8 --output_dir output/a
python merge.py models/base output/a output/m
