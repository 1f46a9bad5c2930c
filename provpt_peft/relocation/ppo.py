"""Proximal policy optimisation (paper, Sec. 3.3 and appendix).

This module takes tensors and knows nothing about models.

Legend: S numbers per state, A actions, M transitions per update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


# The first three are from the paper's appendix. The others have CleanRL's names and usual values. The value loss needs
# no weight: actor and critic share no weights, and Adam's steps do not depend on a loss's scale.
ACTOR_LEARNING_RATE = 3e-4
CRITIC_LEARNING_RATE = 1e-3
CLIP_COEF = 0.2
ENT_COEF = 0.01
UPDATE_EPOCHS = 10
TRANSITIONS_PER_UPDATE = 2
HIDDEN_UNITS = 64


def advantages_and_returns(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages (M,) and returns (M,) of an update's transitions, from rewards r_t (M,) and values V(s_t) (M,).

    Advantages are returns minus values. The critic learns the returns. Rewards after the last transition count as 0.
    """
    returns = torch.zeros_like(rewards)
    following = torch.zeros(())
    for t in reversed(range(len(rewards))):
        returns[t] = following = rewards[t] + gamma * following
    return returns - values, returns


def clipped_policy_loss(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, clip_coef: float
) -> torch.Tensor:
    """The clipped surrogate of PPO, negated: the mean over transitions of -min(ratio A, clip(ratio) A)."""
    ratio = (log_probs - old_log_probs).exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    return -torch.minimum(ratio * advantages, clipped * advantages).mean()


class PPO:
    """Actor and critic, each with two hidden layers of 64 units, and their update.

    Args:
        num_inputs: S, the size of a state.
        num_actions: A.
        gamma: Discount of later rewards.
        generator: Random generator for the weights and the actions.
    """

    def __init__(self, num_inputs: int, num_actions: int, gamma: float, generator: torch.Generator) -> None:
        self.gamma = gamma
        self.generator = generator
        self.actor = _mlp(num_inputs, num_actions, output_gain=0.01, generator=generator)
        self.critic = _mlp(num_inputs, 1, output_gain=1.0, generator=generator)
        self.optimizer = torch.optim.Adam(
            [
                {"params": self.actor.parameters(), "lr": ACTOR_LEARNING_RATE},
                {"params": self.critic.parameters(), "lr": CRITIC_LEARNING_RATE},
            ]
        )
        self.reward_squares = 0.0  # the sum of squared rewards
        self.reward_count = 0
        self.transitions: list[dict[str, Any]] = []

    def log_probs(self, states: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Log probabilities of the actions (…, A), from states (…, S) and offsets of the logits (…, A)."""
        return (self.actor(states) + offsets).log_softmax(dim=-1)

    @torch.no_grad()
    def act(self, state: torch.Tensor, offset: torch.Tensor) -> tuple[int, dict[str, Any]]:
        """Draw an action, 0 … A-1, in a state (S,). The offset (A,) is added to the actor's logits.

        Returns:
            The action, and what `learn` needs to know about it.
        """
        log_probs = self.log_probs(state, offset)
        action = int(torch.multinomial(log_probs.exp(), 1, generator=self.generator))
        memory = {
            "state": state,
            "offset": offset,
            "action": action,
            "log_prob": log_probs[action].item(),
            "value": self.critic(state).item(),
        }
        return action, memory

    def learn(self, memory: dict[str, Any], reward: float) -> dict[str, float]:
        """Collect the reward of an action, and update once there are `TRANSITIONS_PER_UPDATE` of them.

        Returns:
            The diagnostics of the update, as means over its last pass. Empty if there was no update.
        """
        self.transitions.append({**memory, "reward": self._scaled(reward)})
        if len(self.transitions) < TRANSITIONS_PER_UPDATE:
            return {}
        metrics = self._update()
        self.transitions.clear()
        return metrics

    def _scaled(self, reward: float) -> float:
        """The reward divided by the running root mean square of rewards. Signs and relative sizes stay."""
        self.reward_squares += reward**2
        self.reward_count += 1
        root = (self.reward_squares / self.reward_count) ** 0.5
        return reward / root if root > 0 else 0.0

    def _update(self) -> dict[str, float]:
        states, offsets = (torch.stack([t[name] for t in self.transitions]) for name in ("state", "offset"))  # (M, S)
        actions = torch.tensor([t["action"] for t in self.transitions])
        old_log_probs, values, rewards = (
            torch.tensor([t[name] for t in self.transitions], dtype=torch.float32)
            for name in ("log_prob", "value", "reward")
        )
        advantages, returns = advantages_and_returns(rewards, values, self.gamma)
        with torch.enable_grad():
            for _ in range(UPDATE_EPOCHS):
                log_probs = self.log_probs(states, offsets)  # (M, A)
                chosen = log_probs.gather(1, actions[:, None])[:, 0]
                policy_loss = clipped_policy_loss(chosen, old_log_probs, advantages, CLIP_COEF)
                value_loss = 0.5 * (self.critic(states)[:, 0] - returns).square().mean()
                entropy = -(log_probs.exp() * log_probs).sum(dim=-1).mean()
                loss = policy_loss + value_loss - ENT_COEF * entropy
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
        log_ratio = (chosen - old_log_probs).detach()
        return {
            "policy_loss": policy_loss.item(),
            "value_loss": value_loss.item(),
            "entropy": entropy.item(),
            # Low-variance estimate of KL(old, new): E[(r - 1) - log r].
            "approx_kl": (log_ratio.expm1() - log_ratio).mean().item(),
            "clipfrac": (log_ratio.exp() - 1).abs().gt(CLIP_COEF).float().mean().item(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer, collected transitions and reward scale; tensors and plain Python values."""
        return {
            "actor": self.actor.state_dict(),
            "critic": self.critic.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rewards": [self.reward_squares, self.reward_count],
            "transitions": list(self.transitions),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.actor.load_state_dict(state["actor"])
        self.critic.load_state_dict(state["critic"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.reward_squares, self.reward_count = state["rewards"]
        self.transitions = list(state["transitions"])


def _mlp(inputs: int, outputs: int, output_gain: float, generator: torch.Generator) -> nn.Sequential:
    """Two hidden layers of 64, tanh, orthogonal weights and zero biases, as is usual for PPO."""
    sizes, gains = (inputs, HIDDEN_UNITS, HIDDEN_UNITS, outputs), (2**0.5, 2**0.5, output_gain)
    layers: list[nn.Module] = []
    for size_in, size_out, gain in zip(sizes[:-1], sizes[1:], gains, strict=True):
        # The layer's own initialisation would draw from the global generator.
        linear = nn.utils.skip_init(nn.Linear, size_in, size_out, device="cpu", dtype=torch.float32)
        nn.init.orthogonal_(linear.weight, gain, generator=generator)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])
