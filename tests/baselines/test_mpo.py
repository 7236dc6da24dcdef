"""MPO's loss against rlax, and what its parts move."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax
import torch
from torch import distributions

from baselines.worker_schemes.algorithms.mpo import mpo_loss
from baselines.worker_schemes.control import ActionBounds, GaussianNetwork, values_of
from baselines.worker_schemes.replay import Transitions

N, K, SIZE = 6, 7, 2
EPSILONS = {"epsilon": 0.1, "epsilon_mean": 2.5e-3, "epsilon_std": 1e-4}


@pytest.fixture
def network():
    torch.manual_seed(0)
    made = GaussianNetwork(5, ActionBounds((-2.0, -1.0), (2.0, 3.0)), (16,))
    with torch.no_grad():
        for group in (made.targets, made.target_policy):
            for target in group.parameters():
                target += 0.2 * torch.randn_like(target)
        made.log_temperature.fill_(0.3)
        made.log_alpha_mean.copy_(torch.tensor([0.5, 1.0]))
        made.log_alpha_std.copy_(torch.tensor([2.0, 3.0]))
    return made


@pytest.fixture
def batch():
    rng = np.random.default_rng(1)
    draw = lambda *shape: torch.from_numpy(rng.standard_normal(shape, np.float32))  # noqa: E731
    return Transitions(
        draw(N, 5), draw(N, SIZE).clamp(-1, 1), draw(N), draw(N, 5), 0.9 * (torch.arange(N) % 3 != 0).float(),
        draw(K, N, SIZE), torch.from_numpy(rng.random(N, np.float32)),
    )  # fmt: skip


def normal(network, policy, obs):
    return distributions.Normal(*network.distribution(policy, obs))


def as_array(tensor):
    return jnp.asarray(tensor.detach().numpy())


def penalty(dual, name, per_dimension):
    return rlax.LagrangePenalty(as_array(dual), jnp.float32(EPSILONS[name]), per_dimension)


def test_policy_temperature_and_multipliers_have_rlax_s_losses(network, batch):
    losses = mpo_loss(network, batch, 0.0, **EPSILONS)
    with torch.no_grad():
        old = normal(network, network.target_policy, batch.next_obs)
        new = normal(network, network.policy, batch.next_obs)
        drawn = old.mean + old.stddev * batch.noise
        values = torch.stack(
            [values_of(network.targets, batch.next_obs, one.clamp(-1, 1))[0] for one in drawn]
        )
        fixed_std = distributions.Normal(new.mean, old.stddev)
        fixed_mean = distributions.Normal(old.mean, new.stddev)
        log_probs = [d.log_prob(drawn).sum(-1) for d in (fixed_std, fixed_mean)]
        divergences = [distributions.kl_divergence(old, d) for d in (fixed_std, fixed_mean)]
    totals, of_policy = [], []
    for part, (log_prob, divergence, dual, name) in enumerate(
        zip(
            log_probs,
            divergences,
            (network.log_alpha_mean, network.log_alpha_std),
            ("epsilon_mean", "epsilon_std"),
            strict=True,
        )
    ):
        loss, outputs = rlax.mpo_loss(
            as_array(log_prob),
            as_array(values),
            penalty(network.log_temperature, "epsilon", False),
            [(as_array(divergence), penalty(dual, name, True))],
            projection_operator=lambda x: jax.nn.softplus(x) + 1e-8,
            temperature_loss_weight=float(part == 0),  # there is one temperature
        )
        totals.append(float(jnp.mean(loss)))
        of_policy.append(float(jnp.mean(outputs.policy_loss + outputs.kl_loss)))
    # divergences cancel in the sum of all losses
    assert losses["policy_loss"].item() == pytest.approx(sum(of_policy), rel=1e-4)
    found = losses["loss"] - losses["value_loss"]
    assert found.item() == pytest.approx(sum(totals), rel=1e-4)


def test_the_critic_regresses_to_the_mean_value_of_the_target_policy(network, batch):
    losses = mpo_loss(network, batch, 0.0, **EPSILONS)
    with torch.no_grad():
        old = normal(network, network.target_policy, batch.next_obs)
        drawn = (old.mean + old.stddev * batch.noise).clamp(-1, 1)
        mean = torch.stack(
            [values_of(network.targets, batch.next_obs, one)[0] for one in drawn]
        ).mean(0)
        actions = (batch.actions - torch.tensor([0.0, 1.0])) / 2
        value = values_of(network.critics, batch.obs, actions)[0]
        errors = value - (batch.rewards + batch.discounts * mean)
    assert losses["value_loss"].item() == pytest.approx(
        (batch.weights * errors**2).mean().item(), rel=1e-5
    )
    torch.testing.assert_close(losses["errors"], errors.abs())


def test_each_loss_moves_its_own_parameters_alone(network, batch):
    losses = mpo_loss(network, batch, 0.0, **EPSILONS)
    parts = {
        "value_loss": list(network.critics.parameters()),
        "policy_loss": list(network.policy.parameters()),
        "alpha_loss": network.duals(),
    }
    learned = [p for p in network.parameters() if p.requires_grad]
    assert sum(map(len, parts.values())) == len(learned)
    for name, own in parts.items():
        gradients = torch.autograd.grad(losses[name], learned, allow_unused=True, retain_graph=True)
        moved = {
            id(p) for p, g in zip(learned, gradients, strict=True) if g is not None and g.any()
        }
        assert moved == {id(p) for p in own}


def test_a_divergence_above_its_bound_raises_its_multiplier(network, batch):
    tight, loose = (
        mpo_loss(network, batch, 0.0, **(EPSILONS | {"epsilon_mean": bound}))
        for bound in (1e-9, 1e9)
    )
    raised, lowered = (
        torch.autograd.grad(losses["loss"], network.log_alpha_mean)[0] for losses in (tight, loose)
    )
    assert (raised < 0).all()  # a step against the gradient raises it
    assert (lowered > 0).all()
