"""Mask secrets in command lines, texts and environments before they are stored or shown: common names of secrets and formats of
services' keys, no others. Every pattern and the scan take time linear in the text."""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import Mapping, Sequence

from autorl_hpc.records.base import printable

MASK = "***"

_WORD = re.compile(r"[A-Za-z0-9_.\-]+")
_WORD_END = re.compile(r"[A-Za-z0-9_.\-]+\Z")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
"""The parts of a name: HF_TOKEN, apiKey and --api-key have two."""

_SEPARATOR = re.compile(
    r"\\?[\"']?[ \t]{0,8}\]?[ \t]{0,8}"
    r"(?::[ \t]{0,8}(?:str|bytes|Optional|Union|Any|Final|ClassVar|SecretStr|typing|string)\b[\w.\[\]| ,]{0,40}=|=>|:=|=(?!=)|:)"
    r"[ \t]{0,8}(?:\([ \t\n]{0,40}(?=[rRbBfFuU]{0,2}[\"']))?"
)
"""What is between a name and its value: `=`, `"] = `, `: str = (`."""

_TYPES = frozenset({"str", "bytes", "Any", "Final", "SecretStr", "string"})  # of an argument without a default

_COMMA = re.compile(r"\\?[\"'][ \t]{0,8},[ \t\n]{0,40}(?=[rRbBfFuU]{0,2}\\?[\"'])")
_TAKES_NAME = re.compile(r"(?:setdefault|putenv|[gs]etenv|get|set|pop|setItem)\([ \t\n]{0,8}[rRbBfFuU]{0,2}\\?[\"']\Z")
_SET_BEFORE = re.compile(r"\b(?:setenv|set[ \t]{1,4}-[A-Za-z]{1,4})[ \t]{1,4}\Z")
_LOGIN_BEFORE = re.compile(r"\blogin\([ \t\n]{0,8}\Z")
LOOKBACK = 48  # how many characters before a name are examined; the longest of the calls above fits
_SPACE = re.compile(r"[ \t]{1,8}")
_EQUALS = re.compile("=")
_VALUE = re.compile(
    r"[rRbBfFuU]{0,2}(?:"
    r'"""[^"]*(?:"""|\Z)'
    r"|'''[^']*(?:'''|\Z)"
    r'|\\"[^"\\\n]*(?:\\"|"|)'  # double quotes escaped by JSON inside JSON
    r'|"(?:[^"\\\n]|\\[^\n])*"?'
    r"|'[^'\n]*'?)"
    r"|\$\{[^}\s]*\}?|\$\([^)\n]*\)?"  # a variable: no secret, but masked as well
    r"|[^\s\"'`;&|<>,)\]}\\]+"
)
_LINE = re.compile(r"[^\"'\n]+")
_OPENING = re.compile(r"""[rRbBfFuU]{0,2}(?:\"{3}|'{3}|\\?[\"'])""")
_CLOSING = re.compile(r"""(?:\"{3}|'{3}|\\?[\"'])$""")

_SECRETS = """password passwd pwd passphrase passcode secret secrets credential credentials apikey authtoken accesstoken secretkey
accesskey sshpass pgpassword"""
_ALWAYS = frozenset(_SECRETS.split())  # parts that make a name that of a secret, in any position

_KEYS = """api access secret private auth account encryption signing master service subscription license deploy shared
storage"""
_KEY_OF = frozenset(_KEYS.split())  # `key` is a secret after one of these; in `foreign_key` and `sort-key` it is not

_TOKENS = """eos bos pad unk mask cls sep stop image end start per special first last next think video audio prefix suffix
decoder new"""
_NO_SECRET_TOKEN = frozenset(_TOKENS.split())
"""Words before `token` in models' settings: `pad_token` is not a secret. (`max_tokens` does not end in `token`.)"""

_USER_OPTIONS = frozenset({"-u", "--user", "--proxy-user"})  # curl's options that take `name:password`
_COOKIES = frozenset({"cookie", "set-cookie"})
_SCHEMES = frozenset({"bearer", "basic"})
_HINTS = re.compile("pass|pwd|secret|credential|key|token|signature|bearer|basic|authorization|-u|cookie")
"""Every name of a secret contains one of these: only the words around them are examined."""

_LONGEST_NAME = 128
_SHORTEST_CREDENTIAL = 8  # `basic training` and `bearer of news` are words

