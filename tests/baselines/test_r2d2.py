"""R2D2: stored states, burn-in, rescaled n-step returns and priorities of sequences."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
import rlax
import torch

from baselines.worker_schemes import actors, options
from baselines.worker_schemes.algorithms.r2d2 import r2d2_loss
from baselines.worker_schemes.parts import Moment, Rollout
from baselines.worker_schemes.q_networks import DQNNetwork, RecurrentQNetwork
from baselines.worker_schemes.replay import ReplayStorage
from baselines.worker_schemes.sequences import Sequences, cut_sequences, rescale, unscale
from baselines.worker_schemes.workers import CollectionWorker, EnvOptions, parameters_of
from cleanba.run.command_line import BadInput
from tests.command_lines import parsed

T, B, A, WIDTH = 18, 3, 4, 5
BURN_IN, UNROLL, STEPS, GAMMA = 3, 5, 3, 0.9


def make_network():
    torch.manual_seed(0)
    network = DQNNetwork(RecurrentQNetwork("mlp", (6,), A, (8, 7), WIDTH))
    with torch.no_grad():
        for target in network.target.parameters():
            target += 0.3 * torch.randn_like(target)
    return network


def make_rollout(seed=1, done=0.2, terminates=True):
    rng = np.random.default_rng(seed)
    dones = rng.random((T, B)) < done
    return Rollout(
        obs=rng.standard_normal((T + 1, B, 6), np.float32),
        actions=rng.integers(A, size=(T, B)),
        rewards=rng.standard_normal((T, B), np.float32),
        terminated=dones & terminates,
        dones=dones,
        resets=np.concatenate([np.zeros((1, B), bool), dones[:-1]]),
        logits=rng.standard_normal((T, B, A), np.float32),
        values=rng.standard_normal((T + 1, B), np.float32),
        states=rng.standard_normal((T, B, 2 * WIDTH), np.float32),
    )


cut = partial(cut_sequences, burn_in=BURN_IN, unroll=UNROLL, n=STEPS, gamma=GAMMA)


def batch_of(rollout):
    fields, errors = cut(rollout, None)
    count = len(errors)
    tensors = [torch.from_numpy(np.ascontiguousarray(field)) for field in fields]
    return Sequences(*tensors, torch.empty(0, count, 0), torch.ones(count)), errors


def test_rescaling_is_rlax_s_and_has_an_inverse():
    x = torch.linspace(-300, 300, 101, dtype=torch.float64)
    expected = rlax.signed_hyperbolic(jnp.asarray(x.numpy()))
    np.testing.assert_allclose(rescale(x).numpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(unscale(rescale(x)), x, rtol=1e-6, atol=1e-9)


def test_sequences_overlap_by_the_burn_in_and_begin_with_the_actor_s_states():
    rollout = make_rollout()
    batch, errors = batch_of(rollout)
    starts = [0, 5, 10]  # of 3 + 5 steps each; the last that fits ends with step 18
    assert len(errors) == len(starts) * B
    for number, start in enumerate(starts):
        for column in range(B):
            at = number * B + column
            steps = slice(start, start + BURN_IN + UNROLL)
            assert (batch.states[at].numpy() == rollout.states[start, column]).all()
            assert (batch.actions[at].numpy() == rollout.actions[steps, column]).all()
            assert (batch.obs[at].numpy() == rollout.obs[start : start + 9, column]).all()
            assert (batch.resets[at].numpy() == rollout.resets[steps, column]).all()


def test_a_rollout_shorter_than_a_sequence_gives_none():
    rollout = make_rollout()
    short = Rollout(*(field[: 5 + (len(field) > T)] for field in rollout))
    fields, errors = cut(short, None)
    assert len(errors) == 0
    assert [len(field) for field in fields] == [0] * len(fields)


def test_the_loss_is_rlax_s_transformed_n_step_double_q_learning():
    rollout = make_rollout(done=0.0)  # rlax knows terminations, and no resets between
    rollout.terminated[7, 0] = rollout.dones[7, 0] = True
    rollout.terminated[17, 1] = rollout.dones[17, 1] = True
    batch, _ = batch_of(rollout)
    network = make_network()
    losses = r2d2_loss(network, batch, 0.0, burn_in=BURN_IN)
    expected = []
    for at in range(len(batch.actions)):
        values = []
        for net in (network.online, network.target):
            state, outputs = batch.states[at][None], []
            with torch.no_grad():
                for obs in batch.obs[at]:
                    output, state = net.step(obs[None], state)
                    outputs.append(output[0].numpy())
            values.append(jnp.asarray(np.stack(outputs[BURN_IN:])))
        online, target = values
        number, column = divmod(at, B)
        steps = slice(number * UNROLL + BURN_IN, number * UNROLL + BURN_IN + UNROLL)
        if rollout.dones[steps, column][:-1].any():
            expected.append(None)  # two episodes; the next test has them
            continue
        errors = rlax.transformed_n_step_q_learning(
            online[:-1],
            jnp.asarray(rollout.actions[steps, column]),
            target[1:],
            jnp.argmax(online[1:], axis=-1),
            jnp.asarray(rollout.rewards[steps, column]),
            jnp.asarray(GAMMA * ~rollout.terminated[steps, column], jnp.float32),
            n=STEPS,
            tx_pair=rlax.SIGNED_HYPERBOLIC_PAIR,
        )
        expected.append(np.abs(errors))
    checked = [at for at, errors in enumerate(expected) if errors is not None]
    assert len(checked) >= 7
    priorities = [0.9 * expected[at].max() + 0.1 * expected[at].mean() for at in checked]
    np.testing.assert_allclose(losses["errors"][checked], priorities, rtol=1e-4)
    only = Sequences(
        *(field[:, checked] if field is batch.noise else field[checked] for field in batch)
    )
    loss = r2d2_loss(network, only, 0.0, burn_in=BURN_IN)["loss"].item()
    assert loss == pytest.approx(
        np.mean([0.5 * np.square(expected[at]).mean() for at in checked]), rel=1e-4
    )


def test_an_episode_in_a_sequence_is_learned_from_as_if_it_were_alone():
    # The second episode starts at step 4: after a reset its state is zero, and it sees nothing of the first.
    network = make_network()
    rollout = make_rollout(done=0.0)
    rollout.dones[3], rollout.terminated[3], rollout.resets[4] = True, True, True
    steps = BURN_IN + UNROLL

    def values_after_the_reset(rollout):
        obs = torch.from_numpy(rollout.obs[: steps + 1])
        resets = torch.from_numpy(np.concatenate([rollout.resets[:steps], rollout.resets[:1]]))
        with torch.no_grad():
            return network.online.unroll(obs, torch.from_numpy(rollout.states[0]), resets)[0][5:]

    alone = torch.from_numpy(rollout.obs[5 : steps + 1])
    never = torch.zeros(len(alone), B, dtype=torch.bool)
    with torch.no_grad():
        expected, _ = network.online.unroll(alone, torch.zeros(B, 2 * WIDTH), never)
    torch.testing.assert_close(values_after_the_reset(rollout), expected)
    # what the ignored step was given is not learned from
    changed = Rollout(*(np.copy(field) for field in rollout))
    changed.rewards[4], changed.actions[4] = 1e3, (changed.actions[4] + 1) % A
    first, second = (
        r2d2_loss(network, batch_of(one)[0], 0.0, burn_in=BURN_IN) for one in (rollout, changed)
    )
    assert (first["errors"] == second["errors"]).all()
    assert first["loss"] == second["loss"]


def test_truncated_episodes_are_bootstrapped_from_their_last_observation():
    ended, cut_off = (make_rollout(done=0.3, terminates=terminates) for terminates in (True, False))
    terminated, truncated = (batch_of(rollout)[0] for rollout in (ended, cut_off))
    last = terminated.discounts == 0
    assert last.any()
    assert (truncated.discounts > 0).all()
    assert (truncated.rewards == terminated.rewards).all()
    assert (truncated.ends == terminated.ends).all()


def test_first_priorities_are_the_errors_of_the_actor_s_values():
    rollout = make_rollout(done=0.0)
    _, errors = batch_of(rollout)
    storage = ReplayStorage(
        0, cut=cut, make_batch=Sequences, capacity=16, first=1, batch_size=20_000, num_updates=1,
        priority_exponent=0.9, actor_priorities=True,
    )  # fmt: skip
    storage.put([rollout])
    drawn = storage.next().states[:, 0]
    firsts = rollout.states[[0, 5, 10]].reshape(-1, 2 * WIDTH)[:, 0]
    counts = np.array([(drawn.numpy() == first).sum() for first in firsts])
    shares = errors**0.9
    np.testing.assert_allclose(counts / 20_000, shares / shares.sum(), atol=0.015)
    # one of them by hand: sequence 0 of column 0
    td = []
    for t in range(BURN_IN, BURN_IN + UNROLL):
        end = min(t + STEPS, BURN_IN + UNROLL)
        target = sum(GAMMA ** (k - t) * rollout.rewards[k, 0] for k in range(t, end))
        value = rlax.signed_parabolic(jnp.float32(rollout.values[end, 0]))
        target = rlax.signed_hyperbolic(target + GAMMA ** (end - t) * value)
        td.append(abs(target - rollout.logits[t, 0, rollout.actions[t, 0]]))
    assert errors[0] == pytest.approx(0.9 * np.max(td) + 0.1 * np.mean(td), rel=1e-4)


def test_the_actor_s_states_are_those_that_the_network_computes_again(tmp_path):
    said = {
        "agent": "r2d2", "env_id": "CartPole-v1", "num_envs": 2, "num_steps": 40, "burn_in": 10, "unroll": 20,
        "lstm_width": 6, "hiddens": (8,), "total_timesteps": 10_000, "runs_dir": tmp_path,
    }  # fmt: skip
    agent = options.prepare(parsed(options.Args, **said)).agent
    collector = CollectionWorker(agent, EnvOptions("CartPole-v1", 1, 2, 40, "machado", 1), 0, 0)
    network = agent.make_network()
    first, second = (collector.collect(parameters_of(network), 1) for _ in range(2))
    collector.end()
    assert (first.steps, second.steps) == (80, 80)
    assert len(first.rollout.dones) == 40
    assert len(second.rollout.dones) == 50  # begins with the last 10 steps of the first
    for mine, before in zip(second.rollout, first.rollout, strict=True):
        same = mine[:10] == before[30:40]
        assert same.all()
    rollout = second.rollout
    assert rollout.resets.any()
    with torch.no_grad():
        values, _ = network.online.unroll(
            torch.from_numpy(rollout.obs[:-1]),
            torch.from_numpy(rollout.states[0]),
            torch.from_numpy(rollout.resets),
        )
    np.testing.assert_allclose(values.numpy(), rollout.logits, rtol=1e-4, atol=1e-6)
    starts = np.concatenate([[np.zeros(2, bool)], rollout.resets[:-1]])
    assert (rollout.states[starts] == 0).all()
    assert (rollout.states[~starts][1:] != 0).any(axis=-1).all()


def test_rollouts_hold_whole_sequences(tmp_path):
    said = {"agent": "r2d2", "env_id": "CartPole-v1", "num_steps": 50, "runs_dir": tmp_path}
    with pytest.raises(BadInput, match=r"^--num-steps 50: not a multiple of --unroll 40$"):
        options.prepare(parsed(options.Args, **said))


def test_greedy_actions_of_a_recurrent_actor_depend_on_its_state():
    network, rng = make_network(), np.random.default_rng(3)
    obs = np.repeat(rng.standard_normal((1, 6), np.float32), 2, axis=0)
    states = np.stack([np.zeros(2 * WIDTH), rng.standard_normal(2 * WIDTH)]).astype(np.float32)
    with torch.no_grad():
        decision = actors.act_with_own_epsilons(network, obs, states, rng, Moment(1, 0, 1, 0))
        values, new = network.online.step(torch.from_numpy(obs), torch.from_numpy(states))
    assert (decision.logits[0] != decision.logits[1]).any()
    assert (decision.logits == values.numpy()).all()
    assert (decision.state == new.numpy()).all()
