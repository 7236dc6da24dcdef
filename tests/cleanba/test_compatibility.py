"""`--compat`: the original's arithmetic, against torch code that follows its formulas line by line.

The originals are cleanba_impala.py and cleanba_ppo.py of vwxyzjn/cleanba at d1f8979, with their numbers of
lines.
"""

from dataclasses import replace
from types import SimpleNamespace

import envpool
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from cleanba import cleanba_impala as impala
from cleanba import cleanba_ppo as ppo
from cleanba import training
from cleanba.actor_learner import Entry, GroupRollout
from cleanba.audit.simulation import Simulation
from cleanba.audit.verification import verify
from cleanba.compatibility import advantage_chunks, overlapping_seeds
from cleanba.environments import describe_env, make_envs, play
from cleanba.exact.groups import GroupExchange, tree_sum
from cleanba.exact.placement import Hardware, plan
from cleanba.record import read_run
from cleanba.run.command_line import exit_code
from cleanba.training import TrainState
from tests.killed_runs import Runs, check_equal

from .conftest import SMALL

T, B, OBS, ACTIONS = 7, 8, 3, 4
SEEDS = (0, 1, 2)


class Linear:
    """A network of two matrices, in jax and in torch."""

    @staticmethod
    def apply(params, obs):
        return obs @ params["actor"], (obs @ params["critic"])[..., 0]


