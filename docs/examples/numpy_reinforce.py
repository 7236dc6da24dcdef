"""A whole baseline in plain NumPy: REINFORCE with a linear policy, on EnvPool's environments.

The worked example of docs/adding-a-baseline.md: one file that trains and writes a run record.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from cleanba.environments import EpisodeStatistics, describe_env, env_seeds, make_envs
from cleanba.record import Episode, RecordError, Rollout, RunInfo, RunWriter, Update, run_name


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


def train(args: argparse.Namespace, record: RunWriter) -> None:
    """Train, and record every update, its rollout, and the episodes that ended in it."""
    spec = describe_env(args.env_id)
    envs = make_envs(args.env_id, env_seeds(args.seed, 0, args.num_envs), args.threads)
    rng = np.random.default_rng(args.seed)
    weights = np.zeros((int(np.prod(spec.obs_shape)) + 1, spec.num_actions))
    statistics = EpisodeStatistics(args.num_envs)
    batch = args.num_steps * args.num_envs
    started = time.monotonic()
    obs, _ = envs.reset()
    ended, last = np.zeros(args.num_envs, bool), 0.0
    for version in range(1, args.total_timesteps // batch + 1):
        steps = []
        for _ in range(args.num_steps):
            flat = obs.reshape(args.num_envs, -1)
            cumulative = policy(weights, flat).cumsum(axis=1)
            actions = (rng.random((args.num_envs, 1)) > cumulative[:, :-1]).sum(axis=1)
            obs, reward, terminated, truncated, _ = envs.step(actions.astype(np.int32))
            # the step after an episode's end only resets its environment: it is not learned from
            steps.append((flat, actions, reward, terminated | truncated, ~ended))
            ended = terminated | truncated
        obs_t, a_t, r_t, done_t, real_t = map(np.stack, zip(*steps, strict=True))
        collected = time.monotonic() - started
        g_t = returns_to_go(r_t, done_t, args.discount)
        advantages = (g_t - g_t[real_t].mean()) / (g_t[real_t].std() + 1e-8)
        gradient = policy_gradient(weights, obs_t[real_t], a_t[real_t], advantages[real_t])
        weights += args.learning_rate * gradient
        now, step = round(time.monotonic() - started, 4), version * batch
        # one policy for the whole rollout: a single pair of version and steps
        rollout = Rollout(
            actor=0, group=None, rollout=version, steps=batch, wall_time=round(collected, 4),
            version_first=version, version_last=version, versions=[(version, batch)],
            learner_version=version,
        )  # fmt: skip
        update = Update(
            version=version + 1, step=step, wall_time=now, update_seconds=round(now - last, 4),
            learning_rate=args.learning_rate, loss=None,
        )  # fmt: skip
        episodes = [
            Episode(step=step, wall_time=now, env_index=e.index,
                    episode_return=e.episode_return, length=e.length)
            for e in statistics.count(r_t, done_t)
        ]  # fmt: skip
        record.write(*episodes, rollout, update)
        last = now


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
    parser.add_argument("--study", default="default")
    parser.add_argument("--setting", default="1-thread")
    parser.add_argument("--runs-dir", default="runs")
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--no-progress", action="store_true")
    args = parser.parse_args()
    learned = ("num_envs", "num_steps", "learning_rate", "discount")
    info = RunInfo(
        system="numpy_reinforce", setting=args.setting, env_id=args.env_id, seed=args.seed,
        study=args.study, hyperparameters={name: getattr(args, name) for name in learned},
        hardware={"threads": args.threads}, versions={"numpy": np.__version__},
        command=["python", *sys.argv],
    )  # fmt: skip
    name = run_name("numpy_reinforce", args.setting, args.env_id, args.seed)
    try:
        with RunWriter(Path(args.runs_dir) / args.study / name, info, args.overwrite) as record:
            train(args, record)
    except (RecordError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
