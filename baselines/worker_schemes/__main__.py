"""The command line: `python -m baselines.worker_schemes --scheme impala --agent impala`.

updater = make_update_worker(plan)  # <- gradient workers <- collection workers
while not updater.done:
    recorder.write(updater.step(), updater.network, updater.done)
"""

import math
import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch

from baselines.torch_io import PACKAGES, describe_device, fingerprint_network, save_parameters
from baselines.worker_schemes.options import Args, Plan, prepare
from baselines.worker_schemes.schemes import REPLAY
from baselines.worker_schemes.worker_pool import WorkerPool
from baselines.worker_schemes.workers import (
    CollectionWorker,
    EnvOptions,
    GradientWorker,
    Update,
    UpdateWorker,
)
from cleanba.record import Episode, Rollout
from cleanba.record import Update as RecordedUpdate
from cleanba.run.arguments import hyperparameters
from cleanba.run.command_line import run_command_line
from cleanba.run.log import RunLog, run_info

FINGERPRINT_EVERY = 100  # updates
MOST_INCARNATIONS = 8  # of a collection worker, before environment seeds repeat
OBJECT_STORE_BYTES = (
    1 << 30
)  # of a Ray that is started here, for rollouts and parameters in transit


def num_actors(plan: Plan) -> int:
    """Return the number of Ray actors of a run."""
    gradient, collection = plan.scheme.gradient_workers, plan.scheme.collection_workers
    return gradient + max(gradient, 1) * collection


@contextmanager
def ray_for(plan: Plan) -> Iterator[None]:
    """Connect to Ray, or start it, if the run needs it; shut it down with the run."""
    args, count = plan.args, num_actors(plan)
    if not count:
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if args.hardware.ray_address is None and "RAY_AUTH_MODE" not in os.environ:
        # Ray listens on all interfaces, whatever address it is given; read when it is imported.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import ray

    on_sigterm = signal.getsignal(signal.SIGTERM)
    here = {"include_dashboard": False, "log_to_driver": True, "logging_level": "ERROR"}
    cluster = None
    # Ray is told of as many cores as the workers need: with fewer, some would wait forever. A node has
    # whole groups of a gradient worker and its collection workers.
    groups = max(plan.scheme.gradient_workers, 1)
    per_node = math.ceil(groups / args.hardware.local_nodes)
    cores = math.ceil(per_node * (count / groups) * args.hardware.cpus_per_worker)
    if args.hardware.ray_address is not None:
        ray.init(address=args.hardware.ray_address, log_to_driver=True, logging_level="ERROR")
        cores, needed = ray.cluster_resources().get("CPU", 0), count * args.hardware.cpus_per_worker
        if cores < needed:
            print(
                f"the cluster has {cores:g} cores and the workers need {needed:g}: some will wait for more"
            )
    elif args.hardware.local_nodes > 1:
        from ray.cluster_utils import Cluster

        node = {"num_cpus": cores, "object_store_memory": OBJECT_STORE_BYTES}
        cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
        for _ in range(args.hardware.local_nodes - 1):
            cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=True, logging_level="ERROR")
    else:
        # "local": without it Ray joins any cluster that RAY_ADDRESS or its own temporary folder names
        ray.init(address="local", num_cpus=cores, object_store_memory=OBJECT_STORE_BYTES, **here)
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray's handler would exit with code 15
    try:
        yield
    finally:
        ray.shutdown()
        if cluster is not None:
            cluster.shutdown()


def make_gradient_worker(
    plan: Plan, envs: EnvOptions, resources: dict[str, float], index: int, incarnation: int
) -> GradientWorker:
    """Make a gradient worker and its collection workers; Ray actors call this in their processes."""
    scheme = plan.scheme
    count = scheme.collection_workers

    def make_collector(number: int, own_incarnation: int) -> CollectionWorker:
        # all collection workers of a replaced gradient worker are new
        incarnations = incarnation * MOST_INCARNATIONS + own_incarnation
        return CollectionWorker(plan.agent, envs, index * max(count, 1) + number, incarnations)

    collectors = WorkerPool("collection", make_collector, count, resources)
    return GradientWorker(
        plan.agent,
        collectors,
        scheme.collection == "asynchronous",
        scheme.preemption_threshold,
        seed=plan.args.seed * 10_007 + index,
    )


def make_places(plan: Plan) -> list[Any]:
    """Return a placement group for each gradient worker and its collection workers.

    Each is on one machine, if there is room. A scheme without both kinds of workers needs none.
    """
    scheme = plan.scheme
    if not (scheme.gradient_workers and scheme.collection_workers):
        return []
    from ray.util.placement_group import placement_group

    bundles = [{"CPU": plan.args.hardware.cpus_per_worker}] * (1 + scheme.collection_workers)
    return [placement_group(bundles, strategy="PACK") for _ in range(scheme.gradient_workers)]


