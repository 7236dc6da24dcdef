"""Certify that layouts do not change results: train one configuration under many, and compare the bits.

    make certify
    python -m cleanba.certify --algo impala --env-id Breakout-v5 --updates 20

Every layout is trained in fresh processes. Compared are the chains of parameter fingerprints, the
episodes, the policy-lag records and the recorded actions. A table is printed and written, with what
was pinned, as JSON and Markdown. Exit code 0: every layout gave the same. 1: one did not, and the first
update and the first tensor that differ are named, and by how much.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from cleanba import local_processes
from cleanba.command_line import BadInput, run_command_line
from cleanba.environments import check_env_id
from cleanba.record import ACTIONS_FILE, Run, find_runs, read_run, replace_file

SECONDS_PER_RUN = 900  # after which a run is taken to hang


class Layout(NamedTuple):
    """One hardware setting."""

    threads: int = 1  # actor threads for each actor device
    actors: tuple[int, ...] = (0,)  # device ids
    learners: tuple[int, ...] = (0,)
    processes: int = 1
    cores: int | None = None  # None: all of this machine's
    envpool_threads: int | None = None  # None: the trainer's choice
    xla_cpu_pool_size: int | None = None  # not the trainer's: another configuration, not a layout

    @property
    def name(self) -> str:
        """Name it as the Cleanba README does, with what else is set."""
        ids = [",".join(map(str, ids)) for ids in (self.actors, self.learners)]
        name = f"a{ids[0]}-l{ids[1]}-d{self.processes}-t{self.threads}"
        for value, letter in (
            (self.cores, "c"), (self.envpool_threads, "e"), (self.xla_cpu_pool_size, "pool")
        ):  # fmt: skip
            name += f"-{letter}{value}" if value else ""
        return name

    def arguments(self) -> list[str]:
        """Return the flags of a trainer."""
        flags = {
            "--num-actor-threads": [self.threads],
            "--actor-device-ids": self.actors,
            "--learner-device-ids": self.learners,
            "--envpool-threads": [self.envpool_threads] if self.envpool_threads else [],
            "--xla-cpu-pool-size": [self.xla_cpu_pool_size] if self.xla_cpu_pool_size else [],
        }
        flags = {flag: values for flag, values in flags.items() if values}
        distributed = ["--distributed"] if self.processes > 1 else []
        return distributed + [str(x) for flag, values in flags.items() for x in (flag, *values)]

    @property
    def highest_device(self) -> int:
        """Largest device id of a process."""
        return max(*self.actors, *self.learners)


# For configurations of 4 environment groups. The first is the one that the others are compared with.
QUICK = (
    Layout(),
    Layout(threads=4, learners=(0, 1, 2, 3)),
    Layout(cores=1, envpool_threads=1),
    Layout(processes=2),
)
FULL = (
    Layout(),
    Layout(threads=2),
    Layout(threads=3, learners=(0, 1)),
    Layout(threads=4, learners=(0, 1, 2)),
    Layout(threads=4, learners=(0, 1, 2, 3)),
    Layout(learners=(1,)),
    Layout(threads=2, learners=(1, 2)),
    Layout(learners=(1, 2, 3)),
    Layout(threads=2, actors=(0, 1), learners=(2, 3)),
    Layout(cores=1),
    Layout(cores=1, threads=2, learners=(0, 1)),
    Layout(envpool_threads=1),
    Layout(envpool_threads=2, threads=2),
    Layout(processes=2),
    Layout(processes=2, threads=2, learners=(0, 1)),
    Layout(xla_cpu_pool_size=2),
)
GROUPS = 4


class Configuration(NamedTuple):
    """What is trained, the same on every layout."""

    algo: str
    architecture: str
    env_id: str

    @property
    def name(self) -> str:
        """Name it for people."""
        return f"{self.algo} {self.architecture} {self.env_id}"


@dataclass(frozen=True)
class Args:
    """What to certify."""

    algo: tuple[Literal["ppo", "impala"], ...] = ("ppo", "impala")
    """Algorithms."""
    architecture: tuple[Literal["sync", "cleanba"], ...] = ("sync", "cleanba")
    """Architectures: synchronous, Cleanba."""
    env_id: tuple[str, ...] = ("CartPole-v1", "Breakout-v5")
    """EnvPool environments."""
    updates: int = 20
    """Updates of each run; a fingerprint is taken after each."""
    num_envs: int = 8
    """Environments, in 4 groups."""
    num_steps: int = 16
    """Steps of each environment in a rollout."""
    seed: int = 1
    """Seed of the runs."""
    network: str | None = None
    """Network; by default an MLP for vectors, and a small Nature CNN for images."""
    reduction: Literal["groups", "psum"] = "groups"
    """How gradients are added. psum differs between numbers of devices, which this shows."""
    platform: Literal["cpu", "gpu", "tpu"] = "cpu"
    """Kind of device. On an accelerator only the layouts that its devices allow are run."""
    quick: bool = False
    """Fewer layouts, and each algorithm in its own architecture only."""
    layouts: tuple[str, ...] = ()
    """Names of the layouts to run, beside the first; by default all."""
    jobs: int | None = None
    """Runs at a time; by default the cores."""
    name: str | None = None
    """Name of the certificate; by default from what was certified."""
    out: str = "reports/certificates"
    """Folder of the certificates."""
    trainers: str = str(Path(__file__).parent)
    """Folder of cleanba_ppo.py and cleanba_impala.py."""


class Result(NamedTuple):
    """What came of one layout."""

    layout: Layout
    seconds: float
    run: Run | None
    error: str | None


def configurations(args: Args) -> list[Configuration]:
    """Return what is to be trained."""
    all_of_them = itertools.product(args.algo, args.architecture, args.env_id)
    own = {"ppo": "sync", "impala": "cleanba"}
    return [Configuration(*one) for one in all_of_them if not args.quick or own[one[0]] == one[1]]


def chosen_layouts(args: Args) -> list[Layout]:
    """Return the layouts to run, the first of them the reference.

    Raises:
      BadInput: if there is none of a name.
    """
    layouts = list(QUICK if args.quick else FULL)
    if args.platform != "cpu":
        layouts = [x for x in layouts if not x.xla_cpu_pool_size and x.processes == 1]
        count = _count_devices(args.platform)
        layouts = [x for x in layouts if x.highest_device < count]
    if args.reduction == "psum":
        layouts = [x for x in layouts if GROUPS % (len(x.learners) * x.processes) == 0]
    known = {layout.name: layout for layout in layouts}
    for name in args.layouts:
        if name not in known:
            raise BadInput(f"--layouts {name}: choose from {', '.join(known)}")
    return [x for x in layouts if not args.layouts or x is layouts[0] or x.name in args.layouts]


def _count_devices(platform: str) -> int:
    code = f"import jax; print(jax.local_device_count({platform!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise BadInput(f"--platform {platform}: {done.stderr.strip().splitlines()[-1]}")
    return int(done.stdout)


def trainer_command(args: Args, configuration: Configuration, folder: Path) -> list[str]:
    """Return the command of a configuration, but for the layout."""
    script = Path(args.trainers) / f"cleanba_{configuration.algo}.py"
    batch = args.num_envs * args.num_steps
    network = ["--network", args.network] if args.network else []
    if not network and configuration.env_id.endswith("-v5"):
        network = ["--network", "nature", "--channels", "8", "16", "16", "--hiddens", "64"]
    return [
        sys.executable, str(script), "--env-id", configuration.env_id,
        "--total-timesteps", str(args.updates * batch), "--num-envs", str(args.num_envs),
        "--num-env-groups", str(GROUPS), "--num-steps", str(args.num_steps),
        "--num-minibatches", "2", "--seed", str(args.seed), "--reduction", args.reduction,
        "--concurrency" if configuration.architecture == "cleanba" else "--no-concurrency",
        *network, "--platform", args.platform, "--fingerprint-every", "1", "--no-progress",
        "--runs-dir", str(folder), "--study", "certify",
    ]  # fmt: skip


def train(command: Sequence[str], layout: Layout) -> tuple[float, str | None]:
    """Run a trainer on a layout, in as many processes as it says.

    Returns:
      Seconds, and what went wrong, if anything did.
    """
    start = time.perf_counter()
    cores = sorted(os.sched_getaffinity(0))[: layout.cores]
    processes = local_processes.start(
        [*command, *layout.arguments(), "--setting", layout.name],
        layout.processes,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    for process in processes:
        os.sched_setaffinity(process.pid, cores)  # before it has a second thread
    timer = threading.Timer(SECONDS_PER_RUN, lambda: [p.kill() for p in processes])
    timer.start()
    errors = [process.communicate()[1] for process in processes]
    timer.cancel()
    failed = [
        f"exit code {p.returncode}: {(e.strip().splitlines() or ['no message'])[-1]}"
        for p, e in zip(processes, errors, strict=True)
        if p.returncode
    ]
    return time.perf_counter() - start, failed[0] if failed else None


def train_all(command: Sequence[str], layouts: Sequence[Layout], folder: Path) -> list[Result]:
    """Train on several layouts, each in its own run, and read the records."""

    def one(layout: Layout) -> Result:
        seconds, error = train(command, layout)
        found = [p for p in find_runs(folder) if f"__{layout.name}__" in p.name]
        if error or not found:
            return Result(layout, seconds, None, error or "no record was written")
        run = read_run(found[0])
        return Result(layout, seconds, run, None if run.completed else run.problems[0])

    with ThreadPoolExecutor(len(layouts)) as pool:
        return list(pool.map(one, layouts))


def evidence(run: Run) -> dict[str, list[Any]]:
    """Return all of a record that must not depend on the layout, in order."""
    actions = run.path / ACTIONS_FILE
    drop = {"wall_time", "actor"}
    return {
        "parameters": [(row["version"] - 1, row["fingerprint"]) for row in run.lines("updates")],
        "episodes": [
            {k: v for k, v in row.items() if k not in drop} for row in run.lines("episodes")
        ],
        "policy lag": [
            {k: v for k, v in row.items() if k not in drop} for row in run.lines("rollouts")
        ],
        "actions": [actions.read_bytes()],
    }


class Difference(NamedTuple):
    """The first thing in which two records differ."""

    what: str
    update: int | None  # of parameters
    text: str


def compare(reference: Run, other: Run) -> Difference | None:
    """Return the first difference of two records, or None."""
    ours, theirs = evidence(reference), evidence(other)
    for what in ours:
        for a, b in itertools.zip_longest(ours[what], theirs[what]):
            if a == b:
                continue
            if what == "parameters":
                update = (a or b)[0]
                return Difference(what, update, f"parameters differ from update {update} on")
            text = "" if what == "actions" else f": {a} and {b}"
            return Difference(what, None, f"{what} differ{text}")
    return None


def explain(
    command: Sequence[str], layouts: tuple[Layout, Layout], update: int, folder: Path
) -> str:
    """Train two layouts again up to an update where their parameters differ, and say by how much."""
    from cleanba import checkpoints

    saving = [*command, "--checkpoint-every", str(update), "--keep-checkpoints", "0"]
    saving[saving.index("--runs-dir") + 1] = str(folder)
    results = train_all(saving, layouts, folder)
    if any(result.run is None for result in results):
        return f"parameters differ from update {update} on"
    trees = []
    for result in results:
        at = result.run.path / "checkpoints" / f"{update:08d}"
        trees.append(checkpoints.named_arrays(checkpoints.read(at), "params"))
    names = [name for name in trees[0] if not np.array_equal(trees[0][name], trees[1][name])]
    if not names:
        return f"parameters differed at update {update}, and not when trained again: not repeatable"
    first = names[0]
    a, b = trees[0][first].astype(np.float64), trees[1][first].astype(np.float64)
    largest = np.abs(a - b).max()
    return (
        f"different from update {update} on: {first} first ({len(names)} of {len(trees[0])} tensors "
        f"do), by up to {largest:.2g} where values are up to {np.abs(a).max():.2g}"
    )


def certify(args: Args, configuration: Configuration, layouts: Sequence[Layout]) -> dict[str, Any]:
    """Train a configuration on all layouts, and compare them with the first.

    Returns:
      The part of the certificate about this configuration.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "runs"
        command = trainer_command(args, configuration, folder)
        jobs = args.jobs or len(os.sched_getaffinity(0))
        results: list[Result] = []
        # the layout of two processes takes two jobs
        waves: list[list[Layout]] = [[]]
        for layout in sorted(layouts, key=lambda x: x.processes):
            if waves[-1] and sum(x.processes for x in [*waves[-1], layout]) > jobs:
                waves.append([])
            waves[-1].append(layout)
        for wave in waves:
            results += train_all(command, wave, folder)
        results.sort(key=lambda result: layouts.index(result.layout))
        rows = []
        for number, result in enumerate(results):
            verdict, same = judge(command, results[0], result, Path(temporary) / f"again-{number}")
            chain = evidence(result.run)["parameters"] if result.run else []
            rows.append(
                {
                    "layout": result.layout.name,
                    "updates": len(chain),
                    "seconds": round(result.seconds, 1),
                    "fingerprint": chain[-1][1] if chain else None,
                    "episodes": len(result.run.lines("episodes")) if result.run else 0,
                    "verdict": verdict,
                    "same": same,
                }
            )
        pinned = results[0].run.info if results[0].run else {}
    return {
        "configuration": configuration.name,
        "command": ["python", f"cleanba/{Path(command[1]).name}", *command[2:-4]],
        "hyperparameters": pinned.get("hyperparameters", {}),
        "versions": pinned.get("versions", {}),
        "device_kind": pinned.get("hardware", {}).get("device_kind"),
        "revision": pinned.get("revision"),
        "layouts": rows,
        "same": all(row["same"] is not False for row in rows),
    }


