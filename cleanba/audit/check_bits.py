"""Check that this machine computes the bits that other machines computed.

    make check-bits
    python -m cleanba.audit.check_bits

Trains the configurations of golden.json as `certify --processors` does, with portable arithmetic, and
compares the fingerprints of the parameters after every update. Exit code 0: they are the same. 1: they are
not, and what to report is printed.
"""

import os
import platform
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from cleanba.audit import certify
from cleanba.audit.comparison import fingerprints
from cleanba.audit.matrix import PROCESSORS, Configuration
from cleanba.audit.trials import Program, Trial, run_trial
from cleanba.exact.placement import cpu_info, cpu_model
from cleanba.record import replace_file
from cleanba.run.arguments import Count
from cleanba.run.command_line import BadInput, run_command_line

GOLDEN = Path(__file__).with_name("golden.json")


class Golden(Struct, forbid_unknown_fields=True):
    """The bits that other machines computed."""

    processors: list[str]
    """Processors that computed the fingerprints without emulation."""
    versions: dict[str, str]
    """Versions of the packages that computed them."""
    fingerprints: dict[str, list[str]]
    """Fingerprints of the parameters after every update, by the name of a configuration
    (`matrix.Configuration`)."""


@dataclass(frozen=True)
class Args:
    """What to compare with."""

    golden: str = str(GOLDEN)
    """File of the expected fingerprints."""
    update: bool = False
    """Write this machine's fingerprints and versions into the file, or, if the fingerprints are the same,
    add its processor."""
    jobs: Count | None = None
    """Runs at a time; by default the number of cores."""


def read_golden(path: Path) -> Golden:
    """Read the expected fingerprints.

    Raises:
      BadInput: with one line.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Golden)
    except OSError as error:
        raise BadInput(f"--golden {path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise BadInput(f"--golden {path}: {error}") from None


def train(name: str, folder: Path) -> Trial:
    """Train the configuration of the given name, such as `ppo sync Breakout-v5 nature`."""
    configuration = Configuration(*name.split())
    script = Path(certify.__file__).parents[1] / f"cleanba_{configuration.algo}.py"
    options = certify.training_options(certify.Args(processors=True), configuration)
    return run_trial(Program(script, options), PROCESSORS[0], folder / name.replace(" ", "-"))


def chain(trial: Trial) -> list[str]:
    """Return the fingerprints of a trial, one for each update."""
    return [fingerprint for _, fingerprint in fingerprints(trial.run)]


def verdict(trial: Trial, expected: list[str]) -> str:
    """Return "same bits", or what is wrong."""
    if trial.error:
        return f"failed: {trial.error}"
    found = chain(trial)
    for update, (here, there) in enumerate(zip(found, expected, strict=False), start=1):
        if here != there:
            return f"different from update {update} on: {here[:16]} here, {there[:16]} expected"
    if len(found) != len(expected):
        return f"{len(found)} updates here, {len(expected)} expected"
    return "same bits"


def processor() -> str:
    """Return the processor's name, family and model; virtual machines often give the first in part."""
    numbers = [f"{name} {cpu_info(name)}" for name in ("cpu family", "model") if cpu_info(name)]
    return f"{cpu_model()} ({', '.join([platform.machine(), *numbers])})"


def report(versions: dict[str, str], golden: Golden) -> list[str]:
    """Return the lines to print, and to report, if this machine computes different bits."""
    others = {
        name: f"{versions.get(name, 'none')} here, {version} expected"
        for name, version in golden.versions.items()
        if versions.get(name) != version
    }
    lines = [
        "This machine computes other bits. Please report all of the above, and:",
        f"  processor: {processor()}; expected from: {', '.join(golden.processors)}",
        f"  system: {platform.platform()}",
        f"  packages: {', '.join(f'{k} {v}' for k, v in versions.items())}",
    ]
    if others:
        lines += [f"  other versions: {', '.join(f'{k} {v}' for k, v in others.items())}"]
        lines += ["Other versions may compute other bits. `make setup` installs the tested ones."]
    return lines


def main(args: Args) -> None:
    """Train, compare, and print the outcome."""
    path = Path(args.golden)
    golden = read_golden(path)
    names = list(golden.fingerprints)
    jobs = args.jobs or len(os.sched_getaffinity(0))
    found: dict[str, list[str]] = {}
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        trials = pool.map(lambda name: train(name, Path(folder)), names)
        for name, trial in zip(names, trials, strict=True):
            outcome = verdict(trial, golden.fingerprints[name])
            print(f"{name:<32} {trial.seconds:>6.1f} s  {outcome}", flush=True)
            if not trial.error:
                found[name] = chain(trial)
                versions = trial.run.info.versions
    if len(found) < len(names):
        print(f"{len(names) - len(found)} runs failed")
        raise SystemExit(1)
    versions = {k: v for k, v in versions.items() if k not in ("python", "cleanba")}
    same = found == golden.fingerprints
    if args.update:
        known = golden.processors if same else []
        processors = list(dict.fromkeys([*known, processor()]))
        updated = msgspec.json.encode(Golden(processors, versions, found))
        replace_file(path, msgspec.json.format(updated, indent=1).decode() + "\n")
        print(f"written: {path}")
    elif same:
        print(f"same bits as on {', '.join(golden.processors)}")
    else:
        print("\n".join(report(versions, golden)))
        raise SystemExit(1)


if __name__ == "__main__":
    run_command_line(Args, main, "Check that this machine computes the bits of golden.json.")
