import json

import numpy as np
import pytest
import tiny
from peft import get_peft_model

from provpt_peft import PPOConfig, ProVPTConfig, RelocationConfig
from provpt_peft.relocation.config import PRESETS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(num_prompts=0), r"`num_prompts` must be at least 1, got 0"),
        (dict(num_prompts=-3), r"`num_prompts` must be at least 1, got -3"),
        (dict(num_prompts=2.5), r"`num_prompts` must be at least 1, got 2.5"),
        (dict(num_prompts=True), r"`num_prompts` must be at least 1, got True"),
        (dict(reserve=-1), r"`reserve` must be a whole number of at least 0, got -1"),
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
        (dict(prompt_dropout="0.1"), r"`prompt_dropout` must be in \[0, 1\), got '0.1'"),
        (dict(prompt_dropout=True), r"`prompt_dropout` must be in \[0, 1\), got True"),
        (dict(image_size=[56]), r"`image_size` must be a height and a width from 1 to 10000 pixels, got \[56\]"),
        (dict(image_size=[56, 0]), r"`image_size` must be a height and a width from 1 to 10000 pixels"),
        (dict(image_size=[10**10, 56]), r"`image_size` must be a height and a width from 1 to 10000 pixels"),
        (dict(shallow="no"), r"`shallow` must be True or False, got 'no'"),
        (dict(backbone_dropout=1), r"`backbone_dropout` must be True or False, got 1"),
        (dict(backbone="MyLayer"), r"`backbone` must be a dict, got 'MyLayer'"),
        (dict(backbone={"block": "MyLayer"}), r"missing: \['attention', 'key', 'norm', 'value'\], unknown: \[\]"),
    ],
)
def test_bad_adapter_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        ProVPTConfig(**settings)


MINE = {"block": "B", "attention": "a", "norm": "n", "key": "a.k", "value": "a.v"}


@pytest.mark.parametrize(
    ("settings", "plain"),
    [
        (dict(num_prompts=np.int64(3)), dict(num_prompts=3)),
        (dict(num_prompts=(1, np.int32(0))), dict(num_prompts=[1, 0])),
        (dict(num_prompts=np.array(3)), dict(num_prompts=3)),
        (dict(num_prompts=np.array([1, 0])), dict(num_prompts=[1, 0])),
        (dict(reserve=np.int8(2), prompt_dropout=np.float32(0.5)), dict(reserve=2, prompt_dropout=0.5)),
        (dict(shallow=np.True_, backbone_dropout=np.False_), dict(shallow=True, backbone_dropout=False)),
        (dict(modules_to_save=("classifier",)), dict(modules_to_save=["classifier"])),
        (dict(backbone=MINE | {"not_in": ("Text",)}), dict(backbone=MINE | {"not_in": ["Text"]})),
    ],
)
def test_adapter_settings_are_kept_as_a_file_has_them(tmp_path, settings, plain):
    config = ProVPTConfig(**settings)
    given = {name: getattr(config, name) for name in plain}
    assert json.dumps(given) == json.dumps(plain)
    config.save_pretrained(tmp_path)
    assert ProVPTConfig.from_pretrained(tmp_path) == config


def test_an_adapter_s_own_file_fits_beside_it(tmp_path):
    """The description of a backbone has come back from JSON, where there are no tuples."""
    description = {
        "block": "ViTLayer", "attention": "attention", "norm": "layernorm_before", "key": "attention.k_proj",
        "value": "attention.v_proj", "not_in": ("Text",),
    }  # fmt: skip
    model = get_peft_model(tiny.make("vit"), ProVPTConfig(num_prompts=np.int64(2), backbone=description))
    model.save_pretrained(tmp_path)
    model.load_adapter(tmp_path, "again")
    assert model.base_model.prompt_distribution("again") == [2] * 4


@pytest.mark.parametrize(
    "settings",
    [
        dict(score_images=np.int64(8), relocate_every=np.int64(2), settle=np.float64(0.25), seed=np.int64(1)),
        dict(ppo=PPOConfig(gamma=np.float32(0.5), worth_coef=np.int64(1))),
        dict(prompts_per_relocation=np.int64(2), warmup_epochs=np.int64(2), prune_share=np.float64(0.5)),
    ],
)
def test_relocation_settings_of_numpy_can_be_recorded(settings):
    config = RelocationConfig(**settings)
    assert RelocationConfig(**json.loads(json.dumps(config.settings()))) == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            dict(idleness="best"),
            r"`idleness` must be one of activity, fisher, taylor, exact, or a function that .*, got 'best'",
        ),
        (dict(warmup_epochs=0), r"`warmup_epochs` must be a whole number of at least 1, got 0"),
        (dict(adjust="move"), r"`adjust` must be one of relocate, random, naive_rl, prune, add, got 'move'"),
        (dict(allocator="best"), r"`allocator` must be one of ppo, thompson, greedy, uniform, or a class.*got 'best'"),
        (dict(allocator="naive_rl"), r"`allocator` must be one of .*, got 'naive_rl'"),
        (dict(prompts_per_relocation=1.5), r"`prompts_per_relocation` must be a whole number of at least 1, got 1.5"),
        (dict(prompts_per_relocation=0), r"`prompts_per_relocation` must be a whole number of at least 1, got 0"),
        (dict(prompts_per_relocation=True), r"`prompts_per_relocation` must be a whole number .*, got True"),
        (dict(relocate_every="step"), r"`relocate_every` must be 'epoch' or a whole number of at least 1, got 'step'"),
        (dict(relocate_every=0), r"`relocate_every` must be 'epoch' or a whole number of at least 1, got 0"),
        (dict(settle=1.0), r"`settle` must be a number in \[0, 1\), got 1.0"),
        (dict(settle=-0.1), r"`settle` must be a number in \[0, 1\), got -0.1"),
        (dict(score_images=0), r"`score_images` must be a whole number of at least 1, got 0"),
        (dict(score_images="8"), r"`score_images` must be a whole number of at least 1, got '8'"),
        (dict(prune_share=1.0), r"`prune_share` must be a number in \(0, 1\), got 1.0"),
        (dict(prune_share=0), r"`prune_share` must be a number in \(0, 1\), got 0"),
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
        (dict(gamma=1.5), r"`gamma` must be a number in \[0, 1\], got 1.5"),
        (dict(gamma=-0.5), r"`gamma` must be a number in \[0, 1\], got -0.5"),
        (dict(worth_coef=-1), r"`worth_coef` must be a finite number of at least 0, got -1"),
        (dict(worth_coef=float("inf")), r"`worth_coef` must be a finite number of at least 0, got inf"),
        (dict(worth_coef=float("nan")), r"`worth_coef` must be a finite number of at least 0, got nan"),
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


def test_defaults():
    assert RelocationConfig().settings() == {
        "idleness": "activity", "allocator": "ppo", "adjust": "relocate", "check_moves": True,
        "prompts_per_relocation": 1, "relocate_every": "epoch", "warmup_epochs": 1, "settle": 0.5, "score_images": 32,
        "prune_share": 0.5, "ppo": {"gamma": 0.0, "worth_coef": 2.0}, "seed": 0,
    }  # fmt: skip


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
        "default": ("activity", "relocate", "ppo"),
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
    assert all(row.check_moves == (name == "default") for name, row in rows.items())
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
