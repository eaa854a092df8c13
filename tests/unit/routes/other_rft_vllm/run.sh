set -e
python rft.py
accelerate launch sft_on_rft.py
