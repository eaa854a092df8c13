"""Secrets are masked, in texts and command lines, settings of trainings are not; odd characters are escaped; no text takes long."""

from __future__ import annotations

import random
import sys
import time

import pytest

from autorl_hpc.files.redact import MASK, MAX_COMMAND_CHARS, command_text, masked
from autorl_hpc.recorder.traces.parse import MASKED_CHARS, MAX_TEXT_CHARS, beginning
from autorl_hpc.records.base import printable

KEY = "q9Zr7LmX2vTb8Kc4Wd6Yp1Hs"
LONG_KEY = "aB3" * 12


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
        ('os.environ["WANDB_API_KEY"] = "hunter2"', f'os.environ["WANDB_API_KEY"] = "{MASK}"'),
        ('cfg["api_key"]="hunter2"', f'cfg["api_key"]="{MASK}"'),
        ('os.environ.setdefault("HF_TOKEN","hunter2")', f'os.environ.setdefault("HF_TOKEN","{MASK}")'),
        ('os.putenv("X_TOKEN", "hunter2")', f'os.putenv("X_TOKEN", "{MASK}")'),
        ('os.getenv("X_API_KEY","hunter2")', f'os.getenv("X_API_KEY","{MASK}")'),
        ('api_key: str = "hunter2"', f'api_key: str = "{MASK}"'),
        ('api_key: str | None = "hunter2"', f'api_key: str | None = "{MASK}"'),
        ('api_key: Optional[str] = "hunter2"', f'api_key: Optional[str] = "{MASK}"'),
        ('api_key = f"hunter2"', f'api_key = f"{MASK}"'),
        ("token = b'hunter2'", f"token = b'{MASK}'"),
        ('API_KEY = (\n    "hunter2")', f'API_KEY = (\n    "{MASK}")'),
        ('password = """hunter2"""', f'password = """{MASK}"""'),
        ('PASSWORD="a\\"b hunter2"', f'PASSWORD="{MASK}"'),
        ('wandb.login(key="hunter2")', f'wandb.login(key="{MASK}")'),
        ("setenv X_API_KEY hunter2", f"setenv X_API_KEY {MASK}"),
        ("set -gx X_API_KEY hunter2", f"set -gx X_API_KEY {MASK}"),
        ("curl --user=me:pw http://x", f"curl --user={MASK} http://x"),
        ("curl --proxy-user me:pw http://x", f"curl --proxy-user {MASK} http://x"),
        ("docker login -u me -p pw reg.example", f"docker login -u me -p {MASK} reg.example"),
        ("docker login -p 'p w' reg.example", f"docker login -p '{MASK}' reg.example"),
        ("mysql -u me -ppw db", f"mysql -u me -p{MASK} db"),
        ("sshpass -p pw ssh h", f"sshpass -p {MASK} ssh h"),
        ("redis-cli -h x -a pw get y", f"redis-cli -h x -a {MASK} get y"),
        ("wandb login --relogin hunter2", f"wandb login --relogin {MASK}"),
        ("https://x.example/v1?key=hunter2&q=1", f"https://x.example/v1?key={MASK}&q=1"),
        ("https://x.example/v1?q=1&key=hunter2", f"https://x.example/v1?q=1&key={MASK}"),
        ("curl -H 'Cookie: a=hunter2; b=c' http://x", f"curl -H 'Cookie: {MASK}' http://x"),
        ("Set-Cookie: sid=hunter2; Path=/", f"Set-Cookie: {MASK}"),
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
        'columns = ["token", "label", "api_key", "x"]',
        'batch.get("token", None)',
        'p.add_argument("--tokenizer", default="gpt2"); p.add_argument("--max_tokens", default=3)',
        'p.add_argument("--api_key", help="of the judge"); p.add_argument("--model", default="gpt2")',
        "if token == eos or token != pad:",
        "$HF_TOKEN run2train1 and HF_TOKEN is needed, HF_TOKEN train_v2.py, HF_TOKEN /scratch/x1/y2",
        "mysql -p db; docker run -p 8080:80 img; mkdir -p a/b; ssh -p 22 h",
        "wandb login",
        "sorted(rows, key=len); sort(key=lambda r: r[0]); --user root; cookie jar",
        "def f(token: str) -> int:",
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


