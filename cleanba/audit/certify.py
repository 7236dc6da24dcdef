"""Certify that layouts do not change results: train one configuration under many, and compare the bits.

    make certify
    python -m cleanba.audit.certify --algo impala --env-id Breakout-v5 --updates 20

Every layout is trained in fresh processes (trials.py). The chains of parameter fingerprints, the episodes,
the policy-lag records and the recorded actions are compared with those of the first layout
(comparison.py). The certificate is printed and written as JSON and Markdown (certificate.py). Exit code 0:
all layouts gave the same bits. 1: at least one did not; the certificate names the first update and the
first tensor that differ, and by how much.
"""

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cleanba.audit import certificate
from cleanba.audit.certificate import Certificate, Part, Row
from cleanba.audit.comparison import describe_tensors, fingerprints, first_difference
from cleanba.audit.matrix import (
    NUM_ENV_GROUPS,
    Configuration,
    Setting,
    choose_settings,
    configurations,
)
from cleanba.audit.trials import Program, Trial, run_trials
from cleanba.environments import check_env_id
from cleanba.record import RecordError
from cleanba.run.arguments import Count
from cleanba.run.command_line import BadInput, run_command_line
from cleanba.run.flags import flags

NUM_MINIBATCHES = 2
PARAMETERS = "['params']"  # begins the name of each parameter in a checkpoint
# Small enough that a run of 20 updates takes seconds.
SMALL_NATURE_CNN = {"network": "nature", "channels": (8, 16, 16), "hiddens": (64,)}


@dataclass(frozen=True)
class Args:
    """What to certify."""

    algo: tuple[Literal["ppo", "impala"], ...] = ("ppo", "impala")
    """Algorithms."""
    architecture: tuple[Literal["sync", "cleanba"], ...] = ("sync", "cleanba")
    """Architectures: synchronous, Cleanba."""
    env_id: tuple[str, ...] = ("CartPole-v1", "Breakout-v5")
    """EnvPool environments."""
    updates: Count = 20
    """Updates of each run; a fingerprint is taken after each."""
    num_envs: Count = 8
    """Environments, in 4 groups."""
    num_steps: Count = 16
    """Steps of each environment in a rollout."""
    seed: int = 1
    """Seed of the runs."""
    network: str | None = None
    """Network; by default an MLP for vectors, and a small Nature CNN for images."""
    reduction: Literal["groups", "psum"] = "groups"
    """How gradients are added. With psum the bits depend on the number of learner devices, so that the
    certificate fails."""
    platform: Literal["cpu", "gpu", "tpu"] = "cpu"
    """Kind of device. On an accelerator only the layouts that its devices allow are run."""
    quick: bool = False
    """Fewer layouts, and each algorithm in its usual architecture only."""
    layouts: tuple[str, ...] = ()
    """Names of the layouts to run, beside the first; by default all."""
    jobs: Count | None = None
    """Processes at a time; by default the number of cores."""
    name: str | None = None
    """Name of the certificate; by default derived from the other arguments."""
    out: str = "site/certificates"
    """Folder of the certificates."""
    trainers: str = str(Path(__file__).parents[1])
    """Folder of cleanba_ppo.py and cleanba_impala.py."""


def check(args: Args) -> None:
    """Check the arguments.

    Raises:
      BadInput: with one line.
    """
    for env_id in args.env_id:
        try:
            check_env_id(env_id)
        except ValueError as error:
            raise BadInput(str(error)) from None
    # each group contributes the same number of environments to each minibatch
    divisor = NUM_MINIBATCHES * NUM_ENV_GROUPS
    if args.num_envs % divisor:
        raise BadInput(f"--num-envs {args.num_envs}: must be a multiple of {divisor}")
    for algo in args.algo:
        if not (Path(args.trainers) / f"cleanba_{algo}.py").is_file():
            raise BadInput(f"--trainers {args.trainers}: no cleanba_{algo}.py there")


def default_name(args: Args) -> str:
    """Name a certificate after the arguments that differ from their defaults."""
    if args == Args(out=args.out, jobs=args.jobs):
        return "default"
    parts = ["quick"] if args.quick else []
    for field in ("algo", "architecture", "env_id"):
        if getattr(args, field) != getattr(Args(), field):
            parts += getattr(args, field)
    if args.reduction != "groups":
        parts.append(args.reduction)
    if args.platform != "cpu":
        parts.append(args.platform)
    return "-".join(parts).lower() or "custom"


def training_options(args: Args, configuration: Configuration) -> dict[str, Any]:
    """Return the trainer's options for a configuration, the same under every setting."""
    network: dict[str, Any] = {"network": args.network}
    if args.network is None and configuration.env_id.endswith("-v5"):
        network = SMALL_NATURE_CNN
    return {
        "env_id": configuration.env_id,
        "total_timesteps": args.updates * args.num_envs * args.num_steps,
        "num_envs": args.num_envs,
        "num_env_groups": NUM_ENV_GROUPS,
        "num_steps": args.num_steps,
        "num_minibatches": NUM_MINIBATCHES,
        "seed": args.seed,
        "reduction": args.reduction,
        "concurrency": configuration.architecture == "cleanba",
        **network,
        "platform": args.platform,
        "fingerprint_every": 1,
        "progress": False,
    }


