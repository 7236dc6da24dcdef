"""`make check-bits` passes where the golden bits are computed, and nowhere else."""

import json
import subprocess
import sys

import pytest

from cleanba.audit import check_bits
from cleanba.run.command_line import BadInput
from tests.cleanba.conftest import ROOT


def run(*args):
    return subprocess.run(
        [sys.executable, "-m", "cleanba.audit.check_bits", *map(str, args)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_anew")
def test_this_machine_computes_the_golden_bits():
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        done.stdout.count("same bits")
        == len(check_bits.read_golden(check_bits.GOLDEN).fingerprints) + 1
    )


@pytest.mark.slow
def test_one_other_bit_is_noticed_and_what_to_report_is_printed(tmp_path):
    golden = json.loads(check_bits.GOLDEN.read_text())
    name, chain = next(iter(golden["fingerprints"].items()))
    chain[3] = f"{int(chain[3], 16) ^ 1:064x}"
    golden["fingerprints"] = {name: chain}
    golden["versions"]["jax"] = "0.0.1"
    path = tmp_path / "golden.json"
    path.write_text(json.dumps(golden))
    done = run("--golden", path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "different from update 4 on" in done.stdout
    assert "Please report" in done.stdout
    assert golden["processors"][0] in done.stdout
    assert "0.0.1 expected" in done.stdout

    assert run("--golden", path, "--update").returncode == 0
    updated = json.loads(path.read_text())
    original = json.loads(check_bits.GOLDEN.read_text())
    assert updated["fingerprints"][name] == original["fingerprints"][name]
    assert updated["processors"] == [check_bits.processor()]


@pytest.mark.parametrize(
    ("text", "message"), [("{", "truncated"), ('{"processors": []}', "versions"), (None, "No such")]
)
def test_a_bad_file_is_named_in_one_line(tmp_path, text, message):
    path = tmp_path / "golden.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInput, match=f"golden.json: .*{message}") as caught:
        check_bits.main(check_bits.Args(golden=str(path)))
    assert "\n" not in str(caught.value)
