"""Removes secrets and personal names from everything that is stored: commands, errors, logs.

    python redaction.py < printed > log.txt        # as the launcher starts it for each run

Three rules find secrets: the value of `name=value` (and `--name value`, `"name": "value"`) whose name is that
of a key, token or password; text of the shape of a well-known kind of token; and the values of this process's
environment variables that are named like secrets. This module imports nothing outside the standard library,
because it also runs as a process of its own beside every run.
"""

import contextlib
import getpass
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache

BLANK = "***"
SHORTEST_SECRET = (
    8  # characters of an environment variable's value that is blanked wherever it occurs
)
LONGEST_LINE = 1 << 16  # bytes of a log that are redacted at a time

_published = ContextVar("published", default=False)

_SECRET_NAME = re.compile(
    r"key|token|secret|passw|passphrase|pwd|credential|auth|cookie", re.IGNORECASE
)
_URL_LOGIN = re.compile(r"(\w+://)[^/\s@]+@")
TOKEN_SHAPES = (
    r"hf_[A-Za-z0-9]{16,}",  # Hugging Face
    r"gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{20,}|glpat-[\w-]{16,}",  # GitHub, GitLab
    r"(?:AKIA|ASIA|AGPA|AIDA|AROA|ANPA)[A-Z0-9]{16}",  # AWS key ids
    r"sk-[\w-]{16,}|[sr]k_(?:live|test)_\w{16,}",  # OpenAI, Anthropic; Stripe
    r"xox[a-z]-[\w-]{10,}|xapp-[\w-]{10,}",  # Slack
    r"AIza[\w-]{30,}|ya29\.[\w-]{16,}",  # Google
    r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",  # JSON web tokens
    r"npm_[A-Za-z0-9]{30,}|pypi-[\w-]{16,}|dckr_pat_[\w-]{16,}",  # package registries
    r"SG\.[\w-]{16,}\.[\w-]{16,}",  # SendGrid
    r"(?:dop|doo|dor)_v1_[0-9a-f]{32,}",  # DigitalOcean
    r"wandb_v\d_\w{16,}",  # Weights & Biases; its older keys are 40 hexadecimal digits
)
_TOKEN = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(TOKEN_SHAPES)})")
_HEX_TOKEN = re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{40}(?![0-9A-Za-z])")
_REVISION = re.compile(r'"revision": ?"[0-9a-f]{40}(\+changes)?"')
_HEADER = re.compile(r"(?i)\b(bearer|basic|token)\s+[\w.~+/=-]{16,}")
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
_HOME = re.compile(r"/(home|Users)/[^/\s'\":]+")
_VALUE = r"""(?:"[^"\n]*"|'[^'\n]*'|[^\s,;&'"]+)"""
# `name=value` for every name that has a secret word in it, and `name: value` where the word is not all of it
_ASSIGNED = re.compile(
    rf"""(?ix) (?<![\w-]) (
      [\w.-]*(?:key|token|secret|passw(?:or)?d|passphrase|pwd|credential|auth|cookie)[\w.-]*["']?\s*=
    | (?:[\w.-]*(?:token|secret|passw(?:or)?d|passphrase)|[\w.-]*[_-]key|authorization)["']?\s*:
    | --[\w-]*(?:-key|token|secret|passw(?:or)?d|passphrase|pwd|credential)[\w-]*(?=\s)
    ) (\s*) {_VALUE}"""
)


@contextlib.contextmanager
def of_published() -> Iterator[None]:
    """Redact without what this machine knows: its user, host and environment variables.

    Published records have none of their author's, and a reader's may be words of a page, such as `data`.
    """
    token = _published.set(True)
    try:
        yield
    finally:
        _published.reset(token)


def redact_text(text: str) -> str:
    """Blank secrets and logins in a text, and replace home folder, user and host by neutral words."""
    text = _PRIVATE_KEY.sub(BLANK, text)
    text = _URL_LOGIN.sub(rf"\1{BLANK}@", text)
    for value in () if _published.get() else _secret_values(os.environ):
        text = text.replace(value, BLANK)
    text = _HEADER.sub(rf"\1 {BLANK}", text)
    text = _TOKEN.sub(BLANK, text)
    text = _HEX_TOKEN.sub(BLANK, text)
    text = _ASSIGNED.sub(rf"\1\2{BLANK}", text)
    return _HOME.sub("~", text) if _published.get() else _without_names(text)


def is_private(text: str) -> bool:
    """Whether `redact_text` would change a line of a record, other than its source revision."""
    text = _REVISION.sub("", text)
    return redact_text(text) != text


def has_token(text: str) -> bool:
    """Whether a text has something of the shape of a well-known kind of token, or a private key."""
    return bool(_TOKEN.search(text) or _PRIVATE_KEY.search(text))


def redact_command(argv: Sequence[str]) -> list[str]:
    """Blank the values of flags and variables that are named like keys, tokens or passwords.

    Args:
      argv: a command line, one argument per entry.

    Returns:
      The same command line with `***` for each secret: `--api-key X`, `--api-key=X`, `TOKEN=X`, and what
      `redact_text` finds.
    """
    redacted = []
    blank_next = False
    for arg in argv:
        name, separator, _ = arg.partition("=")
        if blank_next and not arg.startswith("--"):
            redacted.append(BLANK)
        elif separator and _SECRET_NAME.search(name):
            redacted.append(f"{name}={BLANK}")
        else:
            redacted.append(redact_text(arg))
        blank_next = arg.startswith("-") and not separator and bool(_SECRET_NAME.search(arg))
    return redacted


def redact_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Redact a stream, line by line; a line ends with a newline or a carriage return.

    Args:
      blocks: the stream, cut anywhere.
    """
    rest, in_key = b"", False
    for block in blocks:
        rest += block
        whole = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1
        if not whole and len(rest) < LONGEST_LINE:
            continue
        whole = whole or len(rest)
        lines, rest = rest[:whole], rest[whole:]
        text = lines.decode(errors="replace")
        if in_key:  # of several lines, some of which were in an earlier block
            _, ended, text = text.partition("-----END")
            if not ended:
                continue
        in_key = "PRIVATE KEY-----" in text and text.rfind("-----BEGIN") > text.rfind("-----END")
        yield redact_text(text).encode()
    if rest and not in_key:
        yield redact_text(rest.decode(errors="replace")).encode()


def _secret_values(environment: Mapping[str, str]) -> list[str]:
    """Return the values of environment variables that are named like secrets, longest first."""
    values = {
        value
        for name, value in environment.items()
        if _SECRET_NAME.search(name) and len(value) >= SHORTEST_SECRET
    }
    return sorted(values, key=len, reverse=True)


@cache
def _names() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return what names the user and the machine, each with its replacement."""
    names = [(_HOME, "~")]
    host = socket.gethostname()
    if host and host != "localhost":
        names.append((re.compile(rf"\b{re.escape(host)}\b"), "<host>"))
    with contextlib.suppress(Exception):  # some containers have a user without a name
        user = getpass.getuser()
        if len(user) > 2 and user != "root":
            names.append((re.compile(rf"\b{re.escape(user)}\b"), "<user>"))
    return tuple(names)


def _without_names(text: str) -> str:
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = text.replace(home, "~")
    for pattern, word in _names():
        text = pattern.sub(word, text)
    return text


def _main() -> None:
    import signal

    # A signal to the run must not cut off the last lines that it prints; the end of the stream ends this.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for data in redact_lines(iter(lambda: os.read(0, LONGEST_LINE), b"")):
        while data:
            data = data[os.write(1, data) :]


if __name__ == "__main__":
    _main()
