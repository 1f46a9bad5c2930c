"""`RelocationConfig`: what training needs to know to relocate prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class PPOConfig:
    """Settings of PPO, the policy that gives pruned prompts to blocks. Names as in CleanRL.

    Args:
        actor_learning_rate: Learning rate of the actor (paper, Appendix "PPO Hyper-Parameters").
        critic_learning_rate: Learning rate of the critic (same place).
        discount: Discount of later rewards, in [0, 1] (paper: 1).
        gae_lambda: Lambda of generalised advantage estimation, in [0, 1]. 1 is the plain return.
        clip_coef: Clip of the probability ratio, above 0 (paper: 0.2).
        ent_coef: Weight of the entropy bonus, from 0 on.
        vf_coef: Weight of the value loss, above 0.
        update_epochs: Passes over the collected moves in an update, at least 1.
        moves_per_update: Moves collected before an update, at least 1.
    """

    actor_learning_rate: float = 3e-4
    critic_learning_rate: float = 1e-3
    discount: float = 1.0
    gae_lambda: float = 1.0
    clip_coef: float = 0.2
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    update_epochs: int = 10
    moves_per_update: int = 2

    def __post_init__(self) -> None:
        _check_range("actor_learning_rate", self.actor_learning_rate, above=0)
        _check_range("critic_learning_rate", self.critic_learning_rate, above=0)
        _check_range("discount", self.discount, at_least=0, at_most=1)
        _check_range("gae_lambda", self.gae_lambda, at_least=0, at_most=1)
        _check_range("clip_coef", self.clip_coef, above=0)
        _check_range("ent_coef", self.ent_coef, at_least=0)
        _check_range("vf_coef", self.vf_coef, above=0)
        _check_range("update_epochs", self.update_epochs, at_least=1)
        _check_range("moves_per_update", self.moves_per_update, at_least=1)


@dataclass
class RelocationConfig:
    """When prompts move, which, and where to.

    Args:
        idleness: The score I_k that finds the prompt to prune. `"gate"` (default) is first order in the weight of the
            prompt's key in the attention. `"taylor"` is Eq. 6 of the paper, which under LayerNorm is close to noise.
        significance: A prompt is pruned when its score is above this many standard errors of it (over images). 0.0
            (default) is the paper's rule "above 0"; 2.0 asks for evidence.
        warmup_epochs: Epochs before the first move, at least 1: the first epoch's scores have to exist.
        ppo: Settings of the allocation policy.
        seed: Seed of the relocator's own random generator. Dropout and shuffling draw from others.

    Raises:
        ValueError: If a value is out of its range.
    """

    idleness: str = "gate"
    significance: float = 0.0
    warmup_epochs: int = 1
    ppo: PPOConfig = field(default_factory=PPOConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.ppo, dict):
            self.ppo = PPOConfig(**self.ppo)
        _check_choice("idleness", self.idleness, ("gate", "taylor"))
        _check_range("significance", self.significance, at_least=0)
        _check_range("warmup_epochs", self.warmup_epochs, at_least=1)


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}.")


def _check_range(
    name: str,
    value: float,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> None:
    rules = []
    if above is not None:
        rules.append((value > above, f"above {above}"))
    if at_least is not None:
        rules.append((value >= at_least, f"at least {at_least}"))
    if at_most is not None:
        rules.append((value <= at_most, f"at most {at_most}"))
    if not all(holds for holds, _ in rules):
        raise ValueError(f"`{name}` must be {' and '.join(rule for _, rule in rules)}, got {value}.")