def judge(
    command: Sequence[str], reference: Result, result: Result, folder: Path
) -> tuple[str, bool | None]:
    """Return a verdict in words, and whether the layout gave the same; None where it is no layout."""
    if result.error:
        return f"failed: {result.error}", False
    if reference.run is None:
        return "nothing to compare with", False
    if result is reference:
        return "reference", True
    difference = compare(reference.run, result.run)
    pool = result.layout.xla_cpu_pool_size
    if pool:
        found = "other bits" if difference else "the same bits here"
        return f"another configuration (XLA pool of {pool}): {found}", None
    if difference is None:
        return "same bits", True
    if difference.update is None:
        return difference.text, False
    layouts = (reference.layout, result.layout)
    return explain(command, layouts, difference.update, folder), False


def default_name(args: Args) -> str:
    """Name a certificate by what was certified."""
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


def as_markdown(certificate: dict[str, Any]) -> str:
    """Return a certificate as a page."""
    rows = [row for part in certificate["configurations"] for row in part["layouts"]]
    counted = [row for row in rows if row["same"] is not None]
    same = sum(row["same"] for row in counted)
    first = certificate["configurations"][0]
    versions = ", ".join(f"{k} {v}" for k, v in first["versions"].items())
    pool = first["hyperparameters"].get("xla_cpu_pool_size")
    pool = f"XLA's CPU pool of {pool} threads; " if certificate["platform"] == "cpu" else ""
    text = [
        "<!-- made by python -m cleanba.certify -->",
        f"# Certificate: {certificate['name']}",
        "",
        f"**{same} of {len(counted)} runs gave the bits of their reference** "
        "(fingerprints of the parameters after every update, episodes, policy-lag records, actions).",
        "",
        f"Made {certificate['made']} in {certificate['seconds']:,.0f} s on {certificate['cores']} "
        f"cores ({first['device_kind']}), from revision {first['revision'] or 'unknown'}. Pinned: "
        f"{pool}one BLAS thread for initialisation; {versions}.",
        "",
        "A layout is named a(actor devices)-l(learner devices)-d(processes)-t(actor threads per actor "
        "device), with -c(cores), -e(EnvPool threads) and -pool(XLA's pool) where they are not the "
        "default. Each is a fresh process, or two.",
    ]
    for part in certificate["configurations"]:
        text += ["", f"## {part['configuration']}", "", f"`{' '.join(part['command'])}`", ""]
        text += [
            "| layout | updates | episodes | seconds | final fingerprint | verdict |",
            "| --- | ---: | ---: | ---: | --- | --- |",
        ]
        for row in part["layouts"]:
            fingerprint = f"`{row['fingerprint'][:16]}`" if row["fingerprint"] else "–"
            text.append(
                f"| {row['layout']} | {row['updates']} | {row['episodes']} | {row['seconds']} | "
                f"{fingerprint} | {row['verdict']} |"
            )
    return "\n".join(text) + "\n"


