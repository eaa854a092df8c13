set -e
mkdir -p output data
prev=$MODEL_PATH
for i in 1 2; do
  python code/actor.py $prev data/r$i.jsonl
  python code/learner.py $prev data/r$i.jsonl output/v$i
  prev=output/v$i
done