_PROGRAMS = re.compile(
    r"(?P<before>\b(?:"
    r"(?:docker|podman|nerdctl|buildah|skopeo|oras|crane|registry)[ \t]+login\b[^\n;|&]{0,200}?[ \t]-p[ \t=]{0,4}"
    r"|sshpass[ \t]+-p[ \t]{0,4}"
    r"|(?:mysql|mysqldump|mysqladmin|mariadb|mariadb-dump)\b[^\n;|&]{0,200}?[ \t]-p(?=[^ \t\n])"
    r"|redis-cli\b[^\n;|&]{0,200}?[ \t](?:-a|--pass)[ \t]{1,4}"
    r"|wandb[ \t]+login[ \t]+(?:--[a-z]+[ \t]+){0,4}(?=[A-Za-z0-9])"
    r"))(?P<value>'[^'\n]*'?|\"[^\"\n]*\"?|[^\s;|&\"']+)"
)
_NAMES_OF_PROGRAMS = ("login", "sshpass", "mysql", "mariadb", "redis-cli")
"""Programs that take a secret by a one-letter option or as a word."""

_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"sk-[A-Za-z0-9_\-]{16,}"  # OpenAI, Anthropic, OpenRouter, DeepSeek
    r"|(?:hf|gsk|npm|r8|glpat|dop_v1|pypi|nvapi|xai|pplx|tvly|fw|csk)[_\-][A-Za-z0-9_\-]{16,}"
    r"|(?:ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|xox[abposr]-[A-Za-z0-9\-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])|AIza[A-Za-z0-9_\-]{30,}"
    r"|eyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}(?:\.[A-Za-z0-9_\-]*)?"  # JSON web tokens
    r")"
)
_SHORTEST_SHAPE = 15
"""Shortest secret found by its format alone: `xoxb-` and ten characters. A private key's first line has 27."""

_USERINFO = re.compile(r"(?<=://)[^\s/@\"'<>?#]{1,256}@")
_BRIDGE = re.compile(r"(?<=127\.0\.0\.1:)(\d{1,5}/)[A-Za-z0-9_\-]{32}(?![A-Za-z0-9_\-])")
"""The address of the grading server contains the run's token."""

_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]{0,32}PRIVATE KEY-----[^-]*(?:-----END [A-Z ]{0,32}PRIVATE KEY-----)?")


def masked(text: str) -> str:
    """Replace what looks like a secret by `***`. Time is linear in the length; the result is hardly longer than `text`."""
    if len(text) >= _SHORTEST_SHAPE:  # most texts to mask are a name or a number
        text = _PRIVATE_KEY.sub(MASK, text)
        text = _SHAPES.sub(MASK, text)
    if "://" in text:
        text = _USERINFO.sub(_without_password, text)
    if "127.0.0.1:" in text:
        text = _BRIDGE.sub(lambda match: match[1] + MASK, text)
    return _without_named(masked_options(text))


def masked_options(text: str) -> str:
    """Mask the secrets that some programs take by an option whose name does not show it."""

    def without(match: re.Match[str]) -> str:
        quote = match["value"][0]
        return match["before"] + (f"{quote}{MASK}{quote}" if quote in "\"'" else MASK)

    return _PROGRAMS.sub(without, text) if any(name in text for name in _NAMES_OF_PROGRAMS) else text


def _without_password(match: re.Match[str]) -> str:
    user, colon, _ = match[0][:-1].partition(":")
    return f"{user}:{MASK}@" if colon else f"{MASK}@"


def _without_named(text: str) -> str:
    lowered = text.replace("\u0130", "I").lower()  # the only character that lower() makes longer
    kept: list[str] = []
    done = cursor = 0
    for hint in _HINTS.finditer(lowered):
        at = hint.start()
        if at < cursor:
            continue
        before = _WORD_END.search(text, max(cursor, at - _LONGEST_NAME), at)
        word = _WORD.match(text, before.start() if before else at)
        if word is None:
            continue
        cursor = word.end()
        found = _value_after(text, word)
        if found is not None:
            start, end = found
            kept += text[done:start], MASK
            done = cursor = end
    return "".join(kept) + text[done:]


