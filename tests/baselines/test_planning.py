"""MPC: the ensemble's loss, imagined returns, and the cross-entropy method on problems with known answers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import distributions

from baselines.worker_schemes import actors
from baselines.worker_schemes.algorithms.mpc import model_loss
from baselines.worker_schemes.control import ActionBounds
from baselines.worker_schemes.dynamics import DynamicsEnsemble, imagined_returns, plan_by_cem
from baselines.worker_schemes.parts import Moment
from baselines.worker_schemes.replay import Transitions

N, E, D, SIZE = 12, 3, 2, 2
BOUNDS = ActionBounds((-2.0, -1.0), (2.0, 3.0))


@pytest.fixture
def network():
    torch.manual_seed(0)
    made = DynamicsEnsemble(D, BOUNDS, (16, 16), E)
    with torch.no_grad():
        made.log_stds += 0.3 * torch.randn_like(made.log_stds)
    return made


def member(network, index, obs, actions):
    """Compute one member's predictions with ordinary dense layers."""
    x = torch.cat([obs, actions], dim=-1)
    for i, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True)):
        x = F.linear(F.silu(x) if i else x, weight[index].T, bias[index][0])
    return x


def draw(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape, np.float32))


def make_batch():
    rng = np.random.default_rng(1)
    actions = draw(rng, N, SIZE).clamp(-1, 1)
    ones, noise = torch.ones(N), draw(rng, E, N, SIZE)
    return Transitions(draw(rng, N, D), actions, draw(rng, N), draw(rng, N, D), ones, noise, ones)


def test_the_loss_is_the_likelihood_of_each_member_s_half(network):
    batch = make_batch()
    losses = []
    actions = (batch.actions - torch.tensor([0.0, 1.0])) / 2
    wanted = torch.cat([batch.next_obs - batch.obs, batch.rewards[:, None]], dim=-1)
    for index in range(E):
        used = batch.noise[index, :, 0] > 0
        assert 0 < used.sum() < N
        predicted = member(network, index, batch.obs, actions)
        normal = distributions.Normal(predicted, network.log_stds[index].exp().expand_as(predicted))
        losses.append(
            -normal.log_prob(wanted)[used].sum() / used.sum() - (D + 1) / 2 * np.log(2 * np.pi)
        )
    found = model_loss(network, batch, 0.0)
    assert found["loss"].item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


def test_imagined_returns_are_those_of_each_member_by_itself(network):
    rng = np.random.default_rng(2)
    obs, plans = draw(rng, 5, D), draw(rng, 5, 4, SIZE).clamp(-1, 1)
    totals = []
    for index in range(E):
        state, total = obs, 0.0
        for t in range(4):
            predicted = member(network, index, state, plans[:, t])
            state, total = state + predicted[:, :D], total + predicted[:, D]
        totals.append(total)
    with torch.no_grad():
        torch.testing.assert_close(
            imagined_returns(network, obs, plans), torch.stack(totals).mean(0)
        )


class Known(torch.nn.Module):
    """A point that moves by its action and is paid for being at 1: the best plans are known."""

    members = 2
    scale, middle = torch.ones(1), torch.zeros(1)

    def forward(self, obs, actions):
        step = 0.5 * actions
        return torch.cat([step, -(obs + step - 1).square()], dim=-1)


def test_plans_are_the_best_ones_where_they_are_known():
    obs = torch.tensor([[0.0], [0.75], [1.0], [1.6]])
    plans = plan_by_cem(
        Known(),
        obs,
        torch.zeros(4, 3, 1),
        np.random.default_rng(3),
        plans=400,
        elites=40,
        iterations=8,
    )[..., 0]
    # half a step at most to 1, and then stay
    best = torch.tensor([[1.0, 1.0, 0.0], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0], [-1.0, -0.2, 0.0]])
    np.testing.assert_allclose(plans, best, atol=0.12)


def test_an_actor_takes_the_first_action_and_keeps_the_rest_of_its_plan():
    network, rng = Known(), np.random.default_rng(4)
    obs = np.array([[0.75]], np.float32)
    before = np.array([[0.1, 0.2, 0.3]], np.float32)
    settings = {"plans": 50, "elites": 5, "iterations": 2}
    decision = actors.act_by_planning(network, obs, before, rng, Moment(2, 0, 1, 0), **settings)
    seen, rest = torch.from_numpy(obs), torch.from_numpy(before)[..., None]
    plan = plan_by_cem(network, seen, rest, np.random.default_rng(4), **settings).numpy()[0, :, 0]
    np.testing.assert_allclose(decision.actions, plan[None, :1])
    np.testing.assert_allclose(decision.state, [[plan[1], plan[2], 0.0]])
    first = actors.act_by_planning(network, obs, before, rng, Moment(1, 0, 1, 0), **settings)
    assert first.state is None  # nothing is planned before the first update


def test_members_differ_where_there_is_no_data():
    torch.manual_seed(5)
    network = DynamicsEnsemble(1, ActionBounds((-1.0,), (1.0,)), (32, 32), 5)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    rng = np.random.default_rng(6)
    for _ in range(400):
        obs, actions = torch.from_numpy(rng.uniform(-1, 1, (2, 64, 1)).astype(np.float32))
        ones, noise = torch.ones(64), draw(rng, 5, 64, 1)
        rewards = (obs * actions)[:, 0]
        batch = Transitions(obs, actions, rewards, obs + 0.5 * actions, ones, noise, ones)
        optimizer.zero_grad()
        model_loss(network, batch, 0.0)["loss"].backward()
        optimizer.step()
    with torch.no_grad():
        near, far = (
            network(torch.full((1, 1), x), torch.full((1, 1), 0.5))[:, 0] for x in (0.4, 6.0)
        )
    np.testing.assert_allclose(near, [[0.25, 0.2]] * 5, atol=0.1)
    assert (far.std(dim=0) > 5 * near.std(dim=0)).all()
