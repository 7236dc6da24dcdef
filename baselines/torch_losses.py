"""Returns and losses in torch: V-trace and IMPALA's as rlax and cleanba_impala.py have them, GAE, PPO's."""

from typing import NamedTuple

import torch


class VTrace(NamedTuple):
    """Outputs of V-trace for a rollout."""

    errors: torch.Tensor  # targets minus values [T, B]; differentiable in the values alone
    pg_advantage: torch.Tensor  # weights of the policy gradient [T, B], without a gradient


class Losses(NamedTuple):
    """Sums over the unmasked steps of a batch."""

    loss: torch.Tensor
    policy_loss: torch.Tensor
    value_loss: torch.Tensor
    entropy: torch.Tensor
    count: torch.Tensor


def vtrace(
    v_tm1: torch.Tensor,
    v_t: torch.Tensor,
    r_t: torch.Tensor,
    discount_t: torch.Tensor,
    rho_tm1: torch.Tensor,
    clip_rho: float = 1.0,
    clip_pg_rho: float = 1.0,
) -> VTrace:
    """Return V-trace errors and policy gradient advantages (https://arxiv.org/abs/1802.01561).

    Args:
      v_tm1: values of the observations before the steps [T, B].
      v_t: values of the observations after them [T, B].
      r_t: rewards [T, B].
      discount_t: discounts [T, B], 0 where the episode ended with that step.
      rho_tm1: importance ratios, current policy over behaviour policy [T, B].
      clip_rho: largest ratio in the temporal differences; traces (c) are clipped at 1.
      clip_pg_rho: largest ratio in the policy gradient.
    """
    if not v_tm1.shape == v_t.shape == r_t.shape == discount_t.shape == rho_tm1.shape:
        raise ValueError("V-trace needs arrays of one shape, [T, B]")
    with torch.no_grad():
        c_tm1 = rho_tm1.clamp(max=1.0)
        delta = rho_tm1.clamp(max=clip_rho) * (r_t + discount_t * v_t - v_tm1)
        error = torch.zeros_like(v_t[-1])
        errors = []
        for t in reversed(range(len(r_t))):
            error = delta[t] + discount_t[t] * c_tm1[t] * error
            errors.append(error)
        targets = torch.stack(errors[::-1]) + v_tm1
        bootstrap = torch.cat([targets[1:], v_t[-1:]])
        advantage = rho_tm1.clamp(max=clip_pg_rho) * (r_t + discount_t * bootstrap - v_tm1)
    return VTrace(targets - v_tm1, advantage)


def impala_loss(
    logits: torch.Tensor,
    values: torch.Tensor,
    behaviour_logits: torch.Tensor,
    actions: torch.Tensor,
    rewards: torch.Tensor,
    dones: torch.Tensor,
    mask: torch.Tensor,
    *,
    discounting: float,
    baseline_cost: float,
    entropy_cost: float,
) -> Losses:
    """Return the V-trace actor-critic loss, summed over unmasked steps.

    Args:
      logits: of the current policy [T, B, num_actions].
      values: of the current network [T + 1, B], the last one for bootstrapping.
      behaviour_logits: of the policy that acted [T, B, num_actions].
      actions: [T, B].
      rewards: as the agent learns from them [T, B].
      dones: whether the episode ended with that step [T, B].
      mask: 1 where a step is real, 0 where it only resets an environment [T, B].
      discounting: discount factor.
      baseline_cost: coefficient of the value loss.
      entropy_cost: coefficient of the entropy.
    """
    log_probs = torch.log_softmax(logits, dim=-1)
    index = actions.long()[..., None]
    logprob = log_probs.gather(-1, index)[..., 0]
    with torch.no_grad():
        behaviour = torch.log_softmax(behaviour_logits, dim=-1).gather(-1, index)[..., 0]
        rho = torch.exp(logprob - behaviour)
    discounts = discounting * (~dones).float()
    trace = vtrace(values[:-1], values[1:].detach(), rewards, discounts, rho)
    policy_loss = -(logprob * trace.pg_advantage * mask).sum()
    value_loss = 0.5 * (trace.errors.square() * mask).sum()
    entropy = -((log_probs.exp() * log_probs).sum(dim=-1) * mask).sum()
    return Losses(
        loss=policy_loss + baseline_cost * value_loss - entropy_cost * entropy,
        policy_loss=policy_loss,
        value_loss=value_loss,
        entropy=entropy,
        count=mask.sum(),
    )


def generalized_returns(
    rewards: torch.Tensor, dones: torch.Tensor, values: torch.Tensor, gamma: float, lambda_: float
) -> torch.Tensor:
    """Return lambda-returns: with lambda 1, the n-step returns of A2C.

    Args:
      rewards: as the agent learns from them [T, N].
      dones: whether the episode ended with that step [T, N].
      values: of the observations [T + 1, N], the last one for bootstrapping.
      gamma: discount factor.
      lambda_: mixing parameter of generalized advantage estimation.

    Returns:
      [T, N].
    """
    advantage = torch.zeros_like(values[-1])
    advantages = []
    for t in reversed(range(len(rewards))):
        discount = gamma * (~dones[t]).float()
        delta = rewards[t] + discount * values[t + 1] - values[t]
        advantage = delta + discount * lambda_ * advantage
        advantages.append(advantage)
    return torch.stack(advantages[::-1]) + values[:-1]


def logprobs_and_entropies(
    logits: torch.Tensor, actions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities [N] of actions [N] (int64), and entropies [N], of logits [N, num_actions]."""
    log_policy = torch.log_softmax(logits, dim=-1)
    logprobs = log_policy.gather(-1, actions[:, None])[:, 0]
    return logprobs, -(log_policy.exp() * log_policy).sum(dim=-1)


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_coef: float
) -> torch.Tensor:
    """Return PPO's objective, step by step (https://arxiv.org/abs/1707.06347, equation 7).

    Args:
      ratio: probability of the action under the current policy over that of the policy that acted [...].
      advantages: [...].
      clip_coef: how far the ratio may move from 1.

    Returns:
      [...], to be maximized.
    """
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    return torch.minimum(ratio * advantages, clipped * advantages)
