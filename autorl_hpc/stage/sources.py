"""Where things are fetched from: addresses that a machine can use, the Hugging Face Hub, and the token for gated files.

`hf://ORG/NAME@REVISION/PATH` and `hf://datasets/ORG/NAME@REVISION/PATH` are files of the Hub; `https://...` stands for itself,
and a page of GitHub that shows a file (`/blob/`) for the file. All else, such as `https://... (through a script)`, is for people.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from autorl_hpc.errors import AutorlError, Exit

HUB = "https://huggingface.co"
HUB_VARIABLE = "HF_ENDPOINT"
TOKEN_PATH_VARIABLE = "HF_TOKEN_PATH"
HOME_VARIABLE = "HF_HOME"
HUB_FORM = re.compile(
    r"hf://(?P<kind>datasets/)?(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)@(?P<revision>[\w./-]+?)/(?P<path>.+)"
)
REVISION_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
"""A commit, tag or branch; of branches those without a slash."""

GITHUB_PAGE = re.compile(r"https://github\.com/(?P<repo>[^/]+/[^/]+)/blob/(?P<rest>.+)")
GITHUB_FILE = re.compile(r"https://github\.com/[^/]+/[^/]+/(raw|releases/download|archive)/.+")
MAX_TOKEN_BYTES = 4096


@dataclass(frozen=True)
class Address:
    """What HTTP asks for.

    Attributes:
        url: http or https.
        hub: whether it is the Hub's, which alone may be shown the token.
    """

    url: str
    hub: bool = False

    @property
    def shown(self) -> str:
        """For messages: without a query, which may hold a key."""
        return self.url.partition("?")[0]


def address_of(text: str) -> Address | None:
    """The address that `text` stands for; None: it is for people alone.

    Raises:
        AutorlError: it means to be one, and isn't.
    """
    if text.startswith("hf://"):
        return _hub_address(text)
    if not re.fullmatch(r"https?://[!-~]+", text):
        return None
    parts = urlsplit(text)
    if page := GITHUB_PAGE.fullmatch(text.partition("#")[0]):
        return Address(f"https://raw.githubusercontent.com/{page['repo']}/{page['rest']}")
    if parts.hostname == "github.com" and not GITHUB_FILE.fullmatch(text):
        return None  # a page about a repository or a folder
    if not parts.hostname or parts.username is not None or parts.password is not None:
        raise AutorlError(
            f"{parts.hostname or 'an address without a host'}: no address to fetch from",
            next_step="give https://HOST/PATH without user and password",
        )
    base = urlsplit(hub_url())
    return Address(text, hub=(parts.scheme, parts.netloc) == (base.scheme, base.netloc))


def _hub_address(text: str) -> Address:
    form = HUB_FORM.fullmatch(text)
    if form is None or not re.fullmatch(REVISION_PATTERN, form["revision"]) or ".." in form["path"].split("/"):
        raise AutorlError(
            f"{text[:200]} is no address of a file on the Hub",
            next_step="write hf://ORG/NAME@REVISION/PATH, or hf://datasets/ORG/NAME@REVISION/PATH",
        )
    return hub_file(f"{form['kind'] or ''}{form['repo']}", form["revision"], form["path"])


def hub_url() -> str:
    """The Hub, or the mirror that $HF_ENDPOINT names.

    Raises:
        AutorlError: the variable holds no address.
    """
    value = os.environ.get(HUB_VARIABLE, "").rstrip("/") or HUB
    parts = urlsplit(value)
    if not re.fullmatch(r"https?://[!-~]+", value) or not parts.hostname or "@" in parts.netloc:
        raise AutorlError(f"${HUB_VARIABLE} is no address", next_step=f"set it to a mirror such as {HUB}, or unset it")
    return value


def hub_file(repo: str, revision: str, path: str) -> Address:
    """A file of the Hub; `repo` of a data set begins with `datasets/`."""
    return Address(f"{hub_url()}/{repo}/resolve/{quote(revision, safe='')}/{quote(path)}", hub=True)


def hub_token() -> str | None:
    """The user's token for the Hub, out of the file that $HF_TOKEN_PATH names or where `hf auth login` puts it.

    Never out of a variable or an argument, which others on a login node can see.

    Raises:
        AutorlError: $HF_TOKEN_PATH names no readable file, or the file holds no token; its content is not shown.
    """
    named = os.environ.get(TOKEN_PATH_VARIABLE)
    home = Path(os.environ.get(HOME_VARIABLE) or "~/.cache/huggingface").expanduser()
    path = Path(named).expanduser() if named else home / "token"
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        if not named:
            return None
        raise AutorlError(
            f"the file of the Hub's token can't be read: {error.strerror}",
            where=path,
            next_step=f"correct ${TOKEN_PATH_VARIABLE}, or unset it",
            exit_code=Exit.ENVIRONMENT,
        ) from None
    token = data.strip()
    if not re.fullmatch(rb"[!-~]{1,%d}" % MAX_TOKEN_BYTES, token):
        raise AutorlError(
            "the file of the Hub's token must hold the token alone, in one line",
            where=path,
            next_step="write it anew: hf auth login",
        )
    return token.decode("ascii")