def parameters(rng):
    shapes = {"actor": (OBS, ACTIONS), "critic": (OBS, 1)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def make_rollout(rng):
    """A rollout of a Cleanba run in which episodes end, also at its borders."""
    dones = rng.random((T + 1, B)) < 0.3
    return GroupRollout(
        obs=rng.normal(size=(T + 1, B, OBS)).astype(np.float32),
        dones=dones,
        actions=rng.integers(0, ACTIONS, (T, B)).astype(np.int32),
        rewards=rng.normal(size=(T, B)).astype(np.float32),
        behaviour=rng.normal(size=(T, B, ACTIONS)).astype(np.float32),
        entry=Entry(
            rng.normal(size=(1, B)).astype(np.float32), (rng.random((1, B)) < 0.3) & ~dones[:1]
        ),
    )


def torch_parameters(params):
    return {name: torch.tensor(value, requires_grad=True) for name, value in params.items()}


def original_impala(params, rollout, args):
    """Lines 569 to 600: `impala_loss`, on the storage that lines 372 to 384 fill.

    At index t the storage has the observation, and the reward, the end and the first step that came with it.
    """
    rewards = torch.tensor(np.concatenate([rollout.entry.rewards, rollout.rewards]))
    dones = torch.tensor(rollout.dones).float()
    firststeps = torch.tensor(np.concatenate([rollout.entry.firsts, rollout.dones[:-1]])).float()
    a = torch.tensor(rollout.actions).long()
    logitss = torch.tensor(rollout.behaviour)
    x = torch.tensor(rollout.obs)

    policy_logits, newvalue = x @ params["actor"], (x @ params["critic"])[..., 0]
    discounts = (1.0 - dones) * args.gamma
    mask = 1.0 - firststeps
    v_t, v_tm1 = newvalue[1:], newvalue[:-1]
    policy_logits, mask, rewards, discounts = (
        each[:-1] for each in (policy_logits, mask, rewards, discounts)
    )
    log_pi = torch.log_softmax(policy_logits, -1)
    logprob = log_pi.gather(-1, a[..., None])[..., 0]
    behaviour = torch.log_softmax(logitss, -1).gather(-1, a[..., None])[..., 0]
    with torch.no_grad():
        rho = torch.exp(logprob - behaviour)
        clipped = rho.clamp(max=1.0)
        delta = clipped * (rewards + discounts * v_t - v_tm1)
        errors = torch.zeros_like(delta)
        carried = torch.zeros(B)
        for t in reversed(range(T)):
            carried = delta[t] + discounts[t] * clipped[t] * carried
            errors[t] = carried
        targets = errors + v_tm1
        next_targets = torch.cat([targets[1:], v_t[-1:]])
        advantage = clipped * (rewards + discounts * next_targets - v_tm1)
    pg_loss = -(logprob * advantage * mask).sum()
    baseline_loss = 0.5 * (torch.square(targets - v_tm1) * mask).sum()
    ent_loss = (log_pi.exp() * log_pi * mask[..., None]).sum()
    return pg_loss + args.vf_coef * baseline_loss + args.ent_coef * ent_loss


@pytest.mark.parametrize("seed", SEEDS)
def test_impala_s_loss_and_gradient_are_the_original_s(seed):
    rng = np.random.default_rng(seed)
    params, rollout = parameters(rng), make_rollout(rng)
    args = impala.Args(compat=("original",))
    gradient, losses = jax.jit(impala.make_gradient(Linear, args))(params, rollout)
    theirs = torch_parameters(params)
    loss = original_impala(theirs, rollout, args)
    loss.backward()
    np.testing.assert_allclose(losses.loss, loss.item(), rtol=1e-5)
    for name, value in theirs.items():
        np.testing.assert_allclose(gradient[name], value.grad, rtol=1e-5, atol=1e-5)
    textbook = impala.make_gradient(Linear, impala.Args())(params, rollout)[1]
    assert abs(textbook.loss - loss.item()) > 0.1


def test_impala_s_gradient_is_divided_by_the_learner_devices_of_all_processes(monkeypatch):
    """The original takes the mean over devices of the sums over their steps (cleanba_impala.py, line 619)."""
    monkeypatch.setattr(impala, "make_optimizer", lambda *_: (optax.sgd(1.0), None))
    rng = np.random.default_rng(0)
    params, rollout = parameters(rng), make_rollout(rng)
    placement = plan(Hardware(num_actor_threads=1), 1, 0, 1)
    exchange = GroupExchange(placement)
    setup = SimpleNamespace(
        network=Linear, num_updates=1, minibatch_size=B, microbatch_size=B,
        spec=SimpleNamespace(obs_shape=(OBS,)),
        placement=placement._replace(learner_device_ids=(1, 2, 3), num_processes=2),
    )  # fmt: skip

    def step(compat):
        learn = impala.make_learn(impala.Args(num_minibatches=1, compat=compat), setup, exchange)
        new, _, _ = learn(params, optax.sgd(1.0).init(params), [rollout])
        return jax.tree.map(lambda old, new: old - np.asarray(new), params, new)

    scaled, whole = step(("gradient-scale",)), step(())
    for name in params:
        np.testing.assert_allclose(6 * scaled[name], whole[name], rtol=1e-3, atol=1e-5)
        assert np.abs(whole[name]).max() > 0.1


def original_ppo(params, batch, indices, chunk, args):
    """Lines 526 to 595: `compute_gae`, `ppo_loss` and the normalization, for the steps of one minibatch."""
    obs, dones = torch.tensor(batch.obs), torch.tensor(batch.dones).float()
    rewards, values = torch.tensor(batch.rewards), torch.tensor(batch.behaviour.value)
    with torch.no_grad():
        next_value = (obs[-1] @ params["critic"])[:, 0]
        values = torch.cat([values, next_value[None]])
        advantages = torch.zeros(T, B)
        carried = torch.zeros(B)
        for t in reversed(range(T)):
            nonterminal = 1.0 - dones[t + 1]
            delta = rewards[t] + args.gamma * values[t + 1] * nonterminal - values[t]
            carried = delta + args.gamma * args.gae_lambda * nonterminal * carried
            advantages[t] = carried
        target_values = advantages + values[:-1]
        for number in range(int(chunk.max()) + 1):
            part = advantages[:, chunk == number]
            normalized = (part - part.mean()) / (part.std(unbiased=False) + 1e-8)
            advantages[:, chunk == number] = normalized
    flat = [
        torch.tensor(each).flatten(0, 1)[indices]
        for each in (batch.obs[:-1], batch.actions.astype(np.int64), batch.behaviour.logprob)
    ]
    obs, actions, behavior_logprobs = flat
    log_pi = torch.log_softmax(obs @ params["actor"], -1)
    newlogprob = log_pi.gather(-1, actions[:, None])[:, 0]
    newvalue = (obs @ params["critic"])[:, 0]
    ratio = torch.exp(newlogprob - behavior_logprobs)
    advantage = advantages.flatten()[indices]
    pg_loss1 = -advantage * ratio
    pg_loss2 = -advantage * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = torch.maximum(pg_loss1, pg_loss2).mean()
    v_loss = 0.5 * ((newvalue - target_values.flatten()[indices]) ** 2).mean()
    entropy = -(log_pi.exp() * log_pi).sum(-1).mean()
    return pg_loss - args.ent_coef * entropy + v_loss * args.vf_coef


@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_s_loss_and_gradient_are_the_original_s(monkeypatch, seed):
    """Of a minibatch of two groups, with the chunks of two learner devices."""
    rng = np.random.default_rng(seed)
    hardware = Hardware(num_actor_threads=2, learner_device_ids=(1, 2))
    args = ppo.Args(compat=("original",), num_minibatches=2, update_epochs=1, hardware=hardware)
    params = parameters(rng)
    logprob, value = (rng.normal(size=(T, B)).astype(np.float32) for _ in range(2))
    whole = make_rollout(rng)._replace(behaviour=ppo.Behaviour(-np.abs(logprob), value))
    chunk = advantage_chunks(hardware, 1, B, args.num_minibatches)

    learned = []
    learn = lambda *data: learned.extend(data) or (None, None, {})  # noqa: E731
    monkeypatch.setattr(ppo, "make_learn", lambda *_: learn)
    placement = plan(Hardware(num_actor_threads=1), 2, 0, 1)
    setup = SimpleNamespace(network=Linear, num_updates=1, num_envs=B, placement=placement)
    groups = {g: jax.tree.map(lambda x, g=g: x[:, g * 4 : g * 4 + 4], whole) for g in range(2)}
    ppo.make_update(args, setup, GroupExchange(placement))(TrainState(params, None), groups, 1)
    _, _, batches, (moments, _) = learned
    first, size = jax.tree.map(lambda x: x[0], moments), T * 4 // args.num_minibatches
    found, indices = [], []
    for number, batch in enumerate(batches):
        found.append(ppo.make_gradient(Linear, args)(params, ppo.take(batch, 0, size), first))
        step, env = np.divmod(np.asarray(batch.order[0, :size]), 4)
        indices.append(step * B + number * 4 + env)
    gradient, losses = tree_sum(found)

    theirs = torch_parameters(params)
    loss = original_ppo(theirs, whole, np.concatenate(indices), chunk, args)
    loss.backward()
    np.testing.assert_allclose(losses.loss, loss.item(), rtol=1e-5)
    for name, value in theirs.items():
        np.testing.assert_allclose(gradient[name], value.grad, rtol=1e-5, atol=1e-5)


def test_advantages_are_normalized_by_the_original_s_chunks():
    """Two threads of 8 environments on two devices, as `prepare_data` and `hstack` place them."""
    hardware = Hardware(num_actor_threads=2, learner_device_ids=(1, 2))
    threads = [np.arange(8), np.arange(8, 16)]
    expected = np.empty(16, int)
    for device in range(2):
        own = np.hstack([np.split(thread, 2)[device] for thread in threads])
        for minibatch, chunk in enumerate(np.split(own, 2)):
            expected[chunk] = device * 2 + minibatch
    assert advantage_chunks(hardware, 1, 16, 2).tolist() == expected.tolist()
    assert advantage_chunks(replace(hardware, num_actor_threads=4), 2, 64, 2).max() == 7
    with pytest.raises(ValueError, match="cannot be divided among 1 processes x 2 actor threads"):
        advantage_chunks(hardware, 1, 10, 2)


def test_the_original_s_environment_seeds_overlap_between_threads():
    assert overlapping_seeds(7, 8, 2, 1) == [7, 8, 9, 10, 8, 9, 10, 11]
    assert overlapping_seeds(7, 8, 2, 2) == [7, 8, 8, 9, 8, 9, 9, 10]
    with pytest.raises(ValueError, match="cannot be divided among 1 processes x 3 actor threads"):
        overlapping_seeds(7, 8, 3, 1)


def groups_of_two_threads(monkeypatch, env_id, compat):
    """The environments and the key of each group, thread by thread."""
    monkeypatch.setattr(training, "EnvGroup", lambda index, envs, size, key, *_: (envs, key))
    monkeypatch.setattr(
        training, "ActorThread", lambda thread, make_groups, *_, **__: make_groups()
    )
    placement = plan(Hardware(num_actor_threads=2), 4, 0, 1)
    setup = SimpleNamespace(
        args=ppo.Args(compat=compat), spec=describe_env(env_id), placement=placement, checkpoint=None,
        env_seeds=range(4), group_size=1, num_envs=4, num_updates=1, updates_done=0,
    )  # fmt: skip
    return training._make_actors(setup, None, GroupExchange(placement), None, None, None)


@pytest.mark.parametrize(("compat", "different"), [((), 4), (("seeds",), 2), (("original",), 2)])
def test_the_original_s_actor_threads_draw_actions_with_the_same_keys(
    monkeypatch, compat, different
):
    threads = groups_of_two_threads(monkeypatch, "CartPole-v1", compat)
    keys = [[bytes(jax.random.key_data(key)) for _, key in groups] for groups in threads]
    assert len({key for thread in keys for key in thread}) == different
    assert (keys[0] == keys[1]) == bool(compat)


@pytest.mark.parametrize(("compat", "most"), [((), 30), (("no-ops",), 1), (("original",), 1)])
def test_the_original_s_games_start_after_at_most_one_no_op(monkeypatch, compat, most):
    for groups in groups_of_two_threads(monkeypatch, "Breakout-v5", compat):
        assert [envs.spec.config.noop_max for envs, _ in groups] == [most, most]


def test_envpool_s_single_seed_is_that_of_its_first_environment():
    """The original passes one seed to EnvPool, for all environments of a thread."""
    actions = np.random.default_rng(0).integers(0, 2, (60, 3)).astype(np.int32)
    single = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=3, seed=5)
    each = make_envs("CartPole-v1", [5, 6, 7])
    for envs in (single, each):
        envs.async_reset()
        envs.recv()
    played, expected = play(single, actions), play(each, actions)
    np.testing.assert_array_equal(played.obs, expected.obs)
    np.testing.assert_array_equal(played.dones, expected.dones)
    assert expected.dones.any()


