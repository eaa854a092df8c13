"""Command lines are kept without what looks like a secret."""

from __future__ import annotations

import time

import pytest

from autorl_hpc.files.redact import MAX_COMMAND_CHARS, command_text, masked

KEY = "aB3" * 12


@pytest.mark.parametrize(
    ("argv", "kept"),
    [
        (["env", "TOKEN=abc", "python", "x.py"], "env TOKEN=*** python x.py"),
        (["python", "--api-key", "abc", "--lr", "1e-5"], "python --api-key *** --lr 1e-5"),
        (["python", "--api_key=abc"], "python --api_key=***"),
        (["python", "--password", "p w", "go"], "python --password *** go"),
        (["python", "--token", "--lr", "1"], "python --token --lr 1"),
        (["sh", "-c", "export OPENAI_API_KEY='a b'; run"], """sh -c 'export OPENAI_API_KEY='"'"'***'"'"'; run'"""),
        (["sh", "-c", "HF_TOKEN=x train --max-tokens 5"], "sh -c 'HF_TOKEN=*** train --max-tokens 5'"),
        (["curl", "-H", "Authorization: Bearer abcdefgh"], "curl -H 'Authorization: ***'"),
        (["curl", "-H", "x-api-key: abc"], "curl -H 'x-api-key: ***'"),
        (["x", "AWS_SESSION_TOKEN", KEY], "x AWS_SESSION_TOKEN ***"),
        (["docker", "login", "-u", "me", "-p", "pw"], "docker login -u me -p ***"),
        (["mysql", "-u", "me", "-ppw", "db"], "mysql -u me -p*** db"),
        (["curl", "--user=me:pw", "http://x"], "curl --user=*** http://x"),
        (["python", "-c", 'os.environ["X_API_KEY"]="abc"'], """python -c 'os.environ["X_API_KEY"]="***"'"""),
        (["git", "clone", "https://me:pass@host/x"], "git clone https://me:***@host/x"),
        (["run", f"sk-{KEY}"], "run ***"),
        (["run", f"sk-ant-api03-{KEY}"], "run ***"),
        (["run", f"hf_{KEY}"], "run ***"),
        (["run", f"ghp_{KEY}"], "run ***"),
        (["run", f"--key={KEY}x", f"x=hf_{KEY}"], f"run --key={KEY}x x=***"),
        (["run", "eyJhbGciOiJIUzI1.eyJzdWIiOiIx.abc"], "run ***"),
    ],
)
def test_secrets_are_masked(argv: list[str], kept: str) -> None:
    assert command_text(argv) == kept


@pytest.mark.parametrize(
    "argv",
    [
        ["python", "--pad_token", "<pad>", "--eos-token=<eos>", "--max-new-tokens", "64"],
        ["python", "--tokenizer", "gpt2", "--num_tokens=5", "--token-level", "loss"],
        ["python", "code/train_sft.py", "--key", "question", "--out", "output/sk-learn-model"],
        ["pip", "install", "scikit-learn", "sk-video"],
    ],
)
def test_what_is_no_secret_stays(argv: list[str]) -> None:
    assert command_text(argv) == " ".join(argv)


def test_control_characters_are_escaped_and_long_lines_cut() -> None:
    assert command_text(["a\x1b[31m", "b\nc", "\u202eevil", "\udcff"]) == r"a\x1b[31m 'b\nc' \u202eevil \udcff"
    assert len(command_text(["x" * 5000])) == MAX_COMMAND_CHARS


@pytest.mark.parametrize(
    "part", ["a ", "--token ", "A=B=", "a='", "x: ", "sk-", "eyJ", "://:", "'a=", "-", ".", "basic "]
)
def test_no_text_takes_long(part: str) -> None:
    text = part * (4096 // len(part))
    begun = time.process_time()
    command_text([text])
    masked(text)
    assert time.process_time() - begun < 2.0
