"""mini through the real loop: a scripted driver has it write training code, train, submit, read the score, improve and end."""

from __future__ import annotations

import re

from driver_server import Conversation, DriverServer, Turn
from helpers import Cluster, wait_for
from miniparts import AGENT, DONE, parts, say

from autorl_hpc.files.trace_totals import add_up, read_events

parts()

TRAIN = """\
cat > code/train.py <<'EOF'
import json, random, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

start, out, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
recipe = json.load(open("run_meta.json"))["recipe"]
rows = [json.loads(line) for line in open("data/demonstrations.jsonl")]
tokenizer = AutoTokenizer.from_pretrained(sys.argv[4])
model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
random.seed(steps)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)


def tokens(row):
    prompt = tokenizer(recipe["prompt"].replace("{question}", row["question"]))["input_ids"]
    answer = tokenizer(" " + row["answer"].strip(), add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return prompt + answer, [-100] * len(prompt) + answer


for step in range(steps):
    batch = [tokens(row) for row in random.sample(rows, 32)]
    longest = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([ids + [tokenizer.eos_token_id] * (longest - len(ids)) for ids, _ in batch])
    labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in batch])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in batch])
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(step, round(loss.item(), 3), flush=True)
model.save_pretrained(out)
EOF
ls -l code"""


def score_in(text: str) -> float | None:
    """What ./submit printed."""
    found = re.search(r'"score": ([0-9.]+)', text)
    return float(found[1]) if found else None


def engineer(conversation: Conversation) -> Turn:
    """Answers from what it reads alone: one that goes on after an interruption gets the turn that it would have got."""
    last = conversation.last
    if conversation.turns == 0:
        return say("cat description.md run_meta.json; ls data; ./time", "I look at what is here.")
    if conversation.turns == 1:
        return say(TRAIN, "Supervised fine-tuning on the demonstrations first.")
    if conversation.turns == 2:
        return say(
            'python3 code/train.py "$MODEL_PATH" output/v1 30 "$MODEL_PATH" > output/v1.log 2>&1 & '
            "wait; tail -n 2 output/v1.log; ./submit output/v1 --wait --note 'sft, 30 steps'",
            "A short training, submitted early.",
        )
    if conversation.turns == 3:
        score = score_in(last)
        assert score is not None, last
        return say(
            f"echo 'v1: {score}' > code/notes.md; "
            'python3 code/train.py output/v1 output/v2 60 "$MODEL_PATH" && ./submit output/v2 --wait',
            f"That scored {score}. I train on from it.",
        )
    assert score_in(last) is not None, last
    return say(DONE, f"Now {score_in(last)}: I am done.")


def give_driver(cluster: Cluster, driver: DriverServer) -> None:
    """The agent `mini` with the scripted driver set."""
    folder = cluster._frozen() / "templates" / "agents" / "mini"
    script = (AGENT / "start.sh").read_text()
    exports = f"export OPENAI_BASE_URL={driver.url} OPENAI_API_KEY=token AUTORL_DRIVER_MODEL=scripted\n"
    exports += "export AUTORL_DRIVER_CONTEXT_TOKENS=16000\n"
    (folder / "start.sh").write_text(script.replace("set -uo pipefail\n", f"set -uo pipefail\n{exports}"))


def test_it_trains_submits_reads_improves_and_ends(cluster: Cluster) -> None:
    cluster.mini_task(60, max_new_tokens=32)
    with DriverServer(engineer) as driver:
        give_driver(cluster, driver)
        (run_id,) = cluster.prepare(["mini"], matrix={"task": "mini"}, budget={"wall_clock": "5m"})
        cluster.grader()
        assert cluster.supervisor(run_id).wait(240) == 0, cluster.logs()
        log = cluster.run_dir(run_id).agent_log.read_text()
        view = cluster.view(run_id)
        assert view.sealed is not None and len(view.submissions) == 2, log[-4000:]
        wait_for(lambda: cluster.finished([run_id]), 120, what="the run's end")
    scores = [view.score_of(each).evaluation.score for each in view.submissions.values()]
    base = cluster.answers(run_id)[0]["baseline_score"]
    assert base is not None and scores[0] > base + 0.1, (base, scores)
    assert scores[1] > base + 0.1
    totals = add_up(read_events(cluster.run_dir(run_id).recorded("trace")))
    asked = driver.conversations
    assert totals.tokens_in == sum(each.tokens_in for each in asked) and totals.tokens_in
    assert totals.tool_calls == 5 and totals.errors == 0
