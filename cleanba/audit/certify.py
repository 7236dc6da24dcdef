"""Certify that layouts or processors do not change results: train under many, and compare the bits.

    make certify
    python -m cleanba.audit.certify --algo impala --env-id Breakout-v5 --updates 20
    python -m cleanba.audit.certify --processors

A configuration is trained under each setting in fresh processes (trials.py). The chains of parameter
fingerprints, the episodes, the policy-lag records and the recorded actions are compared with those of the
first setting (comparison.py). The certificate is printed and written as JSON and Markdown (certificate.py).
It is saved after each configuration, and --resume continues an interrupted one.
Exit code 0: all settings gave the same bits. 1: at least one did not; the certificate names the first update
and the first tensor that differ, and by how much.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cleanba.audit import certificate
from cleanba.audit.certificate import Certificate, Part, Row
from cleanba.audit.comparison import describe_tensors, fingerprints, first_difference
from cleanba.audit.matrix import (
    FULL,
    NUM_ENV_GROUPS,
    PROCESSORS,
    QUICK,
    QUICK_PROCESSORS,
    Configuration,
    Setting,
    choose_settings,
    configurations,
)
from cleanba.audit.trials import Program, Trial, run_trials
from cleanba.environments import check_env_id, is_atari
from cleanba.exact.placement import cpu_model
from cleanba.record import RecordError, now_utc, replace_file, source_revision
from cleanba.run.arguments import Count
from cleanba.run.command_line import BadInput, run_command_line
from cleanba.run.flags import flags
from cleanba.run.log import versions
from cleanba.run.options import check_name

NUM_MINIBATCHES = 2
PARAMETERS = "['params']"  # begins the name of each parameter in a checkpoint
# Small enough that a run of 20 updates takes seconds.
SMALL_NATURE_CNN = {"channels": (8, 16, 16), "hiddens": (64,)}
# An emulated processor trains a network of the paper for two updates in minutes.
EMULATED_STEPS, EMULATED_UPDATES = 2, 2


@dataclass(frozen=True)
class Args:
    """What to certify."""

    algo: tuple[Literal["ppo", "impala"], ...] = ("ppo", "impala")
    """Algorithms."""
    architecture: tuple[Literal["sync", "cleanba"], ...] = ("sync", "cleanba")
    """Architectures: synchronous, Cleanba."""
    env_id: tuple[str, ...] = ("CartPole-v1", "Breakout-v5")
    """EnvPool environments."""
    updates: Count | None = None
    """Updates of each run, each with a fingerprint. 20 by default, 2 of images with --processors."""
    num_envs: Count = 8
    """Environments, in 4 groups."""
    num_steps: Count | None = None
    """Steps of each environment in a rollout. 16 by default, 2 of images with --processors."""
    seed: int = 1
    """Seed of the runs."""
    network: tuple[Literal["mlp", "nature", "resnet"], ...] = ()
    """Networks. By default an MLP for vectors, and for images a small Nature CNN; with --processors, the
    networks of the paper."""
    reduction: Literal["groups", "psum"] = "groups"
    """How gradients are added. With psum the bits depend on the number of learner devices, so that the
    certificate fails."""
    platform: Literal["cpu", "gpu", "tpu"] = "cpu"
    """Kind of device. On an accelerator only the layouts that its devices allow are run."""
    processors: bool = False
    """Compare processors instead of layouts: this one, and those that qemu-x86_64 emulates."""
    portable: bool = True
    """Train with portable arithmetic. Without it processors differ, so that the certificate fails."""
    quick: bool = False
    """Fewer layouts or processors, and each algorithm in its usual architecture only."""
    layouts: tuple[str, ...] = ()
    """Names of the layouts (or processors) to run, beside the first; by default all."""
    jobs: Count | None = None
    """Processes at a time; by default the number of cores."""
    name: str | None = None
    """Name of the certificate; by default derived from the other arguments."""
    resume: bool = False
    """Continue an interrupted certificate of the same arguments and revision: the configurations that it
    completed are not trained again."""
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
            check_name("--name", args.name or default_name(args))
        except ValueError as error:
            raise BadInput(str(error)) from None
    # each group contributes the same number of environments to each minibatch
    divisor = NUM_MINIBATCHES * NUM_ENV_GROUPS
    if args.num_envs % divisor:
        raise BadInput(f"--num-envs {args.num_envs}: must be a multiple of {divisor}")
    for algo in args.algo:
        if not (Path(args.trainers) / f"cleanba_{algo}.py").is_file():
            raise BadInput(f"--trainers {args.trainers}: no cleanba_{algo}.py there")
    if args.processors and args.platform != "cpu":
        raise BadInput(f"--processors: on a CPU, not on --platform {args.platform}")
    if args.processors and (os.uname().machine != "x86_64" or not shutil.which("qemu-x86_64")):
        raise BadInput(
            "--processors: needs an x86-64 machine with qemu-x86_64 (Debian: apt install qemu-user)"
        )


def default_name(args: Args) -> str:
    """Name a certificate after the arguments that differ from their defaults."""
    if args == Args(out=args.out, jobs=args.jobs, resume=args.resume):
        return "default"
    parts = ["processors"] if args.processors else []
    parts += ["quick"] if args.quick else []
    parts += [] if args.portable else ["no-portable"]
    for field in ("algo", "architecture", "env_id", "network", "layouts"):
        if getattr(args, field) != getattr(Args(), field):
            parts += getattr(args, field)
    for field in ("updates", "num_envs", "num_steps", "seed"):
        if getattr(args, field) != getattr(Args(), field):
            parts.append(f"{field.replace('_', '-')}-{getattr(args, field)}")
    if args.trainers != Args().trainers:
        parts.append("other-trainers")
    if args.reduction != "groups":
        parts.append(args.reduction)
    if args.platform != "cpu":
        parts.append(args.platform)
    return "-".join(parts).lower()


def tasks(args: Args) -> list[tuple[str, str]]:
    """Return the pairs of environment and network to certify.

    Raises:
      BadInput: if no network fits.
    """
    images = ("nature", "resnet") if args.processors else ("nature",)
    fitting = []
    for env_id in args.env_id:
        fit = images if is_atari(env_id) else ("mlp",)
        chosen = args.network or fit
        fitting += [(env_id, name) for name in chosen if (name == "mlp") != is_atari(env_id)]
    if not fitting:
        raise BadInput(f"--network {' '.join(args.network)}: does not fit {' '.join(args.env_id)}")
    return fitting


def training_options(args: Args, configuration: Configuration) -> dict[str, Any]:
    """Return the trainer's options for a configuration, the same under every setting."""
    images = configuration.network != "mlp"
    emulated = args.processors and images
    small = images and not args.network and not args.processors
    updates = args.updates or (EMULATED_UPDATES if emulated else 20)
    num_steps = args.num_steps or (EMULATED_STEPS if emulated else 16)
    return {
        "env_id": configuration.env_id,
        "total_timesteps": updates * args.num_envs * num_steps,
        "num_envs": args.num_envs,
        "num_env_groups": NUM_ENV_GROUPS,
        "num_steps": num_steps,
        "num_minibatches": NUM_MINIBATCHES,
        "seed": args.seed,
        "reduction": args.reduction,
        "portable": args.portable,
        "concurrency": configuration.architecture == "cleanba",
        "network": configuration.network,
        **(SMALL_NATURE_CNN if small else {}),
        "platform": args.platform,
        "compilation_cache": False,  # each program is compiled by the processor that runs it
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
        same=all(row.same for row in rows),
    )


