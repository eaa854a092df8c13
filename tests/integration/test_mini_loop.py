"""mini through the real loop: a scripted driver has it write training code, train, submit, read the score, improve and end."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from driver_server import Conversation, DriverServer, Turn
from helpers import VARIANTS, Cluster, wait_for
from miniparts import DONE, parts, say

from autorl_hpc.files.trace_totals import add_up, read_events
from autorl_hpc.files.view import RunView
from autorl_hpc.records.ledger import Submission
from autorl_hpc.states import EndedBy

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
    turn, last = conversation.turns, conversation.last
    if turn == 0:
        made = say("cat description.md run_meta.json; ls data; ./time", "I look at what is here.")
    elif turn == 1:
        made = say(TRAIN, "Supervised fine-tuning on the demonstrations first.")
    elif turn == 2:
        made = say(
            'python3 code/train.py "$MODEL_PATH" output/v1 20 "$MODEL_PATH" > output/v1.log 2>&1 & '
            "wait; tail -n 2 output/v1.log; ./submit output/v1 --wait --note 'sft, 20 steps'",
            "A short training, submitted early.",
        )
    elif turn == 3:
        made = say(DONE, f"That scored {score_in(last)}: enough.")
    elif turn == 4:
        assert "You ended your work before your budget was used" in last, last
        made = say(
            'python3 code/train.py output/v1 output/v2 30 "$MODEL_PATH" && ./submit output/v2 --wait',
            "Then I train on from it.",
        )
    elif turn == 5:
        assert score_in(last) is not None, last
        made = say(
            VARIANTS.replace('os.environ["MODEL_PATH"]', '"output/v2"') + "variants 3 1; ls output",
            f"Now {score_in(last)}. I make another one and forget to submit it.",
        )
    else:
        made = say("sleep 1; date", "I wait for nothing, until the tokens are used up.")
    return replace(made, tokens_in=900, tokens_out=100)


@pytest.mark.timeout(1500)
def test_it_trains_submits_reads_improves_and_ends(cluster: Cluster, tmp_path: Path) -> None:
    """Ended early and reprompted, it goes on with its conversation; when its tokens are used up, it submits what it forgot."""
    cluster.mini_task(60, max_new_tokens=32)
    key = tmp_path / "key"
    key.write_text("the-real-key")
    key.chmod(0o600)
    with DriverServer(engineer, key="the-real-key", model="scripted") as driver:
        told = {"kind": "api", "url": driver.url, "model": "scripted", "key_file": str(key), "context_tokens": 16_000}
        (run_id,) = cluster.prepare(
            ["mini"],
            matrix={"task": "mini", "driver": "scripted"},
            drivers={"scripted": told},
            budget={"wall_clock": "20m", "tokens": 8000},
            reprompts=1,
            sandbox={"level": "auto"},
            grader={"idle_exit_s": 900},
        )
        cluster.grader()
        assert cluster.supervisor(run_id).wait(900) == 0, cluster.logs()
        log = cluster.run_dir(run_id).agent_log.read_text()
        wait_for(lambda: cluster.finished([run_id]), 300, what="the run's end")
    view = cluster.view(run_id)
    assert view.sealed is not None and view.sealed.ended_by is EndedBy.TOKENS, log[-4000:]
    assert [each.model_path for each in view.submissions.values()] == ["output/v1", "output/v2", "output/v3"]
    assert view.sealed.reprompts == 1 and view.sealed.exit_codes == (0, 0)
    scores = [_score(view, each) for each in view.submissions.values()]
    base = next(answer["baseline_score"] for answer in cluster.answers(run_id) if answer["baseline_score"] is not None)
    assert min(scores) > base + 10.0, (base, scores)

    totals = add_up(read_events(cluster.run_dir(run_id).recorded("trace")))
    assert (totals.tokens_in, totals.tokens_out) == (8 * 900, 8 * 100), "as the gateway counted them"
    assert totals.driver_calls == 8 and totals.tool_calls == 8 and totals.errors == 0
    assert len(totals.sessions) == 1, "the same conversation"
    assert "You had ended your work here." in log and "the-real-key" not in log and "the budget is used up" in log


def _score(view: RunView, submission: Submission) -> float:
    score = view.score_of(submission)
    assert score is not None and score.evaluation.score is not None
    return score.evaluation.score
