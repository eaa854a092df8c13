set -euo pipefail
python3 "$(dirname "$0")/ask.py" >> code/advice.txt   # standard input says why it goes on, and what is left
