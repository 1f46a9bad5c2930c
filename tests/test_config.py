import json

import pytest

from provpt_peft import PPOConfig, ProVPTConfig, RelocationConfig
from provpt_peft.relocation.config import PRESETS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(num_prompts=0), r"`num_prompts` must be at least 1, got 0"),
        (dict(num_prompts=-3), r"`num_prompts` must be at least 1, got -3"),
        (dict(num_prompts=2.5), r"`num_prompts` must be at least 1, got 2.5"),
        (dict(num_prompts=True), r"`num_prompts` must be at least 1, got True"),
        (dict(reserve=-1), r"`reserve` must be a whole number from 0 on, got -1"),
        (dict(num_prompts=[]), r"`num_prompts` as a list must hold whole numbers"),
        (dict(num_prompts=[0, 0]), r"not all of them 0, got \[0, 0\]"),
        (dict(num_prompts=[2, -1]), r"got \[2, -1\]"),
        (dict(prompt_dropout=1.0), r"`prompt_dropout` must be in \[0, 1\), got 1.0"),
        (dict(prompt_dropout=-0.1), r"`prompt_dropout` must be in \[0, 1\), got -0.1"),
        (dict(task_type="SEQ_CLS"), r"`task_type` names text tasks .* got 'SEQ_CLS'"),
        (dict(modules_to_save="classifier"), r"`modules_to_save` must be a list .* 'classifier'. Give .'classifier'."),
        (dict(task_type="FEATURE_EXTRACTION"), r"`task_type` names text tasks"),
        (dict(num_blocks=0), r"`num_blocks` must be a whole number from 1 to 10000, got 0"),
        (dict(num_blocks=10**9), r"`num_blocks` must be a whole number from 1 to 10000, got 1000000000"),
        (dict(num_blocks="4"), r"`num_blocks` must be a whole number from 1 to 10000, got '4'"),
        (dict(backbone={"block": "MyLayer"}), r"missing: \['attention', 'key', 'norm', 'value'\], unknown: \[\]"),
    ],
)
def test_bad_adapter_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        ProVPTConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(idleness="best"), r"`idleness` must be one of fisher, taylor, exact, or a function .*, got 'best'"),
        (dict(warmup_epochs=0), r"`warmup_epochs` must be a whole number from 1 on, got 0"),
        (dict(adjust="move"), r"`adjust` must be one of relocate, random, naive_rl, prune, add, got 'move'"),
        (dict(allocator="best"), r"`allocator` must be one of ppo, thompson, greedy, uniform, or a class.*got 'best'"),
        (dict(allocator="naive_rl"), r"`allocator` must be one of .*, got 'naive_rl'"),
        (dict(prompts_per_relocation=1.5), r"`prompts_per_relocation` must be a whole number from 1 on, got 1.5"),
        (dict(prompts_per_relocation=0), r"`prompts_per_relocation` must be a whole number from 1 on, got 0"),
        (dict(prompts_per_relocation=True), r"`prompts_per_relocation` must be a whole number from 1 on, got True"),
        (dict(relocate_every="step"), r"`relocate_every` must be 'epoch' or a whole number from 1 on, got 'step'"),
        (dict(relocate_every=0), r"`relocate_every` must be 'epoch' or a whole number from 1 on, got 0"),
        (dict(settle=1.0), r"`settle` must be a number from 0 on and below 1, got 1.0"),
        (dict(settle=-0.1), r"`settle` must be a number from 0 on and below 1, got -0.1"),
        (dict(score_images=0), r"`score_images` must be a whole number from 1 on, got 0"),
        (dict(score_images="8"), r"`score_images` must be a whole number from 1 on, got '8'"),
        (dict(prune_share=1.0), r"`prune_share` must be a number above 0 and below 1, got 1.0"),
        (dict(prune_share=0), r"`prune_share` must be a number above 0 and below 1, got 0"),
        (dict(seed=0.5), r"`seed` must be a whole number, got 0.5"),
        (dict(ppo=1), r"`ppo` must be a PPOConfig or a dict of its settings, got 1"),
    ],
)
def test_bad_relocation_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        RelocationConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(gamma=1.5), r"`gamma` must be a number from 0 to 1, got 1.5"),
        (dict(gamma=-0.5), r"`gamma` must be a number from 0 to 1, got -0.5"),
        (dict(worth_coef=-1), r"`worth_coef` must be a number from 0 on, got -1"),
        (dict(worth_coef=float("nan")), r"`worth_coef` must be a number from 0 on, got nan"),
    ],
)
def test_bad_ppo_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(**settings)