PIECES = (
    *("a", "token=", "token", "'", '"', "\\", "sk-", "eyJa.", "://a", "-----BEGIN ", "- ", "password "),
    *("=", "\n", "docker login ", "mysql -", "login(key=", "token]", "token, ", '("token",'),
    *('add_argument("--token", ', "A_TOKEN ", "token: str ", "token = (", 'b"', "cookie:", "?key="),
)


@pytest.mark.parametrize("piece", PIECES)
def test_time_is_linear(piece: str) -> None:
    """Two hundred thousand characters take well below a second; squared, they would take minutes."""
    text = piece * (200_000 // len(piece))
    began = time.process_time()
    masked(text)
    assert time.process_time() - began < 5.0


def test_no_text_is_too_odd() -> None:
    chance = random.Random(1)
    alphabet = "aZ0_-=:\"'\\ \n\t@/.$({&;sktokenKEYpassword\ud800é"
    for _ in range(1000):
        text = "".join(chance.choice(alphabet) for _ in range(chance.randrange(60)))
        assert len(masked(text)) <= 4 * len(text) + 4


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
        (["docker", "login", "-u", "me", "-p", "pw"], "docker login -u me -p ***"),
        (["mysql", "-u", "me", "-ppw", "db"], "mysql -u me -p*** db"),
        (["curl", "--user=me:pw", "http://x"], "curl --user=*** http://x"),
        (["python", "-c", 'os.environ["X_API_KEY"]="abc"'], """python -c 'os.environ["X_API_KEY"]="***"'"""),
        (["git", "clone", "https://me:pass@host/x"], "git clone https://me:***@host/x"),
        (["run", f"sk-{LONG_KEY}"], "run ***"),
        (["run", f"sk-ant-api03-{LONG_KEY}"], "run ***"),
        (["run", f"hf_{LONG_KEY}"], "run ***"),
        (["run", f"ghp_{LONG_KEY}"], "run ***"),
        (["run", f"--key={LONG_KEY}x", f"x=hf_{LONG_KEY}"], f"run --key={LONG_KEY}x x=***"),
        (["run", "eyJhbGciOiJIUzI1.eyJzdWIiOiIx.abc"], "run ***"),
    ],
)
def test_secrets_of_command_lines_are_masked(argv: list[str], kept: str) -> None:
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
def test_what_is_no_secret_of_a_command_line_stays(argv: list[str]) -> None:
    assert command_text(argv) == " ".join(argv)


def test_control_characters_are_escaped_and_long_lines_cut() -> None:
    assert command_text(["a\x1b[31m", "b\nc", "\u202eevil", "\udcff"]) == r"a\x1b[31m 'b\nc' \u202eevil \udcff"
    assert len(command_text(["x" * 5000])) == MAX_COMMAND_CHARS


def by_rule(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def test_every_character_is_kept_or_escaped() -> None:
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    assert printable(every) == by_rule(every)
    assert printable("a\nb\x1b[0m \ud800é\u202e") == r"a\nb\x1b[0m \ud800é\u202e"
    assert printable("") == ""


@pytest.mark.parametrize("char", ["x", "\n", "\U000e0001"])
@pytest.mark.parametrize("length", [MAX_TEXT_CHARS, MAX_TEXT_CHARS + 1, 3 * MASKED_CHARS])
def test_a_beginning_is_cut_as_if_all_of_it_had_been_escaped(char: str, length: int) -> None:
    text = f"a{char * length}b"
    whole = by_rule(text[:MASKED_CHARS])
    assert beginning(text) == (whole if len(whole) <= MAX_TEXT_CHARS else whole[: MAX_TEXT_CHARS - 1] + "…")
