"""Command lines as they are kept: secrets masked, control characters escaped, only their beginning."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

MAX_COMMAND_CHARS = 400
MASK = "***"

_FORMS = re.compile(
    r"\b(?:"
    r"(?:sk|pk|rk|gsk|nvapi|pplx|xai)[-_](?=[\w-]{0,200}\d)[\w-]{12,400}"  # OpenAI, Anthropic, Stripe, Groq, NVIDIA ...
    r"|(?:hf|r8)_[A-Za-z0-9]{12,200}"  # Hugging Face, Replicate
    r"|gh[pousr]_[A-Za-z0-9]{20,300}|github_pat_\w{20,300}|glpat-[\w-]{16,200}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{30,60}|ya29\.[\w-]{20,400}"  # Amazon, Google
    r"|xox[abeprs]-[\w-]{10,200}"  # Slack
    r"|eyJ[\w-]{10,2000}\.[\w-]{4,4000}(?:\.[\w-]{1,2000})?"  # JSON web tokens
    r")"
)
"""What known services' keys look like."""

_CREDENTIAL = re.compile(r"\b(bearer|basic)\s+(?!-)[\w.~+/=-]{6,4000}", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(\w{1,20}://[^\s:/@'\"]{0,200}:)[^\s/@'\"]{1,500}(?=@)")
_NAME = re.compile(r"(?<![\w.-])(?:(-{1,2}[A-Za-z_][\w.-]{0,80})(?:\s?[=:]\s?|\s+)|([A-Za-z_][\w.-]{0,80})\s?[=:]\s?)")
"""`--name value`, `--name=value`, `NAME=value`, `name: value`, up to the value."""

_VALUE = re.compile(r"\"[^\"]{0,4096}\"?|'[^']{0,4096}'?|(?!-)[^\s'\"]{1,4096}")

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_WORDS = {
    "token",
    "secret",
    "password",
    "passwd",
    "passphrase",
    "apikey",
    "credential",
    "credentials",
    "authorization",
}
_KEY_KINDS = {"api", "access", "private", "secret", "auth", "account", "subscription"}
_TEXT_TOKENS = {"pad", "eos", "bos", "unk", "mask", "sep", "cls", "stop", "end", "special", "per", "image", "fim"}
"""What stands before `token` in options of language models; those are no secrets."""


def command_text(argv: Sequence[str]) -> str:
    """A command line, at most MAX_COMMAND_CHARS characters, printable, with what looks like a secret masked.

    Masking knows names (`--api-key X`, `WANDB_API_KEY=X`, `token: X`), forms (`sk-...`, `hf_...`, `ghp_...`), and credentials in
    addresses. A secret with an innocent name and no known form stays: it stood in /proc for every user of the node.
    """
    shown, after = [], ""
    for part in argv:
        is_value = after.startswith("-") and not part.startswith("-") and is_secret_name(after.lstrip("-"))
        shown.append(MASK if is_value else _quoted(masked(part)))
        after = part
    return cut(printable(" ".join(shown)), MAX_COMMAND_CHARS)


def masked(text: str) -> str:
    """`text` with what looks like a secret replaced by MASK."""
    text = _IN_ADDRESS.sub(lambda found: found[1] + MASK, text)
    text = _CREDENTIAL.sub(lambda found: f"{found[1]} {MASK}", text)
    text = _FORMS.sub(MASK, text)
    kept, at = [], 0
    while found := _NAME.search(text, at):
        kept.append(text[at : found.end()])
        at = found.end()
        if is_secret_name((found[1] or found[2]).lstrip("-")) and (value := _VALUE.match(text, at)):
            kept.append(MASK)
            at = value.end()
    return "".join(kept) + text[at:]


def printable(text: str) -> str:
    """`text` with control, direction and unpaired characters escaped, as Python writes them."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def cut(text: str, limit: int) -> str:
    """The beginning of `text`."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _quoted(part: str) -> str:
    return part if part and not set(part) & set(" \t\n'\"") else shlex.quote(part)


def is_secret_name(name: str) -> bool:
    """Whether a variable or an option of this name holds a secret."""
    words = [word.lower() for word in _WORDS.findall(name)]
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        if word in _SECRET_WORDS and not (word == "token" and before in _TEXT_TOKENS):
            # `--token-level`, `--password-file`: about one, not one; `token_id` is a word's number.
            return words[place + 1 :] in ([], ["value"], ["key"])
        if word == "key" and before in _KEY_KINDS:
            return words[place + 1 :] in ([], ["value"])
    return False
