set -euo pipefail
python3 "$(dirname "$0")/ask.py" > code/advice.txt    # the prompt comes on standard input
mkdir -p output/v1
cp "$MODEL_PATH"/* output/v1/
./submit output/v1 --wait