# ---- a task on which only an episode's first action is rewarded


def one_step_task(rng, episodes):
    """Rollouts of episodes of two observations: action 1 on the first is rewarded, all else is not."""
    length = 3 * episodes  # first, last, and the step that only resets
    phase = np.arange(length + 1) % 3
    actions = rng.integers(0, 2, (length, 16)).astype(np.int32)
    rewards = np.where((phase[:-1] == 0)[:, None], actions, 0).astype(np.float32)
    # observation: first of an episode, second, terminal
    obs = np.eye(3, dtype=np.float32)[phase][:, None].repeat(16, 1)
    dones = np.repeat((phase == 2)[:, None], 16, 1)
    return GroupRollout(
        obs=obs,
        dones=dones,
        actions=actions,
        rewards=rewards,
        behaviour=np.zeros((length, 16, 2), np.float32),
        entry=Entry(np.zeros((1, 16), np.float32), np.ones((1, 16), bool)),
    )


@pytest.mark.parametrize(
    ("compat", "learns"),
    [((), True), (("alignment",), True), (("mask",), False), (("original",), False)],
)
def test_the_original_s_mask_keeps_it_from_learning_an_episode_s_first_action(compat, learns):
    """Its alignment alone does not: the target of the next value has the reward of this action."""
    rng = np.random.default_rng(0)
    args = impala.Args(compat=compat, ent_coef=0.0)
    gradient = jax.jit(impala.make_gradient(Linear, args))
    params = {"actor": jnp.zeros((3, 2)), "critic": jnp.zeros((3, 1))}
    for _ in range(300):
        grads, losses = gradient(params, one_step_task(rng, 4))
        step = 0.5 / np.maximum(losses.count, 1)
        params = jax.tree.map(lambda p, g, s=step: p - s * g, params, grads)
    good = jax.nn.softmax(params["actor"][0])[1]
    assert (good > 0.95) if learns else abs(good - 0.5) < 0.05


