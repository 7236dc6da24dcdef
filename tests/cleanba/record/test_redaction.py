"""Secrets are blanked in commands, errors and logs before they are written."""

import subprocess
import sys

import pytest

from cleanba.record import Episode, RunInfo, RunWriter, redaction
from cleanba.record.redaction import has_token, redact_command, redact_lines, redact_text

# Twenty kinds of token; none is real.
TOKENS = {
    "Hugging Face": "hf_" + "aB3" * 8,
    "GitHub": "ghp_" + "aB3" * 8,
    "GitHub, fine-grained": "github_pat_" + "aB3" * 8,
    "GitLab": "glpat-" + "aB3-" * 5,
    "AWS key id": "AKIA" + "IOSF4DNN" * 2,
    "AWS temporary key id": "ASIA" + "IOSF4DNN" * 2,
    "OpenAI project": "sk-proj-" + "aB3_" * 6,
    "OpenAI": "sk-" + "aB3" * 10,
    "Anthropic": "sk-ant-api03-" + "aB3-" * 6,
    "Stripe": "sk_live_" + "aB3" * 8,
    "Slack": "xoxb-123456789012-" + "aB3" * 4,
    "Google": "AIza" + "aB3_-" * 7,
    "Google OAuth": "ya29." + "aB3_" * 6,
    "JSON web token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
    "npm": "npm_" + "aB3" * 12,
    "PyPI": "pypi-" + "aB3-" * 8,
    "Docker": "dckr_pat_" + "aB3-" * 6,
    "SendGrid": "SG." + "aB3_" * 5 + "." + "aB3_" * 5,
    "DigitalOcean": "dop_v1_" + "0af3" * 10,
    "Weights & Biases": "0123456789abcdef" * 2 + "01234567",
}
ASSIGNED = [
    "aws_secret_access_key=hunter2/x+y", "WANDB_API_KEY=hunter2", "password=hunter2", "password: hunter2",
    'api_key = "hunter2"', '{"password": "hunter2"}', "Authorization: Bearer hunter2hunter2hunter2",
    "https://user:hunter2@host/x", "client_secret='hunter2'", "--hf-token hunter2",
]  # fmt: skip


@pytest.mark.parametrize("kind", TOKENS)
def test_twenty_kinds_of_token_are_blanked_by_their_shape(kind):
    token = TOKENS[kind]
    assert len(TOKENS) == 20
    for text in (token, f"error: {token}: no such user", f"x={token},y", f"('{token}')"):
        assert token not in redact_text(text)
    assert token not in " ".join(redact_command(["python", "x.py", "--name", token]))


@pytest.mark.parametrize("text", ASSIGNED)
def test_values_of_names_like_password_are_blanked(text):
    assert "hunter2" not in redact_text(f"before {text} after")


@pytest.mark.parametrize(
    "text",
    ["KeyError: 'network'", "--seed -1: must be 0 or more", "the key of a run", "update 3, 1,024 steps",
     "AttributeError: 'NoneType' object has no attribute 'keys'", "authors: none"],
)  # fmt: skip
def test_ordinary_errors_stay_readable(text):
    assert redact_text(text) == text


def test_a_secret_variable_s_value_is_blanked_wherever_it_occurs(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "unremarkable words")
    assert redact_text("it said: unremarkable words!") == "it said: ***!"


def test_a_record_holds_no_token_of_its_command_or_error(tmp_path):
    command = ["python", "x.py", *(f"--note={token}" for token in TOKENS.values()), *ASSIGNED]
    info = RunInfo(system="m", setting="s", env_id="e", seed=1, command=command)
    record = RunWriter(tmp_path / "run", info)
    record.write(Episode(step=1, wall_time=0.1, env_index=0, episode_return=1.0, length=1))
    record.close("failed", RuntimeError(" ".join([*TOKENS.values(), *ASSIGNED])))
    written = "".join(p.read_text(errors="replace") for p in tmp_path.rglob("*") if p.is_file())
    assert "hunter2" not in written
    assert not [kind for kind, token in TOKENS.items() if token in written]


def test_a_stream_is_redacted_however_it_is_cut():
    text = "".join(f"line {token}\n" for token in TOKENS.values()) + "the end"
    key = "-----BEGIN RSA PRIVATE KEY-----\nabc\ndef\n-----END RSA PRIVATE KEY-----\n"
    data = (key + text).encode()
    for size in (1, 7, 100, len(data)):
        blocks = (data[i : i + size] for i in range(0, len(data), size))
        found = b"".join(redact_lines(blocks)).decode()
        assert not [token for token in TOKENS.values() if token in found]
        assert "abc" not in found
        assert found.count("line ***\n") == 20
        assert found.endswith("the end")


def test_the_launcher_s_filter_prints_all_but_secrets_and_outlives_a_signal_to_the_run():
    done = subprocess.run(
        [sys.executable, redaction.__file__],
        input=f"one\rtwo {TOKENS['GitHub']}\nthree".encode(),
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"one\rtwo ***\nthree"


def test_a_token_in_a_study_file_would_be_noticed():
    assert all(has_token(t) for kind, t in TOKENS.items() if kind != "Weights & Biases")
    assert not has_token("[settings.base]\ncores = 1\nflags = {num-envs = 8}")
