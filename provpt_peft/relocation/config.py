"""`RelocationConfig`: what training needs to know to relocate prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch


@dataclass
class PPOConfig:
    """Settings of PPO, the policy that gives pruned prompts to blocks. Names as in CleanRL.

    Args:
        actor_learning_rate: Learning rate of the actor (paper, Appendix "PPO Hyper-Parameters").
        critic_learning_rate: Learning rate of the critic (same place).
        discount: Discount of later rewards, in [0, 1]. 1 is the paper's; at 0 each move is judged by its own reward.
        gae_lambda: Lambda of generalised advantage estimation, in [0, 1]. 1 is the plain return.
        clip_coef: Clip of the probability ratio, above 0 (paper: 0.2).
        ent_coef: Weight of the entropy bonus, from 0 on.
        vf_coef: Weight of the value loss, above 0.
        update_epochs: Passes over the collected moves in an update, at least 1.
        moves_per_update: Moves collected before an update, at least 1.
        worth_coef: Weight in the logits of what a prompt of each block earns on average now (standardised over
            blocks), from 0 on. 0 is the paper's; above it, the policy begins near the greedy one.
    """

    actor_learning_rate: float = 3e-4
    critic_learning_rate: float = 1e-3
    discount: float = 0.0
    gae_lambda: float = 1.0
    clip_coef: float = 0.2
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    update_epochs: int = 10
    moves_per_update: int = 2
    worth_coef: float = 2.0

    def __post_init__(self) -> None:
        _check_range("actor_learning_rate", self.actor_learning_rate, above=0)
        _check_range("critic_learning_rate", self.critic_learning_rate, above=0)
        _check_range("discount", self.discount, at_least=0, at_most=1)
        _check_range("gae_lambda", self.gae_lambda, at_least=0, at_most=1)
        _check_range("clip_coef", self.clip_coef, above=0)
        _check_range("ent_coef", self.ent_coef, at_least=0)
        _check_range("vf_coef", self.vf_coef, above=0)
        _check_range("update_epochs", self.update_epochs, at_least=1, whole=True)
        _check_range("moves_per_update", self.moves_per_update, at_least=1, whole=True)
        _check_range("worth_coef", self.worth_coef, at_least=0)


@dataclass
class RelocationConfig:
    """When prompts move, which, and where to.

    `RelocationConfig.preset(name)` gives the strategies of the paper by name.

    Args:
        adjust: What is done to the distribution. `"relocate"` (default) prunes a prompt and gives it to a block.
            `"add"` gives a prompt of the bank's reserve (block 0) to a block, the adding-based variant of the paper's
            appendix. `"prune"` takes `prune_share` of the prompts out, once and for good: strategies (A) and (B).
        idleness: The score I_k that finds the prompt to prune. `"fisher"` (default): to second order in the prompt's
            share in its block's output, with the squares of the images' gradients for the curvature. `"gate"`: first
            order in the weight of the prompt's key. `"taylor"`: Eq. 6 of the paper, which under LayerNorm is close to
            noise. `"exact"`: Eq. 4 itself, N + 1 forward passes over the score batches. `"norm"`: the shortest prompt,
            and `"random"`: any prompt (the paper's Prn1); beside both, `"fisher"` is measured for the state and the
            reward.
        trigger: When a prompt moves. `"positive"`: if its score is above 0, the paper's rule. `"always"`: the most
            idle one each time. `"opportunity"`: if the prompts of the chosen block earn more on average than the
            prompt does where it is.
        significance: Standard errors over images by which the score has to be above 0, or the gain of an opportunity.
            0.0 is the paper's rule; 2.0 asks for evidence. Those of exact scores are over score batches, of which it
            needs two.
        reward: What the policy learns from. `"paper"`: Eq. 8. `"counterfactual"`: what the moved prompt earns at its
            new block after tuning, minus its next score.
        allocator: The policy: `"ppo"` (the paper's Alc2), `"thompson"` (Alc1), `"greedy"`, `"uniform"`, or
            `"naive_rl"`, which chooses the source block as well and takes any prompt of it, whatever the trigger.
        start: What a moved prompt starts from: `"mean"` of the prompts in its new block, its `"own"` vector, a
            `"fresh"` one, or a copy of the `"best"` prompt there.
        prompts_per_relocation: Prompts that may move in a relocation, at least 1.
        relocate_every: `"epoch"`, or a number of optimizer steps for large data sets. The callback heeds it; in a loop
            of one's own, `relocate` is called that often.
        warmup_epochs: Epochs, or periods of `relocate_every` steps, before the first move, at least 1: scores have to
            exist.
        settle: The last part of training in which nothing moves, a share in [0, 1).
        score_images: Training images on which scores and losses are measured before each relocation, on the model as
            it stands, in eval mode; the callback chooses them once, by `choose_score_images`. 0 gathers scores and
            losses in the training steps instead, as a `Relocator` without `score_batches` does.
        screen: With score batches: of so many prompts with the highest scores, the exact score is measured as well, a
            forward pass each, and decides among them. 0 measures none.
        score_every: With `score_images=0`: scores are gathered in every so many optimizer steps, at least 1.
        prune_share: With `adjust="prune"`: the share of the prompts that is taken out, in (0, 1).
        ppo: Settings of the policy `"ppo"` and `"naive_rl"`.
        seed: Seed of the relocator's own random generator. Dropout and shuffling draw from others.

    Raises:
        ValueError: If a value is out of its range.
    """

    adjust: str = "relocate"
    idleness: str = "fisher"
    trigger: str = "positive"
    significance: float = 0.0
    reward: str = "paper"
    allocator: str = "ppo"
    start: str = "mean"
    prompts_per_relocation: int = 1
    relocate_every: str | int = "epoch"
    warmup_epochs: int = 1
    settle: float = 0.5
    score_images: int = 32
    screen: int = 0
    score_every: int = 1
    prune_share: float = 0.5
    ppo: PPOConfig = field(default_factory=PPOConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.ppo, dict):
            self.ppo = PPOConfig(**self.ppo)
        _check_choice("adjust", self.adjust, ("relocate", "add", "prune"))
        _check_choice("idleness", self.idleness, IDLENESS)
        _check_choice("trigger", self.trigger, ("positive", "always", "opportunity"))
        _check_range("significance", self.significance, at_least=0)
        _check_choice("reward", self.reward, ("paper", "counterfactual"))
        _check_choice("allocator", self.allocator, ALLOCATORS)
        _check_choice("start", self.start, ("mean", "own", "fresh", "best"))
        _check_range("prompts_per_relocation", self.prompts_per_relocation, at_least=1, whole=True)
        if self.relocate_every != "epoch" and not (isinstance(self.relocate_every, int) and self.relocate_every >= 1):
            raise ValueError(
                f"`relocate_every` must be 'epoch' or a number of optimizer steps from 1 on, got "
                f"{self.relocate_every!r}."
            )
        _check_range("warmup_epochs", self.warmup_epochs, at_least=1, whole=True)
        _check_range("settle", self.settle, at_least=0, below=1)
        _check_range("score_images", self.score_images, at_least=0, whole=True)
        _check_range("screen", self.screen, at_least=0, whole=True)
        _check_range("score_every", self.score_every, at_least=1, whole=True)
        _check_range("prune_share", self.prune_share, above=0, below=1)
        if self.adjust == "add" and self.allocator == "naive_rl":
            raise ValueError(
                '`allocator="naive_rl"` chooses a block to take a prompt from, but `adjust="add"` takes them from the '
                "reserve. Use another allocator."
            )

    def choose_score_images(self, count: int) -> list[int]:
        """Indices of the `score_images` (or all) of `count` training images that scores are measured on. The seed
        chooses them, so that they are the same in each relocation, in all processes and after a resume."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randperm(count, generator=generator)[: self.score_images].tolist()

    @classmethod
    def preset(cls, name: str, **changes: Any) -> RelocationConfig:
        """The settings of a strategy by name, as they are or with some changed.

        `"default"` is `RelocationConfig()`, `"paper"` is Algo. 1 as printed, the letters are the rows of the paper's
        Tab. 3, and `"adding"` is the variant of its appendix. The letters score as the default does, since Eq. 6 is
        close to noise. (A) and (B) differ in the budget that the model begins with; their `prune_share` is to be
        chosen on validation data. `"adding"` needs a reserve of prompts: `ProVPTConfig(num_prompts=…, reserve=…)`.

        Args:
            name: One of `PRESETS`.
            changes: Settings to change. A dict of some settings of `ppo` leaves the others as the preset has them.

        Raises:
            ValueError: If there is no such preset, or a value is out of its range.
        """
        _check_choice("name", name, tuple(PRESETS))
        preset = PRESETS[name]
        if isinstance(changes.get("ppo"), dict):
            changes["ppo"] = preset.get("ppo", {}) | changes["ppo"]
        return cls(**(preset | changes))


IDLENESS = ("fisher", "gate", "taylor", "exact", "norm", "random")
ALLOCATORS = ("ppo", "thompson", "greedy", "uniform", "naive_rl")
_PAPER: dict[str, Any] = {
    "trigger": "positive",
    "reward": "paper",
    "settle": 0.0,
    "ppo": {"discount": 1.0, "worth_coef": 0.0},
}
_TABLE_3 = _PAPER | {"idleness": "fisher"}
PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": _PAPER | {"idleness": "taylor", "allocator": "ppo"},
    "A": _TABLE_3 | {"adjust": "prune"},
    "B": _TABLE_3 | {"adjust": "prune"},
    "C": _TABLE_3 | {"allocator": "naive_rl"},
    "D": _TABLE_3 | {"idleness": "random", "allocator": "thompson"},
    "E": _TABLE_3 | {"idleness": "random", "allocator": "ppo"},
    "F": _TABLE_3 | {"allocator": "thompson"},
    "G": _TABLE_3 | {"allocator": "ppo"},
    "adding": _TABLE_3 | {"adjust": "add", "allocator": "ppo"},
}


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}.")


def _check_range(
    name: str,
    value: float,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    whole: bool = False,
) -> None:
    if whole and not isinstance(value, Integral):
        raise ValueError(f"`{name}` must be a whole number, got {value!r}.")
    rules = []
    if above is not None:
        rules.append((value > above, f"above {above}"))
    if at_least is not None:
        rules.append((value >= at_least, f"at least {at_least}"))
    if at_most is not None:
        rules.append((value <= at_most, f"at most {at_most}"))
    if below is not None:
        rules.append((value < below, f"below {below}"))
    if not all(holds for holds, _ in rules):
        raise ValueError(f"`{name}` must be {' and '.join(rule for _, rule in rules)}, got {value}.")