@pytest.mark.parametrize(
    "gone", ["trigger", "significance", "reward", "start", "screen", "score_every", "discount", "clip_coef"]
)
def test_settings_that_are_gone_are_refused_by_name(gone):
    with pytest.raises(TypeError, match=f"'{gone}'"):
        RelocationConfig(**{gone: 1})
    with pytest.raises(TypeError, match=f"'{gone}'"):
        RelocationConfig(ppo={gone: 1})


def test_presets():
    assert RelocationConfig.preset("default") == RelocationConfig()
    paper = RelocationConfig.preset("paper", seed=7)
    assert (paper.idleness, paper.adjust, paper.allocator, paper.settle) == ("taylor", "relocate", "ppo", 0.0)
    assert (paper.ppo.gamma, paper.ppo.worth_coef, paper.seed) == (1.0, 0.0, 7)
    assert RelocationConfig.preset("paper", ppo={"gamma": 0.5}).ppo == PPOConfig(gamma=0.5, worth_coef=0.0)
    assert RelocationConfig.preset("paper", ppo=PPOConfig(gamma=0.5)).ppo == PPOConfig(gamma=0.5)
    assert PRESETS["paper"]["ppo"] == {"gamma": 1.0, "worth_coef": 0.0}
    rows = {name: RelocationConfig.preset(name) for name in PRESETS}
    found = {name: (row.idleness, row.adjust, row.allocator) for name, row in rows.items()}
    assert found == {
        "default": ("fisher", "relocate", "ppo"),
        "paper": ("taylor", "relocate", "ppo"),
        "A": ("fisher", "prune", "ppo"),
        "B": ("fisher", "prune", "ppo"),
        "C": ("fisher", "naive_rl", "ppo"),
        "D": ("fisher", "random", "thompson"),
        "E": ("fisher", "random", "ppo"),
        "F": ("fisher", "relocate", "thompson"),
        "G": ("fisher", "relocate", "ppo"),
        "adding": ("fisher", "add", "ppo"),
    }
    assert all(row.settle == 0.0 for name, row in rows.items() if name != "default")
    with pytest.raises(ValueError, match="`name` must be one of default, paper, A, B, C, D, E, F, G, adding, got 'H'"):
        RelocationConfig.preset("H")


def test_relocation_config_takes_ppo_settings_as_a_dict():
    assert RelocationConfig(ppo={"gamma": 0.1}).ppo == PPOConfig(gamma=0.1)


def test_settings_are_plain_and_make_the_same_config_again():
    config = RelocationConfig(relocate_every=50, allocator="thompson", ppo={"gamma": 0.5})
    settings = config.settings()
    assert json.loads(json.dumps(settings)) == settings
    assert settings["ppo"] == {"gamma": 0.5, "worth_coef": 2.0}
    assert RelocationConfig(**settings) == config

    class Mine:
        def __call__(self, num_blocks, generator):
            pass

    def own_score(measurement):
        pass

    handed_in = RelocationConfig(idleness=own_score, allocator=Mine).settings()
    assert (handed_in["idleness"], handed_in["allocator"]) == ("own_score", "Mine")
    assert RelocationConfig(allocator=Mine()).settings()["allocator"] == "Mine"
