import pytest

from provpt_peft import PPOConfig, ProVPTConfig, RelocationConfig


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


def test_relocation_config_takes_ppo_settings_as_a_dict():
    assert RelocationConfig(ppo={"clip_coef": 0.1}).ppo == PPOConfig(clip_coef=0.1)