def make_update_worker(plan: Plan) -> UpdateWorker:
    """Make all workers of a run."""
    args, scheme = plan.args, plan.scheme
    workers = max(scheme.gradient_workers, 1) * max(scheme.collection_workers, 1)
    envs = EnvOptions(
        args.env_id, args.seed, args.num_envs, args.num_steps, args.atari_preprocessing, workers
    )
    resources = {"num_cpus": args.hardware.cpus_per_worker}
    make = partial(make_gradient_worker, plan, envs, resources)
    return UpdateWorker(
        plan.agent,
        WorkerPool("gradient", make, scheme.gradient_workers, resources, make_places(plan)),
        asynchronous=scheme.gradients == "asynchronous",
        preemption_threshold=scheme.preemption_threshold,
        total_steps=args.total_timesteps,
        max_grad_norm=args.max_grad_norm,
        anneal=args.anneal and args.storage not in REPLAY,
    )


def begin_log(plan: Plan) -> RunLog:
    """Begin the record of a run."""
    args = plan.args
    recorded = hyperparameters(args) | {"network": plan.network} | plan.scheme._asdict()
    hardware = asdict(args.hardware) | describe_device(torch.device("cpu"))
    hardware["num_processes"] = 1 + num_actors(plan)
    info = run_info(
        plan.run,
        program="worker_schemes",
        hyperparameters=recorded,
        hardware=hardware,
        packages=PACKAGES,
    )
    return RunLog(
        plan.run,
        info,
        total_steps=args.total_timesteps,
        overwrite=args.run.overwrite,
        progress="lines" if args.run.progress else None,
    )


class Recorder:
    """Logs updates, each with the rollouts that were learned from for the first time in it."""

    def __init__(self, log: RunLog):
        """Start the clock."""
        self._log = log
        self._started = time.time()
        self._last = 0.0
        self._rollouts: dict[int, int] = {}  # number of each worker's rollouts so far

    def write(self, update: Update, network: torch.nn.Module, last: bool) -> None:
        """Log an update."""
        now = max(self._last, time.time() - self._started)  # the clock may be set back
        gradients = update.gradients
        collected = [(g.version, c) for g in gradients for c in g.collected]
        marked = last or (update.version - 1) % FINGERPRINT_EVERY == 0

        def mean(values: list[float]) -> float:
            return round(float(np.mean(values)), 6) if values else 0.0

        row = RecordedUpdate(
            version=update.version,
            step=update.steps,
            wall_time=round(now, 4),
            update_seconds=round(now - self._last, 6),
            **{name: mean([g.losses[name] for g in gradients]) for name in gradients[0].losses},
            grad_norm=update.grad_norm,
            learning_rate=update.learning_rate,
            rollout_queue_get_time=mean([g.wait_time for g in gradients]),
            params_queue_get_time=mean([c.wait_time for _, c in collected]),
            rollout_queue_put_time=0.0,
            rollout_time=mean([c.rollout_time for _, c in collected]),
            inference_time=mean([c.inference_time for _, c in collected]),
            env_time=mean([c.env_time for _, c in collected]),
            training_time=mean([g.training_time for g in gradients]),
            gradient_version=gradients[0].version,
            num_gradients=len(gradients),
            num_replaced=len(update.replaced),
            fingerprint=fingerprint_network(network) if marked else None,
        )
        rollouts = [
            Rollout(
                actor=c.worker,
                group=None,
                rollout=self._number(c.worker),
                steps=c.steps,
                wall_time=self._since_start(c.wall_time),
                version_first=c.version,
                version_last=c.version,
                versions=[(c.version, c.steps)],
                learner_version=version,
            )
            for version, c in collected
        ]
        episodes = [
            Episode(
                step=update.steps,
                wall_time=self._since_start(c.wall_time),
                env_index=env_index,
                episode_return=episode_return,
                length=length,
            )
            for _, c in collected
            for env_index, episode_return, length in c.episodes
        ]
        self._last = now
        self._log.write(row, rollouts, episodes)
        for message in update.replaced:
            print(message, flush=True)

    def _since_start(self, then: float) -> float:
        """Return the seconds of the run at a time; the clock of another machine may be behind."""
        return max(0.0, round(then - self._started, 4))

    def _number(self, worker: int) -> int:
        """Number the rollouts of a worker from 1, continuing where a worker was replaced."""
        self._rollouts[worker] = self._rollouts.get(worker, 0) + 1
        return self._rollouts[worker]


def main(args: Args) -> None:
    """Check the options, train, and record it."""
    plan = prepare(args)
    torch.set_num_threads(1)
    with ray_for(plan), begin_log(plan) as log:
        updater = make_update_worker(plan)
        recorder = Recorder(log)
        while not updater.done:
            recorder.write(updater.step(), updater.network, updater.done)
        updater.end()
        save_parameters(updater.network, plan.run.directory / "model.npz")


if __name__ == "__main__":
    run_command_line(Args, main, "Modular training schemes on Ray.")
