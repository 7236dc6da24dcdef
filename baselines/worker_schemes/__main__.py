"""The command line: `python -m baselines.worker_schemes --scheme impala --agent impala`.

updater = make_update_worker(plan)  # <- gradient workers <- collection workers
while not updater.done:
    recorder.write(updater.step(), updater.network, updater.done)
"""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch

from baselines import run_log
from baselines.run_log import RunLog
from baselines.worker_schemes.crew import Crew
from baselines.worker_schemes.options import HARDWARE, NOT_HYPERPARAMETERS, Args, Plan, prepare
from baselines.worker_schemes.workers import (
    CollectionWorker,
    EnvOptions,
    GradientWorker,
    Update,
    UpdateWorker,
)
from cleanba.command_line import run_command_line
from cleanba.groupwise import fingerprint

FINGERPRINT_EVERY = 100  # updates
MOST_LIVES = 8  # of a collection worker, before seeds of environments come again
OBJECT_STORE_BYTES = 1 << 30  # of a Ray that is started here: rollouts and parameters on their way


def num_actors(plan: Plan) -> int:
    """Return how many processes a run needs beside its own."""
    gradient, collection = plan.scheme.gradient_workers, plan.scheme.collection_workers
    return gradient + max(gradient, 1) * collection


@contextmanager
def ray_for(plan: Plan) -> Iterator[None]:
    """Connect to Ray, or start it, if the run needs it; and end it with the run."""
    args, count = plan.args, num_actors(plan)
    if not count:
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    here = {"include_dashboard": False, "log_to_driver": True, "logging_level": "ERROR"}
    cluster = None
    # As many cores are said to be here as workers need: else Ray would have some wait for ever. On one node
    # are whole groups of a gradient worker and its collection workers.
    groups = max(plan.scheme.gradient_workers, 1)
    per_node = math.ceil(groups / args.local_nodes)
    cores = math.ceil(per_node * (count / groups) * args.cpus_per_worker)
    if args.ray_address is not None:
        ray.init(address=args.ray_address, log_to_driver=True, logging_level="ERROR")
        there, needed = ray.cluster_resources().get("CPU", 0), count * args.cpus_per_worker
        if there < needed:
            print(
                f"the cluster has {there:g} cores, workers need {needed:g}: some wait until it grows"
            )
    elif args.local_nodes > 1:
        from ray.cluster_utils import Cluster

        node = {"num_cpus": cores, "object_store_memory": OBJECT_STORE_BYTES}
        cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
        for _ in range(args.local_nodes - 1):
            cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=True, logging_level="ERROR")
    else:
        ray.init(num_cpus=cores, object_store_memory=OBJECT_STORE_BYTES, **here)
    try:
        yield
    finally:
        ray.shutdown()
        if cluster is not None:
            cluster.shutdown()


def make_gradient_worker(
    plan: Plan, envs: EnvOptions, resources: dict[str, float], index: int, life: int
) -> GradientWorker:
    """Make a gradient worker and its collection workers: the factory that other processes are given."""
    scheme = plan.scheme
    count = scheme.collection_workers

    def make_collector(number: int, its_life: int) -> CollectionWorker:
        # of a replaced gradient worker, all collection workers are new
        lives = life * MOST_LIVES + its_life
        return CollectionWorker(plan.agent, envs, index * max(count, 1) + number, lives)

    collectors = Crew("collection", make_collector, count, resources)
    return GradientWorker(
        plan.agent,
        collectors,
        scheme.collection == "asynchronous",
        scheme.enough,
        seed=plan.args.seed * 10_007 + index,
    )


def make_places(plan: Plan) -> list[Any]:
    """Return a placement group for each gradient worker and its collection workers.

    Each is on one machine, if there is room. Without both kinds of workers there are none.
    """
    scheme = plan.scheme
    if not (scheme.gradient_workers and scheme.collection_workers):
        return []
    from ray.util.placement_group import placement_group

    bundles = [{"CPU": plan.args.cpus_per_worker}] * (1 + scheme.collection_workers)
    return [placement_group(bundles, strategy="PACK") for _ in range(scheme.gradient_workers)]


def make_update_worker(plan: Plan) -> UpdateWorker:
    """Make all workers of a run."""
    args, scheme = plan.args, plan.scheme
    everyone = max(scheme.gradient_workers, 1) * max(scheme.collection_workers, 1)
    envs = EnvOptions(
        args.env_id, args.seed, args.num_envs, args.num_steps, args.atari_preprocessing, everyone
    )
    resources = {"num_cpus": args.cpus_per_worker}
    make = partial(make_gradient_worker, plan, envs, resources)
    return UpdateWorker(
        plan.agent,
        Crew("gradient", make, scheme.gradient_workers, resources, make_places(plan)),
        asynchronous=scheme.gradients == "asynchronous",
        enough=scheme.enough,
        total_steps=args.total_timesteps,
        max_grad_norm=args.max_grad_norm,
        anneal=args.anneal and args.agent != "sac",
    )