def certify(args: Args, configuration: Configuration, settings: Sequence[Setting]) -> Part:
    """Train a configuration under all settings, and compare each run with that of the first setting.

    Returns:
      The configuration's part of the certificate.
    """
    program = Program(
        Path(args.trainers) / f"cleanba_{configuration.algo}.py",
        training_options(args, configuration),
    )
    jobs = args.jobs or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        trials = run_trials(program, settings, folder / "runs", jobs)
        rows = []
        for number, trial in enumerate(trials):
            verdict, same = judge(program, trials[0], trial, folder / f"repeated-{number}", jobs)
            chain = fingerprints(trial.run) if trial.run else []
            rows.append(
                Row(
                    layout=trial.setting.name,
                    updates=len(chain),
                    seconds=round(trial.seconds, 1),
                    fingerprint=chain[-1][1] if chain else None,
                    episodes=len(trial.run.episodes()) if trial.run else 0,
                    verdict=verdict,
                    same=same,
                )
            )
        info = trials[0].run.info if trials[0].run else None
    return Part(
        configuration=configuration.name,
        command=["python", f"cleanba/{program.script.name}", *flags(program.options)],
        hyperparameters=info.hyperparameters if info else {},
        versions=info.versions if info else {},
        device_kind=info.hardware.get("device_kind") if info else None,
        revision=info.revision if info else None,
        layouts=rows,
        same=all(row.same is not False for row in rows),
    )


def judge(
    program: Program, reference: Trial, trial: Trial, folder: Path, jobs: int
) -> tuple[str, bool | None]:
    """Compare a trial with the reference.

    Args:
      program: what was trained.
      reference: the trial of the first setting.
      trial: the trial to judge, which may be the reference.
      folder: where both are trained again to locate a difference in the parameters.
      jobs: processes at a time.

    Returns:
      The verdict in words, and whether the bits are the same; None where the setting is another
      configuration.
    """
    if trial.error:
        return f"failed: {trial.error}", False
    if reference.error:
        return "nothing to compare with", False
    if trial is reference:
        return "reference", True
    difference = first_difference(reference.run, trial.run)
    if pool := trial.setting.xla_cpu_pool_size:
        found = "other bits" if difference else "the same bits here"
        return f"another configuration (XLA pool of {pool}): {found}", None
    if difference is None:
        return "same bits", True
    if difference.update is None:
        return difference.text, False
    settings = (reference.setting, trial.setting)
    return locate(program, settings, difference.update, folder, jobs), False


def locate(
    program: Program, settings: Sequence[Setting], update: int, folder: Path, jobs: int
) -> str:
    """Train under two settings again, up to an update after which their parameters differ.

    Returns:
      A sentence with the update, the first tensor that differs, and by how much.
    """
    from cleanba.record import checkpoints

    unlocated = f"parameters differ from update {update} on"
    saving = program.options | {"checkpoint_every": update, "keep_checkpoints": 0}
    trials = run_trials(program._replace(options=saving), settings, folder, jobs)
    if any(trial.run is None for trial in trials):
        return unlocated
    saved = [trial.run.path / "checkpoints" / f"{update:08d}" for trial in trials]
    try:
        found = describe_tensors(
            *(_parameters(checkpoints.load(checkpoints.read(path))) for path in saved)
        )
    except RecordError as error:
        return f"{unlocated}; not located: {error}"
    if not found:
        return f"parameters differed from update {update} on, but not in a repetition: nondeterministic"
    return f"different from update {update} on: {found}"


def _parameters(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the parameters of a checkpoint by name, such as `['Dense_0']['bias']`."""
    return {
        name.removeprefix(PARAMETERS): array
        for name, array in arrays.items()
        if name.startswith(PARAMETERS)
    }


def main(args: Args) -> None:
    """Certify all configurations, print the verdicts, and write the certificate."""
    check(args)
    todo = configurations(args.algo, args.architecture, args.env_id, args.quick)
    settings = choose_settings(args.layouts, args.quick, args.platform, args.reduction)
    try:
        Path(args.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {args.out}: {error.strerror}") from None
    start = time.perf_counter()
    parts = []
    print(f"{len(todo)} configurations x {len(settings)} layouts")
    for configuration in todo:
        print(f"\n{configuration.name}", flush=True)
        part = certify(args, configuration, settings)
        parts.append(part)
        for row in part.layouts:
            print(
                f"  {row.layout:<22} {row.updates:>4} updates {row.seconds:>6.1f} s  "
                f"{(row.fingerprint or '-')[:16]:<16}  {row.verdict}"
            )
    made = Certificate(
        name=args.name or default_name(args),
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - start, 1),
        cores=len(os.sched_getaffinity(0)),
        platform=args.platform,
        arguments={k: v for k, v in asdict(args).items() if k not in ("out", "trainers", "jobs")},
        configurations=parts,
        same=all(part.same for part in parts),
    )
    certificate.write(made, Path(args.out))
    print(f"\nwritten: {Path(args.out) / made.name}.md and .json ({made.seconds:,.0f} s)")
    if not made.same:
        different = sum(row.same is False for row in made.rows)
        print(f"{different} runs did NOT give the bits of their reference")
        raise SystemExit(1)
    print("every layout gave the same bits")


if __name__ == "__main__":
    run_command_line(Args, main, "Certify that layouts do not change results.")