def _value_after(text: str, word: re.Match[str]) -> tuple[int, int] | None:
    """Return the span of the secret that `word` announces, or None."""
    name = word[0]
    lowered = name.lower()
    if len(name) > _LONGEST_NAME:
        return None  # too long for a name: data
    if lowered in _SCHEMES:
        value = _value_at(text, _SPACE.match(text, word.end()))
        return value.span() if value and len(value[0]) >= _SHORTEST_CREDENTIAL and not value[0].isalpha() else None
    if name in _USER_OPTIONS:
        value = _value_at(text, _SPACE.match(text, word.end()) or _EQUALS.match(text, word.end()))
        return value.span() if value and ":" in value[0] else None
    separator = _SEPARATOR.match(text, word.end())
    if lowered.endswith("authorization") or lowered in _COOKIES:
        quote = _OPENING.match(text, separator.end()) if separator else None
        rest = _LINE.match(text, (quote or separator).end()) if separator else None
        return rest.span() if rest else None
    before = text[max(0, word.start() - LOOKBACK) : word.start()]
    if lowered == "key":
        is_secret = before.endswith(("?", "&")) or _LOGIN_BEFORE.search(before) is not None
    else:
        is_secret = _is_secrets_name(name)
    value = _value_at(text, separator or _other_separator(text, word, before)) if is_secret else None
    if value is None or not value[0].strip("\\\"'") or value[0] in _TYPES:
        return None
    return _inside_quotes(value)


def _value_at(text: str, separator: re.Match[str] | None) -> re.Match[str] | None:
    return _VALUE.match(text, separator.end()) if separator else None


def _other_separator(text: str, word: re.Match[str], before: str) -> re.Match[str] | None:
    """Match the comma of a call that sets a variable, or the space behind an option."""
    if before.endswith(("'", '"')):
        return _COMMA.match(text, word.end()) if _TAKES_NAME.search(before) else None
    space = _SPACE.match(text, word.end())
    is_option = word[0].startswith("-") and space is not None and not text.startswith("-", space.end())
    return space if is_option or _SET_BEFORE.search(before) else None


def _inside_quotes(value: re.Match[str]) -> tuple[int, int]:
    start, end = value.span()
    opening = _OPENING.match(value[0])
    if opening is None:
        return start, end
    closing = _CLOSING.search(value[0], max(opening.end(), len(value[0]) - 3))
    return start + opening.end(), end - (len(closing[0]) if closing else 0)


def _is_secrets_name(name: str) -> bool:
    parts = [part.lower() for part in _PART.findall(name)]
    if not parts or not _ALWAYS.isdisjoint(parts):
        return bool(parts)
    last, before = parts[-1], parts[-2] if len(parts) > 1 else ""
    if last == "token":
        return before not in _NO_SECRET_TOKEN
    if last in ("key", "keys") and before:
        return before in _KEY_OF or name.isupper()
    return last == "signature" and before in ("amz", "goog")


# --- environment variables: secrets are left out of jobs and of processes that handle models' texts or weights

SECRET = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|KEY|JWT", re.IGNORECASE)
"""SLURM_JWT gives full access to the scheduler as this user."""


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose names do not look like a secret's."""
    return {name: value for name, value in environ.items() if not SECRET.search(name)}


def site_variables(patterns: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a cluster's profile names for agents, by name or as `NCCL_*`, without what looks like a secret."""
    return {
        n: value for n, value in without_secrets(environ).items() if any(fnmatch.fnmatchcase(n, p) for p in patterns)
    }


# --- command lines for records: secrets masked, control characters escaped, cut to a maximum length

MAX_COMMAND_CHARS = 400


def command_text(argv: Sequence[str]) -> str:
    """Return a printable command line of at most MAX_COMMAND_CHARS characters, with what looks like a secret masked."""
    shown, before = [], ""
    for part in argv:
        is_value = False
        if before.startswith("-") and not part.startswith("-") and not set(before) & set(" ="):
            probe = f"{before} a:b" if ":" in part else f"{before} ab"  # curl's -u takes a name, or name:password
            is_value = masked(probe) != probe
        shown.append(MASK if is_value else _quoted(masked(part)))  # quoting first would hide where a value ends
        before = part
    return cut(printable(masked_options(" ".join(shown))), MAX_COMMAND_CHARS)


def cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _quoted(part: str) -> str:
    return part if part and not set(part) & set(" \t\n'\"") else shlex.quote(part)