def judge(
    program: Program, reference: Trial, trial: Trial, folder: Path, jobs: int
) -> tuple[str, bool]:
    """Compare a trial with the reference.

    Args:
      program: what was trained.
      reference: the trial of the first setting.
      trial: the trial to judge, which may be the reference.
      folder: where both are trained again to locate a difference in the parameters.
      jobs: processes at a time.

    Returns:
      The verdict in words, and whether the bits are the same.
    """
    if trial.error:
        return f"failed: {trial.error}", False
    if reference.error:
        return "nothing to compare with", False
    if trial is reference:
        return "reference", True
    difference = first_difference(reference.run, trial.run)
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
    saving = program.options | {"checkpoint_every": update, "keep_checkpoints": "all"}
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


def recorded_arguments(args: Args) -> dict[str, Any]:
    """Return the arguments that decide a certificate's content, as JSON has them."""
    recorded = asdict(args)
    for name in ("resume", "out", "trainers", "jobs"):
        del recorded[name]
    return {k: list(v) if isinstance(v, tuple) else v for k, v in recorded.items()}


def summarize(args: Args, name: str, parts: list[Part], seconds: float) -> Certificate:
    """Return the certificate of some parts, made in so many seconds."""
    return Certificate(
        name=name,
        made=now_utc(),
        seconds=round(seconds, 1),
        cores=len(os.sched_getaffinity(0)),
        platform=args.platform,
        arguments=recorded_arguments(args),
        configurations=parts,
        same=all(part.same for part in parts),
    )