def check(args: Args) -> None:
    """Refuse what cannot be certified.

    Raises:
      BadInput: with one line.
    """
    for env_id in args.env_id:
        try:
            check_env_id(env_id)
        except ValueError as error:
            raise BadInput(str(error)) from None
    if args.updates < 1 or args.num_steps < 1 or (args.jobs is not None and args.jobs < 1):
        raise BadInput("--updates, --num-steps and --jobs must be 1 or more")
    # every group has to give each of 2 minibatches an environment
    if args.num_envs < 1 or args.num_envs % (2 * GROUPS):
        raise BadInput(f"--num-envs {args.num_envs}: must be a multiple of {2 * GROUPS}")
    for algo in args.algo:
        if not (Path(args.trainers) / f"cleanba_{algo}.py").is_file():
            raise BadInput(f"--trainers {args.trainers}: no cleanba_{algo}.py there")


def main(args: Args) -> None:
    """Certify, print and write."""
    check(args)
    layouts, todo = chosen_layouts(args), configurations(args)
    if not todo:
        raise BadInput(
            "--quick takes each algorithm in its own architecture: ppo sync, impala cleanba"
        )
    name = args.name or default_name(args)
    start = time.perf_counter()
    parts = []
    print(f"{len(todo)} configurations x {len(layouts)} layouts")
    for configuration in todo:
        print(f"\n{configuration.name}", flush=True)
        part = certify(args, configuration, layouts)
        parts.append(part)
        for row in part["layouts"]:
            fingerprint = (row["fingerprint"] or "-")[:16]
            print(
                f"  {row['layout']:<22} {row['updates']:>4} updates {row['seconds']:>6.1f} s  "
                f"{fingerprint:<16}  {row['verdict']}"
            )
    certificate = {
        "schema_version": 1,
        "name": name,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - start, 1),
        "cores": len(os.sched_getaffinity(0)),
        "platform": args.platform,
        "arguments": {
            k: v for k, v in asdict(args).items() if k not in ("out", "trainers", "jobs")
        },
        "configurations": parts,
        "same": all(part["same"] for part in parts),
    }
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / f"{name}.json", json.dumps(certificate, indent=1) + "\n")
    replace_file(folder / f"{name}.md", as_markdown(certificate))
    print(f"\nwritten: {folder / name}.md and .json ({certificate['seconds']:,.0f} s)")
    if certificate["same"]:
        print("every layout gave the same bits")
    else:
        different = sum(row["same"] is False for part in parts for row in part["layouts"])
        print(f"{different} runs did NOT give the bits of their reference")
        raise SystemExit(1)


if __name__ == "__main__":
    run_command_line(Args, main, "Certify that layouts do not change results.")
