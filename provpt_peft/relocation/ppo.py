"""Proximal policy optimisation (paper, Sec. 3.3 and appendix).

This module takes tensors and knows nothing of models. Legend: S numbers of a state, A actions, M moves of an update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .config import PPOConfig


HIDDEN_UNITS = 64


def advantages_and_returns(
    rewards: torch.Tensor, values: torch.Tensor, discount: float, gae_lambda: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation over the moves of one update; the value after the last one counts as 0.

    Args:
        rewards: r_t, (M,).
        values: V(s_t) when the move was made, (M,).
        discount: Discount of later rewards.
        gae_lambda: Lambda; 1 gives returns minus values.

    Returns:
        Advantages (M,) and the returns that the critic learns (M,).
    """
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros(())
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + discount * next_value - values[t]
        advantages[t] = delta + discount * gae_lambda * next_advantage
        next_value, next_advantage = values[t], advantages[t]
    return advantages, advantages + values


def clipped_policy_loss(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, clip_coef: float
) -> torch.Tensor:
    """The clipped surrogate of PPO, negated to be minimised: the mean over moves of -min(ratio A, clip(ratio) A)."""
    ratio = (log_probs - old_log_probs).exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    return -torch.minimum(ratio * advantages, clipped * advantages).mean()


class RewardScale:
    """Running root mean square of rewards. Dividing by it keeps their signs and relative sizes."""

    def __init__(self) -> None:
        self.squares = 0.0
        self.count = 0

    def __call__(self, reward: float) -> float:
        """Take a reward in and return it on the running scale."""
        self.squares += reward**2
        self.count += 1
        root = (self.squares / self.count) ** 0.5
        return reward / root if root > 0 else 0.0


class PPO:
    """Actor and critic, two hidden layers of 64 each, and their update.

    Args:
        num_inputs: S, numbers of a state.
        num_actions: A.
        config: Settings.
        generator: Random generator for the weights and the choices.
    """

    def __init__(self, num_inputs: int, num_actions: int, config: PPOConfig, generator: torch.Generator) -> None:
        self.config = config
        self.generator = generator
        self.actor = _mlp(num_inputs, num_actions, output_gain=0.01, generator=generator)
        self.critic = _mlp(num_inputs, 1, output_gain=1.0, generator=generator)
        self.optimizer = torch.optim.Adam(
            [
                {"params": self.actor.parameters(), "lr": config.actor_learning_rate},
                {"params": self.critic.parameters(), "lr": config.critic_learning_rate},
            ]
        )
        self.reward_scale = RewardScale()
        self.moves: list[dict[str, Any]] = []

    def log_probs(self, states: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Log probabilities of the actions. States (…, S) and offsets of the logits (…, A) to (…, A)."""
        return (self.actor(states) + offsets).log_softmax(dim=-1)

    @torch.no_grad()
    def act(self, state: torch.Tensor, offset: torch.Tensor) -> tuple[int, dict[str, Any]]:
        """Draw an action.

        Args:
            state: (S,).
            offset: Added to the actor's logits, (A,).

        Returns:
            The action, 0 … A-1, and what `learn` needs to know of it.
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
        """Take the reward of an action in; update when `moves_per_update` of them have come.

        Returns:
            The diagnostics of the update, empty if there was none: `policy_loss`, `value_loss`, `entropy`,
            `approx_kl`, `clipfrac`, means over the last pass.
        """
        self.moves.append({**memory, "reward": self.reward_scale(reward)})
        if len(self.moves) < self.config.moves_per_update:
            return {}
        metrics = self._update()
        self.moves.clear()
        return metrics

    def _update(self) -> dict[str, float]:
        states = torch.stack([move["state"] for move in self.moves])  # (M, S)
        offsets = torch.stack([move["offset"] for move in self.moves])  # (M, A)
        actions = torch.tensor([move["action"] for move in self.moves])
        old_log_probs, values, rewards = (
            torch.tensor([move[name] for move in self.moves]) for name in ("log_prob", "value", "reward")
        )
        advantages, returns = advantages_and_returns(rewards, values, self.config.discount, self.config.gae_lambda)
        with torch.enable_grad():
            for _ in range(self.config.update_epochs):
                log_probs = self.log_probs(states, offsets)  # (M, A)
                chosen = log_probs.gather(1, actions[:, None])[:, 0]
                policy_loss = clipped_policy_loss(chosen, old_log_probs, advantages, self.config.clip_coef)
                value_loss = 0.5 * (self.critic(states)[:, 0] - returns).square().mean()
                entropy = -(log_probs.exp() * log_probs).sum(dim=-1).mean()
                loss = policy_loss + self.config.vf_coef * value_loss - self.config.ent_coef * entropy
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
            "clipfrac": (log_ratio.exp() - 1).abs().gt(self.config.clip_coef).float().mean().item(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer, collected moves and reward scale; tensors and plain Python values."""
        return {
            "actor": self.actor.state_dict(),
            "critic": self.critic.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "reward_scale": [self.reward_scale.squares, self.reward_scale.count],
            "moves": list(self.moves),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.actor.load_state_dict(state["actor"])
        self.critic.load_state_dict(state["critic"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.reward_scale.squares, self.reward_scale.count = state["reward_scale"]
        self.moves = list(state["moves"])


def _mlp(inputs: int, outputs: int, output_gain: float, generator: torch.Generator) -> nn.Sequential:
    """Two hidden layers of 64, tanh, orthogonal weights and zero biases, as is usual for PPO."""
    sizes_and_gains = [
        (inputs, HIDDEN_UNITS, 2**0.5),
        (HIDDEN_UNITS, HIDDEN_UNITS, 2**0.5),
        (HIDDEN_UNITS, outputs, output_gain),
    ]
    layers: list[nn.Module] = []
    for size_in, size_out, gain in sizes_and_gains:
        # The layer's own initialisation would draw from the global generator.
        linear = nn.utils.skip_init(nn.Linear, size_in, size_out)
        nn.init.orthogonal_(linear.weight, gain, generator=generator)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])
