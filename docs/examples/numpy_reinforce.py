"""A whole baseline in plain NumPy: REINFORCE with a linear policy, on EnvPool's environments.

The worked example of docs/adding-a-baseline.md: one file that trains, writes a run record, and can repeat the
updates of a record for an audit.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cleanba.audit.segments import Mismatch, NotRepeatable, Repeated, Replayed
from cleanba.environments import EpisodeStatistics, describe_env, env_seeds, make_envs, play
from cleanba.exact.placement import cpu_model
from cleanba.record import (
    Episode,
    RecordError,
    Rollout,
    Run,
    RunInfo,
    RunWriter,
    Update,
    checkpoints,
    fingerprint,
    run_name,
)  # fmt: skip
from cleanba.record.actions import Frame, GroupDigest, Shape, combine_digests, pack
from cleanba.record.checkpoints import check_arrays

HYPERPARAMETERS = ("total_timesteps", "num_envs", "num_steps", "learning_rate", "discount")
# What the result depends on: NumPy chooses kernels by processor.
VERSIONS = {name: version(name) for name in ("numpy", "envpool")}
PROCESSOR = {"device_kind": cpu_model()}


def policy(weights: np.ndarray, obs: np.ndarray) -> np.ndarray:
    """Return the probabilities of the actions [B, A] of a linear policy [D + 1, A]."""
    logits = np.concatenate([obs, np.ones((len(obs), 1))], axis=1) @ weights
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def policy_gradient(
    weights: np.ndarray, obs: np.ndarray, actions: np.ndarray, advantages: np.ndarray
) -> np.ndarray:
    """Return the gradient [D + 1, A] of the mean of advantage x log-probability over steps [N]."""
    chosen = np.eye(weights.shape[1])[actions]
    errors = (chosen - policy(weights, obs)) * advantages[:, None]
    return np.concatenate([obs, np.ones((len(obs), 1))], axis=1).T @ errors / len(obs)


def returns_to_go(r_t: np.ndarray, done_t: np.ndarray, discount: float) -> np.ndarray:
    """Return the discounted sum of the rewards [T, B] from each step to the end of its episode."""
    g_t, after = np.empty(r_t.shape), np.zeros(r_t.shape[1])
    for t in reversed(range(len(r_t))):
        after = r_t[t] + discount * after * ~done_t[t]
        g_t[t] = after
    return g_t


class Steps(NamedTuple):
    """T steps of B environments."""

    obs: np.ndarray  # [T, B, D]
    actions: np.ndarray  # int32 [T, B]
    rewards: np.ndarray  # [T, B]
    dones: np.ndarray  # bool [T, B]
    real: np.ndarray  # bool [T, B], not only the reset after an episode's end


class Agent:
    """Environments, a policy, and how it learns. Its methods are those of an `audit.segments.Repetition`."""

    def __init__(self, env_id: str, seed: int, hyperparameters: Mapping[str, Any], threads: int):
        """Reset the environments."""
        self.num_envs, self.num_steps = (hyperparameters[k] for k in ("num_envs", "num_steps"))
        self.learning_rate, self.discount = (
            hyperparameters[k] for k in ("learning_rate", "discount")
        )
        spec = describe_env(env_id)
        self.num_actions = spec.num_actions
        self.weights = np.zeros((int(np.prod(spec.obs_shape)) + 1, spec.num_actions))
        self._envs = make_envs(env_id, env_seeds(seed, 0, self.num_envs), threads)
        self._rng = np.random.default_rng(seed)
        self._statistics, self._digest = EpisodeStatistics(self.num_envs), GroupDigest()
        self._obs, _ = self._envs.reset()
        self._ended = np.zeros(self.num_envs, bool)

    def collect(self) -> tuple[Steps, Replayed]:
        """Collect a rollout with one policy; return it, and what is recorded of it."""
        steps = []
        for _ in range(self.num_steps):
            obs = self._obs.reshape(self.num_envs, -1)
            cumulative = policy(self.weights, obs).cumsum(axis=1)
            drawn = self._rng.random((self.num_envs, 1))
            actions = (drawn > cumulative[:, :-1]).sum(axis=1).astype(np.int32)
            self._obs, reward, terminated, truncated, info = self._envs.step(actions)
            # the step after an episode's end only resets its environment: it is not learned from
            steps.append(
                (obs, actions, info.get("reward", reward), terminated | truncated, ~self._ended)
            )
            self._ended = terminated | truncated
        collected = Steps(*map(np.stack, zip(*steps, strict=True)))
        return collected, self._played(collected.actions, collected.rewards, collected.dones)

    def learn(self, steps: Steps) -> dict[str, Any]:
        """Make an update; return its metrics."""
        g_t = returns_to_go(steps.rewards, steps.dones, self.discount)
        real = steps.real
        advantages = (g_t - g_t[real].mean()) / (g_t[real].std() + 1e-8)
        gradient = policy_gradient(
            self.weights, steps.obs[real], steps.actions[real], advantages[real]
        )
        self.weights = self.weights + self.learning_rate * gradient
        return {"learning_rate": self.learning_rate, "loss": None}

    def replay(self, actions: np.ndarray) -> Replayed:
        """Step the environments through recorded actions [T, B]."""
        self._rng.random((*actions.shape, 1))  # as many numbers as the policy drew
        self._obs, rewards, dones, _ = play(self._envs, actions)
        self._ended = dones[-1]
        return self._played(actions, rewards, dones)

    def update(self) -> Repeated:
        """Collect a rollout, and learn from it."""
        steps, played = self.collect()
        return Repeated(played, self.learn(steps))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what a checkpoint holds."""
        return {"weights": self.weights}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take the state from a checkpoint."""
        check_arrays(arrays, self.arrays())
        self.weights = arrays["weights"]

    def fingerprint(self) -> str:
        """Return the fingerprint of the parameters."""
        return fingerprint(self.arrays())

    def close(self) -> None:
        """Free the environments."""
        self._envs.close()

    def _played(self, actions: np.ndarray, rewards: np.ndarray, dones: np.ndarray) -> Replayed:
        digest = combine_digests([self._digest.update(actions, rewards, dones)])
        return Replayed(actions, digest, self._statistics.count(rewards, dones))


def train(args: argparse.Namespace, agent: Agent, record: RunWriter, folder: Path) -> None:
    """Train, and record every update, its rollout, its actions, and the episodes that ended in it."""
    shape = Shape(args.num_steps, args.num_envs, agent.num_actions)
    batch, started, last = args.num_steps * args.num_envs, time.monotonic(), 0.0
    num_updates = args.total_timesteps // batch
    for number in range(1, num_updates + 1):
        steps, played = agent.collect()
        collected = round(time.monotonic() - started, 4)
        metrics = agent.learn(steps)
        now = round(time.monotonic() - started, 4)
        saves = args.checkpoint_every and number % args.checkpoint_every == 0
        # one policy for the whole rollout: a single pair of version and steps
        rollout = Rollout(
            actor=0, group=None, rollout=number, steps=batch, wall_time=collected, version_first=number,
            version_last=number, versions=[(number, batch)], learner_version=number,
        )  # fmt: skip
        update = Update(
            version=number + 1, step=number * batch, wall_time=now, update_seconds=round(now - last, 4),
            **metrics,
            fingerprint=agent.fingerprint() if saves or number == num_updates else None,
        )  # fmt: skip
        if saves:
            update.checkpoint = fingerprint(agent.arrays())
        episodes = [
            Episode(
                step=(number - 1) * batch + (e.t + 1) * args.num_envs, wall_time=collected, env_index=e.index,
                episode_return=e.episode_return, length=e.length,
            )
            for e in played.episodes
        ]  # fmt: skip
        record.write_actions(pack(Frame(played.actions, played.digest), shape))
        record.write(*episodes, rollout, update)
        if saves:
            checkpoints.save(
                folder, agent.arrays(), update=number, wall_time=now, sizes=record.sizes(),
                digests=[played.digest.hex()], pinned={"versions": VERSIONS}, keep="all",
            )  # fmt: skip
        last = now


def repeat(run: Run) -> Agent:
    """Prepare to make the updates of a record again.

    Raises:
      NotRepeatable: with one line, if other versions of the packages or another processor made it.
      Mismatch: if the environment has another number of actions than the record.
    """
    info = run.info
    then = info.versions | {name: info.hardware.get(name) for name in PROCESSOR}
    if then != (now := VERSIONS | PROCESSOR):
        raise NotRepeatable(f"made with {then}; this is {now}")
    if (
        info.num_actions != describe_env(info.env_id).num_actions
    ):  # environments do not check actions
        raise Mismatch(f"run.json: not the number of actions of {info.env_id}")
    return Agent(info.env_id, info.seed, info.hyperparameters, threads=1)


def main() -> int:
    """Train on the command line; returns 2 for bad input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-timesteps", type=int, default=50_000)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--num-steps", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1.0)
    parser.add_argument("--discount", type=float, default=0.99)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--checkpoint-every", type=int, default=0)
    parser.add_argument("--study", default="default")
    parser.add_argument("--setting", default="1-thread")
    parser.add_argument("--runs-dir", default="runs")
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--no-progress", action="store_true")
    args = parser.parse_args()
    hyperparameters = {name: getattr(args, name) for name in HYPERPARAMETERS}
    name = run_name("numpy_reinforce", args.setting, args.env_id, args.seed)
    folder = Path(args.runs_dir) / args.study / name
    try:
        agent = Agent(args.env_id, args.seed, hyperparameters, args.threads)
        info = RunInfo(
            system="numpy_reinforce", setting=args.setting, env_id=args.env_id, seed=args.seed,
            study=args.study, hyperparameters=hyperparameters, hardware={"threads": args.threads} | PROCESSOR,
            versions=VERSIONS, command=["python", *sys.argv], num_actions=agent.num_actions,
        )  # fmt: skip
        record = RunWriter(folder, info, args.overwrite)
    except (RecordError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with record:
        train(args, agent, record, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
