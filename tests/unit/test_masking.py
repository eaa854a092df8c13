"""Secrets are masked, settings of trainings are not, and no text takes long."""

from __future__ import annotations

import random
import time

import pytest

from autorl_hpc.files import masking
from autorl_hpc.files.masking import MASK, masked

KEY = "q9Zr7LmX2vTb8Kc4Wd6Yp1Hs"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"export OPENAI_API_KEY={KEY}", f"export OPENAI_API_KEY={MASK}"),
        (f"HF_TOKEN='{KEY}' python train.py", f"HF_TOKEN='{MASK}' python train.py"),
        (f'WANDB_API_KEY="{KEY}" wandb login', f'WANDB_API_KEY="{MASK}" wandb login'),
        (f"python x.py --api-key {KEY} --lr 1e-5", f"python x.py --api-key {MASK} --lr 1e-5"),
        (f"python x.py --api_key={KEY}", f"python x.py --api_key={MASK}"),
        (f"huggingface-cli login --token {KEY}", f"huggingface-cli login --token {MASK}"),
        ("mysql --password hunter2 -h db", f"mysql --password {MASK} -h db"),
        ('{"password": "hunter2", "n": 1}', f'{{"password": "{MASK}", "n": 1}}'),
        ('{\\"apiKey\\": \\"hunter2\\"}', f'{{\\"apiKey\\": \\"{MASK}\\"}}'),
        ("client_secret: hunter2", f"client_secret: {MASK}"),
        (f"curl -H 'Authorization: Bearer {KEY}' http://x", f"curl -H 'Authorization: {MASK}' http://x"),
        (f'curl -H "x-api-key: {KEY}" http://x', f'curl -H "x-api-key: {MASK}" http://x'),
        (f"auth bearer {KEY}", f"auth bearer {MASK}"),
        ("curl -u me:hunter2 http://x", f"curl -u {MASK} http://x"),
        ("git clone https://me:hunter2@git.example/x", f"git clone https://me:{MASK}@git.example/x"),
        ("git clone https://abcdef@git.example/x", f"git clone https://{MASK}@git.example/x"),
        (f"http://x/?a=1&access_token={KEY}&b=2", f"http://x/?a=1&access_token={MASK}&b=2"),
        (f"echo sk-ant-api03-{KEY}", f"echo {MASK}"),
        (f"echo sk-proj-{KEY}", f"echo {MASK}"),
        (f"echo hf_{KEY}", f"echo {MASK}"),
        (f"echo ghp_{KEY}", f"echo {MASK}"),
        ("aws AKIAIOSFODNN7EXAMPLE", f"aws {MASK}"),
        (f"AIza{KEY}{KEY}", MASK),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmN", MASK),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIabc\n-----END RSA PRIVATE KEY----- x", f"{MASK} x"),
        ("curl http://127.0.0.1:4242/" + "a" * 32 + "/submit", f"curl http://127.0.0.1:4242/{MASK}/submit"),
    ],
)
def test_secrets_are_masked(text: str, expected: str) -> None:
    assert masked(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "python train.py --max_tokens 512 --max-new-tokens=512 --tokenizer_name gpt2",
        "tokenizer.pad_token = tokenizer.eos_token",
        "num_return_tokens: 5",
        "sort --key 2 data.txt; dict.keys()",
        "basic training of the model, bearer of news",
        "python -u code/train.py",
        "git checkout 0123456789abcdef0123456789abcdef01234567",
        "cat results/1.json | jq .score",
        "pip install --no-deps trl==0.9",
        "password",
        "",
        "https://huggingface.co/Qwen/Qwen2.5",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert masked(text) == text


def test_many_secrets_in_one_line() -> None:
    text = " ".join(f"A{n}_TOKEN={KEY}" for n in range(500))
    assert masked(text) == " ".join(f"A{n}_TOKEN={MASK}" for n in range(500))


@pytest.mark.parametrize(
    "piece",
    ["a", "token=", "token", "'", '"', "\\", "sk-", "eyJa.", "://a", "-----BEGIN ", "- ", "password ", "=", "\n"],
)
def test_time_is_linear(piece: str) -> None:
    """Three times a hundred thousand characters may take twelve times as long, not ten thousand: nothing is squared."""

    def seconds(characters: int) -> float:
        text = piece * (characters // len(piece))
        best = 1e9
        for _ in range(3):
            began = time.process_time()
            masked(text)
            best = min(best, time.process_time() - began)
        return best

    seconds(1000)
    assert seconds(300_000) < 0.05 + 12 * seconds(100_000)


def test_no_text_is_too_odd() -> None:
    chance = random.Random(1)
    alphabet = "aZ0_-=:\"'\\ \n\t@/.$({&;sktokenKEYpassword\ud800é"
    for _ in range(3000):
        text = "".join(chance.choice(alphabet) for _ in range(chance.randrange(60)))
        assert len(masked(text)) <= 4 * len(text) + 4


def test_every_name_of_a_secret_holds_a_hint() -> None:
    names = {*masking._ALWAYS, *masking._SCHEMES, "token", "key", "keys", "signature", "authorization", "-u", "--user"}
    assert all(any(hint in name for hint in masking._HINTS) for name in names)