# ---- whole runs

# The paper's layout, with which every device has two environments: two chunks.
PUBLISHED_LAYOUT = (
    "--num-actor-threads", "2", "--actor-device-ids", "0", "--learner-device-ids", "1", "2", "3", "4",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "impala"])
def test_a_run_of_the_original_s_arithmetic_on_the_paper_s_layout_resumes(tmp_path, name):
    runs = Runs(tmp_path, f"cleanba_{name}.py", [*SMALL, *PUBLISHED_LAYOUT, "--compat", "original"])
    runs("straight")
    assert runs("killed", "--checkpoint-every", "3", kill=("half-line", "8")).returncode < 0
    refused = runs("killed", "--resume", "--num-actor-threads", "1", code=2).stderr
    assert "num_actor_threads 2 then, 1 now" in refused
    runs("killed", "--checkpoint-every", "3", "--resume")
    check_equal(runs.path("straight"), runs.path("killed"))
    straight = read_run(runs.path("straight"))
    assert verify(straight, Simulation(straight, 1)).episodes == len(straight.episodes()) > 0
    assert straight.info.hyperparameters["compat"] == ["original"]


def test_environments_that_the_original_could_not_divide_are_refused(capsys):
    flags = [*SMALL, "--compat", "advantages", "--num-envs", "8", "--num-actor-threads", "3"]
    assert exit_code(ppo.Args, ppo.main, flags) == 2
    assert "--compat: 8 environments cannot be divided among" in capsys.readouterr().err