def begin_log(plan: Plan) -> RunLog:
    """Begin the record of a run."""
    args = plan.args
    hyperparameters: dict[str, Any] = {
        name: value for name, value in asdict(args).items() if name not in NOT_HYPERPARAMETERS
    }
    hyperparameters |= {"network": plan.network, **plan.scheme._asdict()}
    hardware = {name: getattr(args, name) for name in HARDWARE}
    hardware |= {"num_processes": 1 + num_actors(plan)}
    hardware |= run_log.describe_device(torch.device("cpu"))
    return RunLog(
        plan.run,
        hyperparameters,
        hardware,
        total_steps=args.total_timesteps,
        overwrite=args.overwrite,
        progress=args.progress,
    )


class Recorder:
    """Writes updates down."""

    def __init__(self, log: RunLog):
        """Begin the clock."""
        self._log = log
        self._started = time.time()
        self._last = 0.0
        self._rollouts: dict[int, int] = {}  # that each worker has been heard of with

    def write(self, update: Update, network: torch.nn.Module, last: bool) -> None:
        """Record an update, and the rollouts that were learned from for the first time in it."""
        now = time.time() - self._started
        gradients = update.gradients
        collected = [(g.version, c) for g in gradients for c in g.collected]
        marked = last or (update.version - 1) % FINGERPRINT_EVERY == 0

        def mean(values: list[float]) -> float:
            return round(float(np.mean(values)), 6) if values else 0.0

        row = {
            "version": update.version,
            "step": update.steps,
            "wall_time": round(now, 4),
            "update_seconds": round(now - self._last, 6),
            **{name: mean([g.losses[name] for g in gradients]) for name in gradients[0].losses},
            "grad_norm": update.grad_norm,
            "learning_rate": update.learning_rate,
            "rollout_queue_get_time": mean([g.wait_time for g in gradients]),
            "params_queue_get_time": mean([c.wait_time for _, c in collected]),
            "rollout_queue_put_time": 0.0,
            "rollout_time": mean([c.rollout_time for _, c in collected]),
            "inference_time": mean([c.inference_time for _, c in collected]),
            "env_time": mean([c.env_time for _, c in collected]),
            "training_time": mean([g.training_time for g in gradients]),
            "gradient_version": gradients[0].version,
            "num_gradients": len(gradients),
            "num_replaced": len(update.replaced),
            "fingerprint": _fingerprint(network) if marked else None,
        }
        rollouts = [
            {
                "actor": c.worker,
                "group": None,
                "rollout": self._number(c.worker),
                "steps": c.steps,
                "wall_time": round(c.wall_time - self._started, 4),
                "version_first": c.version,
                "version_last": c.version,
                "versions": [[c.version, c.steps]],
                "learner_version": version,
            }
            for version, c in collected
        ]
        episodes = [
            {
                "step": update.steps,
                "wall_time": round(c.wall_time - self._started, 4),
                "env_index": env_index,
                "return": episode_return,
                "length": length,
            }
            for _, c in collected
            for env_index, episode_return, length in c.episodes
        ]
        self._last = now
        self._log.write(row, rollouts, episodes)
        for words in update.replaced:
            print(words, flush=True)

    def _number(self, worker: int) -> int:
        """Number the rollouts of a worker from 1, also where one took a dead one's place."""
        self._rollouts[worker] = self._rollouts.get(worker, 0) + 1
        return self._rollouts[worker]


def _fingerprint(network: torch.nn.Module) -> str:
    return fingerprint({name: tensor.numpy() for name, tensor in network.state_dict().items()})


def main(args: Args) -> None:
    """Check the options, train, and record it."""
    plan = prepare(args)
    torch.set_num_threads(1)
    log = begin_log(plan)
    error: BaseException | None = None
    try:
        with ray_for(plan):
            updater = make_update_worker(plan)
            recorder = Recorder(log)
            while not updater.done:
                recorder.write(updater.step(), updater.network, updater.done)
            updater.end()
        run_log.save_parameters(updater.network, plan.run.directory / "model.npz")
    except BaseException as caught:
        error = caught
        raise
    finally:
        log.close(error)
    print(f"completed: {plan.run.directory}")


if __name__ == "__main__":
    run_command_line(Args, main, "Modular training schemes on Ray: PPO, IMPALA, SAC.")
