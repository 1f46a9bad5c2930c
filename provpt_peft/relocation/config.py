"""`RelocationConfig`: what training needs to know to relocate prompts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from numbers import Integral, Real
from typing import Any

from ..config import make_plain


@dataclass
class PPOConfig:
    """Settings of PPO, the policy that gives pruned prompts to blocks. Its other settings are constants in `ppo.py`.

    Args:
        gamma: Discount of later rewards, in [0, 1]. The paper uses 1; at 0 each move is judged by its own reward.
        worth_coef: Weight of each block's worth in the logits, at least 0. A block's worth is the mean of -I_k
            over its prompts, standardised over blocks. The paper uses 0; with larger values the policy
            starts near the greedy one.
    """

    gamma: float = 0.0
    worth_coef: float = 2.0

    def __post_init__(self) -> None:
        make_plain(self, PPOConfig)
        _check_number("gamma", self.gamma, "a number in [0, 1]", lambda gamma: 0 <= gamma <= 1)
        _check_number(
            "worth_coef", self.worth_coef, "a finite number of at least 0", lambda weight: 0 <= weight < math.inf
        )


@dataclass
class RelocationConfig:
    """When prompts move, which ones, and where to.

    `RelocationConfig.preset(name)` gives the strategies of the paper by name.

    Args:
        idleness: The score I_k that finds the prompt to prune, in loss units; above 0 means idle. `"activity"`
            (default): a twentieth of the mean activity minus the prompt's own, where activity is the mean over images
            of how much the prompt's contribution changes the loss, to first order and whatever the sign. `"fisher"`:
            Eq. 4 to second order in that contribution, with the images' squared gradients as the curvature.
            `"taylor"`: Eq. 6 of the paper, which LayerNorm makes close to noise. `"exact"`: Eq. 4 itself, with N + 1
            forward passes over the score batches. Or a function that takes a
            [`Measurement`][provpt_peft.relocation.measure.Measurement] and returns an `Idleness`.
        allocator: The policy: `"ppo"` (the paper's Alc2), `"thompson"` (Alc1), `"greedy"`, `"uniform"`. Or a function
            or class that takes the number of blocks and a random generator, and makes a
            [`Policy`][provpt_peft.relocation.policies.Policy].
        adjust: How the distribution is adjusted. `"relocate"` (default) is Algo. 1. The others are for ablations:
            `"random"` prunes random prompts (the paper's Prn1), `"naive_rl"` lets PPO choose the source block as well,
            `"prune"` removes `prune_share` of the prompts once and for good, `"add"` adds prompts from the adapter's
            reserve.
        check_moves: Whether moves are checked, so that they do no harm where nothing is to be won. The last prompt of
            a block stays (with `adjust="relocate"`), and a move from one block to another is undone at once if the
            loss on the score images is higher after it, at the cost of a forward pass.
        prompts_per_relocation: Number of prompts that may move in one relocation, at least 1.
        relocate_every: `"epoch"`, or a number of optimizer steps for large data sets. The callback follows it; in a
            custom training loop, call `relocate` that often.
        warmup_epochs: Epochs, or periods of `relocate_every` steps, before the first move, at least 1.
        settle: The last part of training in which nothing moves, a share in [0, 1).
        score_images: Number of images on which scores and losses are measured, at least 1. The callback takes them
            from the training loader; in a custom training loop, pass that many to `Relocator`.
        prune_share: With `adjust="prune"`: the share of the prompts that is removed, in (0, 1).
        ppo: Settings of PPO, as an object or a dict.
        seed: Seed of the relocator's own random generator. Dropout and shuffling draw from others.

    Raises:
        ValueError: If a value is out of its range.
    """

    idleness: str | Callable[..., Any] = "activity"
    allocator: str | Callable[..., Any] = "ppo"
    adjust: str = "relocate"
    check_moves: bool = True
    prompts_per_relocation: int = 1
    relocate_every: str | int = "epoch"
    warmup_epochs: int = 1
    settle: float = 0.5
    score_images: int = 32
    prune_share: float = 0.5
    ppo: PPOConfig = field(default_factory=PPOConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        make_plain(self, RelocationConfig)
        if isinstance(self.ppo, dict):
            self.ppo = PPOConfig(**self.ppo)
        if not isinstance(self.ppo, PPOConfig):
            raise ValueError(
                f"`ppo` must be a PPOConfig or a dict of its settings, got {self.ppo!r}. Omit it for the defaults."
            )
        _check_choice("idleness", self.idleness, IDLENESS, ", or a function that takes a Measurement")
        _check_choice("allocator", self.allocator, ALLOCATORS, ", or a class or function that makes a Policy")
        _check_choice("adjust", self.adjust, ADJUSTMENTS)
        if not isinstance(self.check_moves, bool):
            raise ValueError(f"`check_moves` must be True or False, got {self.check_moves!r}.")
        if self.relocate_every != "epoch":
            _check_count("relocate_every", self.relocate_every, "'epoch' or ")
        for name in ("prompts_per_relocation", "warmup_epochs", "score_images"):
            _check_count(name, getattr(self, name))
        _check_number("settle", self.settle, "a number in [0, 1)", lambda share: 0 <= share < 1)
        _check_number("prune_share", self.prune_share, "a number in (0, 1)", lambda share: 0 < share < 1)
        _check_number("seed", self.seed, "a whole number", lambda seed: True, Integral)

    def settings(self) -> dict[str, Any]:
        """The settings as plain values, for records. Functions, classes and objects become names."""
        settings = {setting.name: getattr(self, setting.name) for setting in fields(self)}
        for name in ("idleness", "allocator"):
            if not isinstance(settings[name], str):
                settings[name] = getattr(settings[name], "__name__", type(settings[name]).__name__)
        return settings | {"ppo": asdict(self.ppo)}

    @classmethod
    def preset(cls, name: str, **changes: Any) -> RelocationConfig:
        """The settings of a named strategy, with changes if any are given.

        `"default"` is `RelocationConfig()`, `"paper"` is Algo. 1 with Eq. 6, the letters are the rows of the paper's
        Tab. 3, and `"adding"` is the variant in its appendix. The letters use `"fisher"`, since Eq. 6 is close to
        noise. (A) and (B) differ in how many prompts the model starts with; choose their `prune_share` on
        validation data. `"adding"` needs a reserve of prompts: `ProVPTConfig(num_prompts=…, reserve=…)`. A dict for
        `ppo` changes only the settings that it names.

        Raises:
            ValueError: If there is no such preset, or a value is out of its range.
        """
        _check_choice("name", name, tuple(PRESETS))
        preset = PRESETS[name]
        if isinstance(changes.get("ppo"), dict):
            changes["ppo"] = preset.get("ppo", {}) | changes["ppo"]
        return cls(**(preset | changes))


IDLENESS = ("activity", "fisher", "taylor", "exact")
ALLOCATORS = ("ppo", "thompson", "greedy", "uniform")
ADJUSTMENTS = ("relocate", "random", "naive_rl", "prune", "add")
_PAPER: dict[str, Any] = {
    "idleness": "fisher",
    "check_moves": False,
    "settle": 0.0,
    "ppo": {"gamma": 1.0, "worth_coef": 0.0},
}
PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": _PAPER | {"idleness": "taylor"},
    "A": _PAPER | {"adjust": "prune"},
    "B": _PAPER | {"adjust": "prune"},
    "C": _PAPER | {"adjust": "naive_rl"},
    "D": _PAPER | {"adjust": "random", "allocator": "thompson"},
    "E": _PAPER | {"adjust": "random"},
    "F": _PAPER | {"allocator": "thompson"},
    "G": _PAPER,
    "adding": _PAPER | {"adjust": "add"},
}


def _check_choice(name: str, value: Any, choices: tuple[str, ...], otherwise: str = "") -> None:
    if value not in choices and not (otherwise and callable(value)):
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}{otherwise}, got {value!r}.")


def _check_number(name: str, value: Any, rule: str, holds: Callable[[Any], bool], kind: type = Real) -> None:
    if not isinstance(value, kind) or isinstance(value, bool) or not holds(value):
        raise ValueError(f"`{name}` must be {rule}, got {value!r}.")


def _check_count(name: str, value: Any, instead: str = "") -> None:
    _check_number(name, value, f"{instead}a whole number of at least 1", lambda count: count >= 1, Integral)
