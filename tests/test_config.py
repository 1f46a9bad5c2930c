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
        (dict(backbone={"block": "MyLayer"}), r"missing: \['attention', 'key', 'norm', 'value'\], unknown: \[\]"),
    ],
)
def test_bad_adapter_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        ProVPTConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(idleness="best"), r"`idleness` must be one of .*, got 'best'"),
        (dict(significance=-1), r"`significance` must be at least 0, got -1"),
        (dict(warmup_epochs=0), r"`warmup_epochs` must be at least 1, got 0"),
        (dict(adjust="move"), r"`adjust` must be one of relocate, add, prune, got 'move'"),
        (dict(trigger="never"), r"`trigger` must be one of positive, always, opportunity, got 'never'"),
        (dict(reward="loss"), r"`reward` must be one of paper, counterfactual, got 'loss'"),
        (dict(allocator="best"), r"`allocator` must be one of ppo, thompson, greedy, uniform, naive_rl, got 'best'"),
        (dict(start="zero"), r"`start` must be one of mean, own, fresh, best, got 'zero'"),
        (dict(prompts_per_relocation=1.5), r"`prompts_per_relocation` must be a whole number, got 1.5"),
        (dict(screen="2"), r"`screen` must be a whole number, got '2'"),
        (dict(prompts_per_relocation=0), r"`prompts_per_relocation` must be at least 1, got 0"),
        (dict(relocate_every="step"), r"`relocate_every` must be 'epoch' or a number .* from 1 on, got 'step'"),
        (dict(relocate_every=0), r"`relocate_every` must be 'epoch' or a number .* from 1 on, got 0"),
        (dict(settle=1.0), r"`settle` must be at least 0 and below 1, got 1.0"),
        (dict(score_images=-1), r"`score_images` must be at least 0, got -1"),
        (dict(screen=-1), r"`screen` must be at least 0, got -1"),
        (dict(score_every=0), r"`score_every` must be at least 1, got 0"),
        (dict(prune_share=1.0), r"`prune_share` must be above 0 and below 1, got 1.0"),
        (dict(adjust="add", allocator="naive_rl"), r"takes them from the reserve. Use another allocator"),
    ],
)
def test_bad_relocation_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        RelocationConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(discount=1.5), r"`discount` must be at least 0 and at most 1, got 1.5"),
        (dict(clip_coef=0), r"`clip_coef` must be above 0, got 0"),
        (dict(moves_per_update=0), r"`moves_per_update` must be at least 1, got 0"),
        (dict(actor_learning_rate=0), r"`actor_learning_rate` must be above 0, got 0"),
    ],
)
def test_bad_ppo_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(**settings)


def test_presets():
    assert RelocationConfig.preset("default") == RelocationConfig()
    paper = RelocationConfig.preset("paper", seed=7)
    assert (paper.idleness, paper.trigger, paper.significance, paper.reward) == ("taylor", "positive", 0.0, "paper")
    assert (paper.allocator, paper.ppo.discount, paper.ppo.worth_coef, paper.seed) == ("ppo", 1.0, 0.0, 7)
    assert RelocationConfig.preset("paper", ppo={"ent_coef": 0.05}).ppo == PPOConfig(
        discount=1.0, worth_coef=0.0, ent_coef=0.05
    )
    assert RelocationConfig.preset("paper", ppo=PPOConfig(ent_coef=0.05)).ppo == PPOConfig(ent_coef=0.05)
    assert PRESETS["paper"]["ppo"] == {"discount": 1.0, "worth_coef": 0.0}
    with pytest.raises(ValueError, match="`name` must be one of default, paper, A, B, C, D, E, F, G, adding, got 'H'"):
        RelocationConfig.preset("H")


def test_relocation_config_takes_ppo_settings_as_a_dict():
    assert RelocationConfig(ppo={"clip_coef": 0.1}).ppo == PPOConfig(clip_coef=0.1)