def completed_parts(args: Args, path: Path) -> tuple[list[Part], float]:
    """Return the parts of an interrupted certificate, and the seconds that they took.

    Args:
      args: the arguments of this certificate.
      path: the interrupted certificate; without such a file there are no parts.

    Raises:
      BadInput: if there is one and `--resume` is not given, or if its arguments, revision or machine are not
        the current ones.
    """
    if not path.exists():
        return [], 0.0
    if not args.resume:
        raise BadInput(
            f"{path}: an interrupted certificate; continue it with --resume, or delete it"
        )
    try:
        found = certificate.read(path)
    except (OSError, ValueError) as error:
        raise BadInput(f"--resume: {path}: {error}") from None
    if found.arguments != recorded_arguments(args) or not found.configurations:
        raise BadInput(f"--resume: {path} has other arguments: {found.arguments}")
    revision = source_revision(Path(args.trainers))
    made_from = found.configurations[0].revision or ""
    if made_from != revision or not revision or revision.endswith("+changes"):
        raise BadInput(
            f"--resume: {path} is of revision {made_from or 'unknown'}, the source of "
            f"{revision or 'unknown'}; both must be the same commit without changes"
        )
    check_same_machine(found.configurations, args.platform)
    return found.configurations, found.seconds


def check_same_machine(parts: Sequence[Part], platform: str) -> None:
    """Refuse to continue on another machine than the one that completed some parts.

    Args:
      parts: that were completed.
      platform: kind of device.

    Raises:
      BadInput: if the processor or a version of a package is another one.
    """
    own = versions(())
    for part in parts:
        packages = [name for name in part.versions if name not in own]
        if part.versions and part.versions != versions(packages):
            raise BadInput("--resume: the completed configurations used other versions of packages")
        if part.device_kind not in (None, cpu_model()) and platform == "cpu":
            raise BadInput(
                f"--resume: the completed configurations ran on another processor, {part.device_kind}"
            )


def main(args: Args) -> None:
    """Certify all configurations, print the verdicts, and write the certificate."""
    check(args)
    todo = configurations(args.algo, args.architecture, tasks(args), args.quick)
    if args.processors:
        candidates = QUICK_PROCESSORS if args.quick else PROCESSORS
    else:
        candidates = QUICK if args.quick else FULL
    settings = choose_settings(
        candidates, args.layouts, args.platform, args.reduction, args.portable
    )
    if args.platform != "cpu":
        # The trials of a batch share the device; otherwise JAX reserves 75% of its memory for the first one.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    name = args.name or default_name(args)
    partial = Path(args.out) / f"{name}.partial.json"
    parts, seconds_before = completed_parts(args, partial)
    try:
        Path(args.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {args.out}: {error.strerror}") from None
    start = time.perf_counter() - seconds_before
    what = "processor" if args.processors else "layout"
    print(f"{len(todo)} configurations x {len(settings)} {what}s")
    for number, configuration in enumerate(todo):
        print(f"\n{configuration.name}", flush=True)
        if number == len(parts):
            parts.append(certify(args, configuration, settings))
            so_far = summarize(args, name, parts, time.perf_counter() - start)
            replace_file(partial, certificate.as_json(so_far))
        for row in parts[number].layouts:
            print(
                f"  {row.layout:<22} {row.updates:>4} updates {row.seconds:>6.1f} s  "
                f"{(row.fingerprint or '-')[:16]:<16}  {row.verdict}"
            )
    made = summarize(args, name, parts, time.perf_counter() - start)
    certificate.write(made, Path(args.out))
    partial.unlink()
    print(f"\nwritten: {Path(args.out) / made.name}.md and .json ({made.seconds:,.0f} s)")
    if not made.same:
        different = sum(not row.same for row in made.rows)
        print(f"{different} runs did NOT give the bits of their reference")
        raise SystemExit(1)
    print(f"every {what} gave the same bits")


if __name__ == "__main__":
    run_command_line(Args, main, "Certify that layouts do not change results.")
