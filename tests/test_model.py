"""Adapters: save, load, switch, delete, unload, bad input, dropout, checkpointing."""

import copy
import dataclasses
import gc
import logging
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny
import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Trainer, TrainingArguments

from examples.research.prepended import prepend_prompts
from provpt_peft import ProVPTConfig, Relocator


def logits(model, count=2, family="vit"):
    with torch.no_grad():
        return model(**tiny.inputs(family, count)).logits


def trained(family="vit", **config):
    """A prompted model whose prompts, blocks and head are unlike fresh ones, in eval mode."""
    return tiny.unlike_fresh(tiny.prompted(tiny.make(family), **config).eval())


# ---- save and load --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.parametrize("family", tiny.ALL_FAMILIES)
def test_saved_adapter_gives_the_same_predictions(tmp_path, family, low_cpu_mem_usage):
    model = trained(family)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny.make(family), tmp_path, low_cpu_mem_usage=low_cpu_mem_usage)
    assert torch.equal(logits(loaded, family=family), logits(model, family=family))
    assert torch.equal(loaded.base_model.prompt_blocks(), model.base_model.prompt_blocks())
    assert {tensor.device.type for tensor in loaded.state_dict().values()} == {"cpu"}


def test_saved_tensors(tmp_path):
    trained().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} == {
        "base_model.bank.provpt_prompts": ((12, 32), torch.float32),
        "base_model.bank.provpt_prompt_blocks": ((12, 5), torch.float32),
        "base_model.model.classifier.weight": ((3, 32), torch.float32),
        "base_model.model.classifier.bias": ((3,), torch.float32),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(num_hidden_layers=6),
            "An adapter only fits the number of blocks it was made for, but it was made for 4 blocks, .* model has 6",
        ),
        (dict(hidden_size=64), r"floating point of shape \(12, 64\), got .* of shape \(12, 32\)"),
    ],
)
def test_adapter_of_another_backbone_is_refused(tmp_path, change, message):
    # Without a head, since PEFT looks at that first.
    get_peft_model(tiny.make("vit"), ProVPTConfig(num_prompts=3)).save_pretrained(tmp_path)
    other = tiny.make("vit", **change)
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(other, tmp_path)


def test_adapter_with_a_list_of_prompts_is_refused_by_another_number_of_blocks(tmp_path):
    trained(num_prompts=[3, 3, 3, 3]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has a number for each of 4 blocks, and the model has 6"):
        PeftModel.from_pretrained(tiny.make("vit", num_hidden_layers=6), tmp_path)


def test_a_config_whose_adapter_could_not_be_made_is_as_it_was():
    config = ProVPTConfig(num_prompts=2, modules_to_save=["missing"])
    with pytest.raises(ValueError, match="missing"):
        get_peft_model(tiny.make("vit"), config)
    assert config.num_blocks is None
    config.modules_to_save = ["classifier"]
    assert get_peft_model(tiny.make("vit"), config).peft_config["default"] is config


def test_a_copy_of_a_config_does_not_bring_a_record_along(tmp_path):
    model = tiny.prompted(tiny.make("vit"))
    model.peft_config["default"].training = dict(epochs=3)
    model.save_pretrained(tmp_path)
    copied = dataclasses.replace(model.peft_config["default"], num_prompts=2)
    assert copied.training is not None
    assert get_peft_model(tiny.make("vit"), copied).peft_config["default"].training is None
    # The file's prompts have it.
    loaded = PeftModel.from_pretrained(tiny.make("vit"), tmp_path)
    assert loaded.peft_config["default"].training == dict(epochs=3)


def test_a_config_is_its_first_model_s_own_and_fits_others_too(tmp_path):
    config = ProVPTConfig(num_prompts=3)
    first = get_peft_model(tiny.make("vit"), config)
    # PEFT's own tests ask for the object.
    assert first.peft_config["default"] is config
    first.save_pretrained(tmp_path)
    assert ProVPTConfig.from_pretrained(tmp_path).num_blocks == config.num_blocks == 4
    config.training = dict(epochs=1)
    larger = get_peft_model(tiny.make("vit", num_hidden_layers=6), config)
    assert larger.base_model.prompt_distribution() == [3] * 6
    assert larger.peft_config["default"].training is None
    assert config.num_blocks == 4
    before = set(larger.state_dict())
    with pytest.raises(ValueError, match="it was made for 4 blocks, and the model has 6"):
        larger.load_adapter(tmp_path, "other")
    assert set(larger.state_dict()) == before
    assert list(larger.peft_config) == ["default"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("provpt_prompts", torch.zeros(0), r"must be floating point of shape \(12, 32\)"),
        ("provpt_prompts", torch.zeros(12, 32, dtype=torch.int64), r"must be floating point .* got torch.int64"),
        ("provpt_prompts", None, "prompts are missing"),
        ("provpt_prompt_blocks", torch.full((12,), 5), r"must be in 0 … 4, got 5 … 5"),
        ("provpt_prompt_blocks", torch.full((12,), -1), r"must be in 0 … 4, got -1 … -1"),
        ("provpt_prompt_blocks", torch.ones(11, dtype=torch.int64), r"int64 of \(12,\), got .*\(11,\)"),
        ("provpt_prompt_blocks", torch.ones(12), r"int64 of \(12,\), got torch.float32"),
        (
            "provpt_prompt_blocks",
            torch.eye(5)[:12],
            r"one-hot rows of shape \(12, 5\), .* got torch.float32 of .*\(5, 5\)",
        ),
        ("provpt_prompt_blocks", torch.ones(12, 4), r"one-hot rows of shape \(12, 5\), .* got torch.float32 of .*4\)"),
        ("provpt_prompt_blocks", torch.zeros(12, 0), r"got torch.float32 of shape \(12, 0\)"),
        ("provpt_prompt_blocks", torch.zeros(12, 5).to(torch.float8_e5m2), "got torch.float8_e5m2"),
        ("provpt_prompt_blocks", torch.zeros(12, 5), "must be finite with a maximum above 0"),
        ("provpt_prompt_blocks", torch.full((12, 5), torch.nan), "must be finite with a maximum above 0"),
        ("provpt_prompt_blocks", None, "the prompts' blocks are missing"),
        ("provpt_more", torch.ones(2), r"only hold tensors of the adapter, got \['base_model.bank.provpt_more'\]"),
    ],
)
def test_broken_tensors_are_refused_before_anything_changes(tmp_path, name, value, message):
    model = trained()
    model.save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors.pop(f"base_model.bank.{name}", None)
    if value is not None:
        tensors[f"base_model.bank.{name}"] = value
    save_file(tensors, path)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        model.load_adapter(tmp_path, "default")
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key])


def test_empty_prompts_are_not_saved(tmp_path):
    # What a sharded parameter looks like on a rank that does not hold it.
    model = trained()
    model.base_model.bank.provpt_prompts["default"].data = torch.zeros(0)
    with pytest.raises(ValueError, match="must be floating point"):
        model.save_pretrained(tmp_path)


# ---- moves ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "block", "error", "message"),
    [
        (12, 1, IndexError, r"`prompt` must be in 0 … 11, got 12"),
        (-1, 1, IndexError, r"`prompt` must be in 0 … 11, got -1"),
        (0, 5, ValueError, r"`block` must be in 0 … 4, got 5"),
        (0, -1, ValueError, r"`block` must be in 0 … 4, got -1"),
    ],
)
def test_bad_moves_change_nothing(prompt, block, error, message):
    tuner = tiny.prompted(tiny.make("vit")).base_model
    with pytest.raises(error, match=message):
        tuner.move_prompt(prompt, block)
    assert tuner.prompt_distribution() == [3, 3, 3, 3]


def test_prompt_blocks_is_a_copy():
    tuner = tiny.prompted(tiny.make("vit")).base_model
    tuner.prompt_blocks().zero_()
    assert tuner.prompt_distribution() == [3, 3, 3, 3]


def test_unknown_adapter_name():
    tuner = tiny.prompted(tiny.make("vit")).base_model
    with pytest.raises(ValueError, match=r"no adapter 'other'. The model has \['default'\]"):
        tuner.move_prompt(0, 1, adapter_name="other")


# ---- several adapters -----------------------------------------------------------------------------------------------


def test_two_adapters_keep_their_own_prompts_blocks_and_heads():
    model = trained()
    first = logits(model)
    model.add_adapter("foobar", ProVPTConfig(num_prompts=2, prompt_dropout=0.0, modules_to_save=["classifier"]))
    assert torch.equal(logits(model), first)
    model.set_adapter("foobar")
    second = logits(model)
    assert not torch.allclose(first, second)
    assert model.base_model.prompt_distribution() == [2, 2, 2, 2]
    assert model.base_model.prompts().requires_grad
    assert not model.base_model.prompts("default").requires_grad
    model.base_model.move_prompt(0, 3)
    model.set_adapter("default")
    assert torch.equal(logits(model), first)
    model.delete_adapter("foobar")
    assert torch.equal(logits(model), first)
    assert list(model.base_model.bank.provpt_prompts) == ["default"]
    assert list(model.base_model.bank.provpt_prompt_blocks) == ["default"]


def with_statistics():
    """A ViT with running statistics in the backbone and, without weights of their own, in the head."""
    vit = tiny.make("vit")
    tokens = vit.vit(tiny.images(1)).last_hidden_state.shape[1]
    vit.vit.layernorm = nn.Sequential(vit.vit.layernorm, nn.BatchNorm1d(tokens))
    vit.classifier = nn.Sequential(nn.BatchNorm1d(32, affine=False), vit.classifier)
    return vit.eval()


def test_running_statistics_of_frozen_parts_stay_and_those_of_the_head_are_saved(tmp_path):
    base = with_statistics()
    before = copy.deepcopy(base.state_dict())
    model = tiny.prompted(base).train()
    frozen, head = base.vit.layernorm[1], base.classifier
    untrained = head.modules_to_save["default"][0].running_mean.clone()
    for seed in range(3):
        model(pixel_values=tiny.images(4, seed=seed))
        with model.disable_adapter():
            model(pixel_values=tiny.images(4, seed=seed))
    assert torch.equal(frozen.running_mean, before["vit.layernorm.1.running_mean"])
    assert torch.equal(frozen.running_var, before["vit.layernorm.1.running_var"])
    assert torch.equal(head.original_module[0].running_mean, before["classifier.0.running_mean"])
    assert not torch.equal(head.modules_to_save["default"][0].running_mean, untrained)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(with_statistics(), tmp_path)
    assert torch.equal(logits(loaded), logits(model.eval()))
    # Those of a loaded head that is not trained stay as well, and a base model without prompts is the user's own.
    kept = loaded.base_model.model.classifier.modules_to_save["default"][0].running_mean.clone()
    loaded.train()(pixel_values=tiny.images(4))
    assert torch.equal(loaded.base_model.model.classifier.modules_to_save["default"][0].running_mean, kept)
    assert loaded.unload().vit.layernorm[1].training


def test_deleting_the_active_adapter_activates_the_next_with_its_head():
    model = trained()
    model.add_adapter("other", ProVPTConfig(num_prompts=2, prompt_dropout=0.0, modules_to_save=["classifier"]))
    model.set_adapter("other")
    other = logits(model)
    model.set_adapter("default")
    with pytest.warns(UserWarning, match="Setting active adapter to other"):
        model.delete_adapter("default")
    assert model.active_adapters == ["other"]
    assert torch.equal(logits(model), other)


def test_deleting_an_adapter_without_a_head_activates_the_next_with_its_head():
    model = trained()
    before = logits(model)
    model.add_adapter("bare", ProVPTConfig(num_prompts=2))
    model.set_adapter("bare")
    with pytest.warns(UserWarning, match="Setting active adapter to default"):
        model.delete_adapter("bare")
    assert torch.equal(logits(model), before)


def test_without_an_adapter_the_base_model_has_its_own_dropout_again():
    model = tiny.prompted(tiny.make("vit", hidden_dropout_prob=0.1)).train()
    dropouts = [module for module in model.base_model.model.modules() if isinstance(module, nn.Dropout)]
    assert dropouts
    assert not any(dropout.training for dropout in dropouts)
    model.delete_adapter("default")
    assert all(dropout.training for dropout in dropouts)


def test_labels_are_saved_after_the_adapter_that_was_trained_last_is_deleted(tmp_path):
    model = tiny.prompted(tiny.make("vit")).train()
    model.add_adapter("other", ProVPTConfig(num_prompts=1))
    model(pixel_values=tiny.images(2))
    with pytest.warns(UserWarning, match="Setting active adapter to other"):
        model.delete_adapter("default")
    model.config.id2label = {0: "daisy", 1: "rose", 2: "tulip"}
    model.save_pretrained(tmp_path)
    assert ProVPTConfig.from_pretrained(tmp_path / "other").id2label == {0: "daisy", 1: "rose", 2: "tulip"}


def test_prompts_in_a_model_in_eval_mode_are_not_dropped_out():
    model = tiny.prompted(tiny.make("vit").eval(), prompt_dropout=0.9)
    assert torch.equal(logits(model), logits(model))


def test_an_adapter_under_the_name_of_a_deleted_one_has_nothing_of_it():
    model = tiny.prompted(tiny.make("vit").bfloat16())
    for shallow in (True, False):
        model.add_adapter("other", ProVPTConfig(num_prompts=2, shallow=shallow))
        assert model.base_model.prompts("other").dtype == torch.float32
        if shallow:
            model.delete_adapter("other")
    model.base_model.move_prompt(0, 3, "other")
    assert model.base_model.prompt_distribution("other") == [1, 2, 3, 2]


@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_loading_a_second_adapter_leaves_the_first_one_s_trainability_alone(tmp_path, first, second):
    trained().save_pretrained(tmp_path)
    model = PeftModel.from_pretrained(tiny.make("vit"), tmp_path, is_trainable=first)
    before = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert any(before.values()) == first
    model.load_adapter(tmp_path, "other", is_trainable=second)
    after = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert {name: after[name] for name in before} == before
    assert after["base_model.bank.provpt_prompts.other"] == second


@pytest.mark.parametrize(
    "name", ["provpt", "pt_", "", "a.b", "classifier", "weight", "bank", "provpt_prompts", "modules_to_save"]
)
def test_adapter_names_that_peft_would_confuse_are_refused(name):
    # A second adapter called "classifier" would take the first one's head with it when that is saved.
    rule = "must not be part of the prefix 'provpt_', contain a dot or be a name in the path of"
    with pytest.raises(ValueError, match=rule):
        get_peft_model(tiny.make("vit"), ProVPTConfig(modules_to_save=["classifier"]), adapter_name=name)
    model = trained()
    with pytest.raises(ValueError, match=rule):
        model.add_adapter(name, ProVPTConfig())
    assert list(model.peft_config) == ["default"]


def test_a_head_that_would_confuse_an_adapter_s_name():
    model = get_peft_model(tiny.make("vit"), ProVPTConfig(), adapter_name="classifier")
    with pytest.raises(ValueError, match=r"must not be .*got 'classifier'"):
        model.add_adapter("other", ProVPTConfig(modules_to_save=["classifier"]))
    assert list(model.peft_config) == ["classifier"]


@pytest.mark.parametrize("name", ["layers", "vit", "attention", "0", "k_proj"])
def test_adapters_that_are_named_like_modules(tmp_path, name):
    model = trained(adapter_name=name)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny.make("vit"), tmp_path / name, adapter_name=name)
    assert torch.equal(logits(loaded), logits(model))


def test_adapters_whose_names_share_a_beginning(tmp_path):
    model = tiny.prompted(tiny.make("vit"), adapter_name="foo")
    model.add_adapter("foobar", ProVPTConfig(num_prompts=3, prompt_dropout=0.0, modules_to_save=["classifier"]))

    def tensors():
        return {
            name: tensor.clone()
            for name, tensor in model.state_dict().items()
            if name.endswith("foobar") or "foobar." in name
        }

    before = tensors()
    assert len(before) == 4
    model.base_model.move_prompt(0, 4, adapter_name="foo")
    model.save_pretrained(tmp_path, selected_adapters=["foo"])
    assert not (tmp_path / "foobar").exists()
    with pytest.warns(UserWarning, match="Setting active adapter to foobar"):
        model.delete_adapter("foo")
    after = tensors()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert after.keys() == before.keys()


def test_head_whose_name_begins_like_our_prefix(tmp_path):
    def make():
        model = tiny.make("vit")
        model.provpt_head = model.classifier
        del model.classifier
        return model

    model = tiny.prompted(make(), modules_to_save=["provpt_head"])
    with torch.no_grad():
        model.base_model.model.provpt_head.modules_to_save["default"].weight.fill_(7.0)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make(), tmp_path)
    assert (loaded.base_model.model.provpt_head.modules_to_save["default"].weight == 7.0).all()


def test_several_active_adapters_are_refused():
    model = tiny.prompted(tiny.make("vit"))
    model.add_adapter("other", ProVPTConfig())
    with pytest.raises(ValueError, match="one active adapter at a time"):
        model.base_model.set_adapter(["default", "other"])


# ---- taking it out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.ALL_FAMILIES)
def test_unload_gives_the_base_model_back(family):
    base = tiny.make(family)
    before = logits(base, family=family)
    keys = set(base.state_dict())
    configs = {name: module.config for name, module in base.named_modules() if hasattr(module, "config")}
    modules = [name for name, _ in base.named_modules()]
    model = tiny.prompted(base)
    model.train()
    unloaded = model.unload()
    assert unloaded is base
    assert set(base.state_dict()) == keys
    assert [name for name, _ in base.named_modules()] == modules
    for name, module in base.named_modules():
        assert getattr(module, "config", None) is configs.get(name)
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not hasattr(module, "provpt_block")
        assert not {"forward", "enable_input_require_grads"} & set(module.__dict__)
    assert all(module.training for module in base.modules())
    assert torch.equal(logits(base.eval(), family=family), before)
    model.unload()  # twice changes nothing


def test_unload_with_a_head_of_several_layers():
    base = tiny.make("vit")
    base.classifier = nn.Sequential(nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 3))
    model = tiny.unlike_fresh(tiny.prompted(base).eval())
    head = model.base_model.model.classifier.modules_to_save["default"]
    assert model.unload().classifier is head


def test_after_unload_nothing_is_saved_or_loaded(tmp_path):
    """The file would lack the head, and what is loaded would have no effect."""
    model = trained()
    expected = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    base = model.unload()
    calls = (
        lambda: model.load_adapter(tmp_path / "adapter", "again"),
        lambda: model.load_adapter(tmp_path / "adapter", "default"),
        lambda: model.add_adapter("again", ProVPTConfig(num_prompts=1)),
        lambda: model.save_pretrained(tmp_path / "empty"),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"`unload` has removed them.*`PeftModel\.from_pretrained`"):
            call()
    assert list(model.peft_config) == ["default"]
    plain = tiny.prompted(tiny.make("vit"), modules_to_save=None)
    plain.unload()
    plain.save_pretrained(tmp_path / "plain")  # of which nothing is missing
    assert (tmp_path / "plain" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "empty" / "adapter_model.safetensors").exists()
    assert torch.equal(logits(PeftModel.from_pretrained(base, tmp_path / "adapter")), expected)


def test_merging_is_refused_with_the_reason():
    model = tiny.prompted(tiny.make("vit"))
    for method in (model.merge_and_unload, model.merge_adapter, model.unmerge_adapter):
        with pytest.raises(ValueError, match=r"Prompts cannot be merged.*`unload\(\)`"):
            method()


def test_disabling_nests_and_survives_exceptions():
    base = tiny.make("vit")
    plain = logits(base)
    model = trained()
    prompted = logits(model)
    with pytest.raises(RuntimeError, match="inside"), model.disable_adapter():  # noqa: PT012
        assert torch.equal(logits(model), plain)
        with model.disable_adapter():
            assert torch.equal(logits(model), plain)
        assert torch.equal(logits(model), plain)
        raise RuntimeError("inside")
    assert torch.equal(logits(model), prompted)


def test_names_of_modules_to_save_that_do_not_exist():
    model = tiny.make("vit")
    with pytest.raises(ValueError, match=r"none that ends with 'head'. Its last module is 'classifier'"):
        tiny.prompted(model, modules_to_save=["head"])
    assert torch.equal(logits(tiny.prompted(model)), logits(tiny.prompted(tiny.make("vit"))))


@pytest.mark.parametrize(
    ("family", "name", "found"),
    [
        ("vit", "layers.3", "vit.layers.3"),
        ("vit", "attention", "vit.layers.0.attention"),
        ("vit", "vit", "vit"),
        ("swin", "layernorm_before", "swin.encoder.layers.0.blocks.0.layernorm_before"),
    ],
)
def test_modules_to_save_that_prompts_are_hooked_into(family, name, found):
    model = tiny.make(family)
    with pytest.raises(ValueError, match=f"hooked into them, but '{name}' names '{found}'. Name parts"):
        tiny.prompted(model, modules_to_save=["classifier", name])
    tiny.prompted(model)


@pytest.mark.parametrize("parts", [["layernorm_before"], ["k_proj", "v_proj"]])
def test_parts_that_prompts_pass_through_may_be_trained(tmp_path, parts):
    model = trained(modules_to_save=["classifier", *parts])
    ours = logits(model)
    tuner, copied = model.base_model, copy.deepcopy(model)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(tiny.make("vit"), tmp_path).eval()), ours)
    plain = copied.unload()
    undo = prepend_prompts(tiny.blocks(plain), tuner.prompts(), tuner.prompt_blocks())
    torch.testing.assert_close(ours, logits(plain), rtol=1e-5, atol=1e-5)
    undo()
    assert (ours - logits(plain)).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["patch_embeddings", "classifier", "layernorm"])
def test_a_module_that_peft_copies_does_not_bring_the_model_along(name):
    def size(adapters):
        model = tiny.prompted(tiny.make("vit"), modules_to_save=[name])
        for number in range(adapters - 1):
            model.add_adapter(f"adapter {number}", ProVPTConfig(num_prompts=3, modules_to_save=[name]))
        return len(pickle.dumps(model)), model

    (one, model), (five, _) = size(1), size(5)
    saved = next(module for path, module in model.named_modules() if path.endswith(name))
    own = sum(4 * parameter.numel() for parameter in saved.original_module.parameters())
    prompts = 4 * model.base_model.prompts().numel()
    # Names, shapes and strides come to a few kB; a copy of the model to 200.
    assert (five - one) / 4 < own + prompts + 8_000


def test_no_hook_is_left_on_embeddings_that_were_copied():
    model = tiny.prompted(tiny.make("vit"), modules_to_save=["patch_embeddings"])
    bank = weakref.ref(model.base_model.bank)
    base = model.unload()
    del model
    gc.collect()
    assert bank() is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in base.modules())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_embeddings_that_are_trained_or_copied_under_checkpointing(use_reentrant):
    model = tiny.prompted(tiny.make("vit"), modules_to_save=["patch_embeddings"]).train()
    model.add_adapter("other", ProVPTConfig(num_prompts=3, prompt_dropout=0.0))
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    for clone in (model, copy.deepcopy(model)):
        for adapter in ("default", "other"):
            clone.set_adapter(adapter)
            clone(pixel_values=tiny.images(), labels=tiny.labels()).loss.backward()
            assert (clone.base_model.prompts().grad != 0).any(dim=1).all()
            clone.zero_grad()
    copied = copy.deepcopy(model)
    assert copied.base_model.checkpointing.bank is copied.base_model.bank


def test_failure_inside_peft_leaves_the_model_as_it_was(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("inside PEFT")

    model = tiny.make("vit")
    before = logits(model)
    monkeypatch.setattr("peft.tuners.tuners_utils.BaseTuner.inject_adapter", fail)
    with pytest.raises(RuntimeError, match="inside PEFT"):
        tiny.prompted(model)
    monkeypatch.undo()
    assert torch.equal(logits(model), before)
    wrapped = trained()
    monkeypatch.setattr("peft.tuners.tuners_utils.BaseTuner.inject_adapter", fail)
    with pytest.raises(RuntimeError, match="inside PEFT"):
        wrapped.add_adapter("other", ProVPTConfig())
    assert list(wrapped.base_model.bank.provpt_prompts) == ["default"]
    monkeypatch.undo()
    tiny.prompted(model)


def test_scoring_leaves_nothing_in_the_model():
    model = tiny.prompted(tiny.make("vit"), num_prompts=1)
    model.add_adapter("other", ProVPTConfig(num_prompts=1))
    batch = dict(pixel_values=tiny.images(), labels=tiny.labels())
    relocator = Relocator(model, score_batches=[batch])
    assert relocator.measure()[0].score.isfinite().all()
    with pytest.warns(UserWarning, match="Setting active adapter to other"):
        model.delete_adapter("default")
    with pytest.raises(ValueError, match="enabled adapter, which must be 'default', got 'other'"):
        relocator.measure()
    model.add_adapter("default", ProVPTConfig(num_prompts=5))
    model.set_adapter("default")
    model(**batch).loss.backward()
    # An adapter of that name again, of another size.
    assert relocator.measure()[0].score.shape == (20,)


def test_wrapping_twice_is_refused():
    base = tiny.make("vit")
    model = trained()
    before = logits(model)
    with (
        pytest.warns(UserWarning, match="for a second time"),
        pytest.raises(ValueError, match="without other adapters in it, but found ViTAttention at"),
    ):
        get_peft_model(model, ProVPTConfig())
    assert torch.equal(logits(model), before)
    tiny.prompted(base)
    with pytest.raises(ValueError, match=r"but found ViTAttention at 'vit.layers.0.attention'"):
        get_peft_model(base, ProVPTConfig())


def test_other_methods_beside_it_are_refused():
    lora = LoraConfig(target_modules=["q_proj"])
    with_lora = get_peft_model(tiny.make("vit"), lora).base_model.model
    with (
        pytest.warns(UserWarning, match="for a second time"),
        pytest.raises(ValueError, match=r"but found Linear at 'vit.layers.0.attention.q_proj'"),
    ):
        get_peft_model(with_lora, ProVPTConfig())
    with pytest.raises(ValueError, match="Cannot combine adapters with different peft types"):
        tiny.prompted(tiny.make("vit")).add_adapter("other", lora)
    with pytest.raises(ValueError, match="not compatible"):
        get_peft_model(tiny.make("vit"), ProVPTConfig(), mixed=True)


def test_direct_injection_is_refused():
    model = tiny.make("vit")
    before = set(model.state_dict())
    with pytest.raises(ValueError, match=r"by a `PeftModel`, got a bare ViTForImage.* make a new .* `get_peft_model`"):
        inject_adapter_in_model(ProVPTConfig(), model)
    assert set(model.state_dict()) == before


def test_copies_are_independent():
    model = trained()
    before = logits(model)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(clone), before)
        clone.base_model.move_prompt(2, 4)
        with torch.no_grad():
            clone.base_model.prompts().zero_()
        assert not torch.allclose(logits(clone), before)
        assert torch.equal(logits(model), before)


# ---- attention implementations --------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", pytest.param("flex_attention", marks=pytest.mark.slow)])
def test_attention_implementation_can_be_changed_later(implementation):
    model = trained()
    before = logits(model)
    model.base_model.model.set_attn_implementation(implementation)
    torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=1e-5)


def test_attention_weights_end_with_the_prompts():
    model = trained()
    model.base_model.model.set_attn_implementation("eager")
    attentions = model(pixel_values=tiny.images(), output_attentions=True).attentions
    tokens = 1 + 16
    assert [weights.shape for weights in attentions] == [
        (2, 4, tokens, tokens + prompts) for prompts in model.base_model.prompt_distribution()
    ]
    for weights in attentions:
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 4, tokens))


def test_hidden_states_have_the_shapes_of_the_plain_model():
    model = trained()
    for _ in range(2):
        hidden = model(pixel_values=tiny.images(), output_hidden_states=True).hidden_states
        assert [tuple(state.shape) for state in hidden] == [(2, 17, 32)] * 5


def test_flash_function_finds_its_own_name():
    """No flash kernel on a CPU: a stand-in reads the config as transformers' flash function does."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen = []

    def flash(module, *args, **kwargs):
        seen.append(module.config._attn_implementation)
        return sdpa_attention_forward(module, *args, **kwargs)

    model = trained()
    before = logits(model)
    ALL_ATTENTION_FUNCTIONS.register("flash_stand_in", flash)
    try:
        model.config._attn_implementation_internal = "flash_stand_in"
        assert torch.equal(logits(model), before)
    finally:
        del ALL_ATTENTION_FUNCTIONS._global_mapping["flash_stand_in"]
    assert seen == ["flash_stand_in"] * 4


def test_forward_passes_at_the_same_time_through_flash_keep_their_prompts():
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    both = threading.Barrier(2, timeout=60)

    def slow_flash(module, *args, **kwargs):
        # Each pass is inside an attention while the other one is.
        both.wait()
        output = sdpa_attention_forward(module, *args, **kwargs)
        both.wait()
        return output

    model = trained()
    before = logits(model)
    ALL_ATTENTION_FUNCTIONS.register("flash_stand_in", slow_flash)
    try:
        model.config._attn_implementation_internal = "flash_stand_in"
        with ThreadPoolExecutor(2) as pool:
            found = [future.result() for future in [pool.submit(logits, model) for _ in range(2)]]
    finally:
        del ALL_ATTENTION_FUNCTIONS._global_mapping["flash_stand_in"]
    assert all(torch.equal(logits_of_one, before) for logits_of_one in found)


@pytest.mark.filterwarnings("ignore:You are trying to modify a model with PEFT for a second time")
def test_another_method_that_was_put_over_the_adapter_is_named():
    model = tiny.prompted(tiny.make("vit"))
    over = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="'default' must be a ProVPTConfig, got a LoraConfig: another method"):
        over.train()


def test_a_thread_that_evaluates_while_another_one_scores():
    model = trained()
    expected = logits(model, count=3)
    relocator = Relocator(model, score_batches=[{"pixel_values": tiny.images(4), "labels": tiny.labels(4)}])
    meanwhile = []

    def loss(model, batch):
        loss = model(**batch).loss
        with ThreadPoolExecutor(1) as pool:
            meanwhile.append(pool.submit(logits, model, count=3).result())
        return loss

    alone = relocator.measure()
    relocator.compute_loss = loss
    torch.testing.assert_close(relocator.measure()[0].score, alone[0].score, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(meanwhile[0], expected)


# ---- wrappers -------------------------------------------------------------------------------------------------------


def test_data_parallel_is_refused():
    """A replica as `nn.DataParallel` makes it, of the modules that the call goes through."""
    model = tiny.prompted(tiny.make("vit"))
    replica, tuner = (module._replicate_for_data_parallel() for module in (model, model.base_model))
    replica.base_model = tuner
    with pytest.raises(ValueError, match=r"`nn\.DataParallel` copies only the model .* `accelerate launch`"):
        replica(pixel_values=tiny.images())


def test_a_way_of_loading_that_takes_no_buffers_is_refused(monkeypatch):
    for name, value in dict(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FSDP_VERSION", "1")
    tiny.prompted(tiny.make("vit"))
    monkeypatch.setenv("FSDP_VERSION", "2")
    base = tiny.make("vit")
    before = logits(base)
    with pytest.raises(ValueError, match=r"Set `fsdp_cpu_ram_efficient_loading` to false"):
        tiny.prompted(base)
    assert torch.equal(logits(base), before)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    tiny.prompted(base)


# ---- the base model by itself ---------------------------------------------------------------------------------------


def test_calls_of_the_tuner_say_nothing(caplog):
    model = tiny.prompted(tiny.make("vit")).train()
    with caplog.at_level(logging.WARNING, logger="provpt_peft"):
        model.base_model(pixel_values=tiny.images())
    assert not caplog.messages


def test_a_base_model_that_is_trained_by_itself_says_so_once(tmp_path, caplog):
    base = tiny.make("vit")
    model = tiny.prompted(base)
    arguments = TrainingArguments(
        str(tmp_path), num_train_epochs=2, report_to="none", use_cpu=True, save_strategy="no"
    )
    data = [{"pixel_values": pixels, "labels": 0} for pixels in tiny.images()]
    with caplog.at_level(logging.WARNING, logger="provpt_peft"):
        Trainer(model, arguments, train_dataset=data).train()
        model.eval()
        base(pixel_values=tiny.images())
        with torch.no_grad():
            base.train()(pixel_values=tiny.images())
        with model.disable_adapter():
            base(pixel_values=tiny.images())
        assert not caplog.messages
        Trainer(base, arguments, train_dataset=data).train()
    (message,) = caplog.messages
    assert "Its parameters do not contain the prompts" in message


# ---- training mode --------------------------------------------------------------------------------------------------


def test_prompt_dropout_is_independent_for_each_image_and_off_in_eval():
    model = tiny.prompted(tiny.make("vit"), prompt_dropout=0.5)
    same = tiny.images(1).expand(3, -1, -1, -1)
    model.train()
    rows = model(pixel_values=same).logits
    assert not torch.allclose(rows[0], rows[1])
    assert not torch.allclose(rows[1], rows[2])
    model.eval()
    rows = model(pixel_values=same).logits
    torch.testing.assert_close(rows[0], rows[1])


def test_swin_windows_of_an_image_share_the_dropped_entries():
    model = tiny.prompted(tiny.make("swin"), prompt_dropout=0.5).train()
    block = model.base_model.blocks[0]
    seen = []
    norm = block.block.layernorm_before
    norm.register_forward_hook(lambda module, args, output: seen.append(args[0].shape))
    model(pixel_values=tiny.images(2))
    # Tokens (2 images), then prompts: one set for each of the 2 images, not for each of the 32 windows.
    assert seen == [(2, 256, 16), (2, 3, 16)]


@pytest.mark.parametrize("family", ["vit", "swin", "swinv2", "data2vec", "clip", "dinov3"])
def test_backbone_is_deterministic_in_training(family):
    # DINOv3 scales its rotary positions at random.
    dropouts = {"clip": dict(attention_dropout=0.5), "dinov3": dict(pos_embed_rescale=2.0)}.get(
        family, dict(hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
    )
    base = tiny.make(family, **dropouts)
    model = tiny.prompted(base).eval()
    expected = logits(model)
    assert torch.equal(logits(model.train()), expected)
    assert all(block.training for block in tiny.blocks(model))

    noisy = tiny.prompted(tiny.make(family, **dropouts), backbone_dropout=True).train()
    assert not torch.allclose(logits(noisy), logits(noisy))


def test_disabled_adapter_has_the_base_model_s_dropout():
    base = tiny.make("vit", hidden_dropout_prob=0.5).train()
    torch.manual_seed(3)
    plain = logits(base)
    model = tiny.prompted(base).train()
    with model.disable_adapter():
        torch.manual_seed(3)
        assert torch.equal(logits(model), plain)
    assert torch.equal(logits(model), logits(model))


def checkpointed(family, settings, enable_first=False):
    """The gradient of the prompts, and how often an attention was computed. No checkpointing without settings."""
    base = tiny.make(family)
    if settings is not None and enable_first:
        base.gradient_checkpointing_enable(settings)
    model = tiny.prompted(base).train()
    if settings is not None and not enable_first:
        model.gradient_checkpointing_enable(settings)
    calls = []
    for block in model.base_model.blocks:
        block.attention.register_forward_pre_hook(lambda *args: calls.append(1))
    output = model(**tiny.inputs(family), labels=tiny.labels())
    output.loss.backward()
    return output.logits.detach(), model.base_model.prompts().grad, len(calls) / model.base_model.num_blocks


# PyTorch's default is reentrant.
@pytest.mark.parametrize("enable_first", [False, True])
@pytest.mark.parametrize(
    "settings", [dict(use_reentrant=False), dict(use_reentrant=True), dict(preserve_rng_state=False)]
)
@pytest.mark.parametrize("family", ["vit", "dinov2", "dinov2_registers", "swin", "swinv2", "clip", "data2vec"])
def test_gradient_checkpointing_recomputes_and_agrees(family, settings, enable_first):
    plain_logits, plain, once = checkpointed(family, None)
    logits, recomputed, twice = checkpointed(family, settings, enable_first)
    torch.testing.assert_close(logits, plain_logits, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(recomputed, plain, atol=1e-6, rtol=1e-5)
    assert once == 1
    # Swin's stages are checkpointed around its blocks, so that blocks are computed up to three times.
    assert twice == 2 if family != "swin" else 2 < twice <= 3


def test_inputs_require_no_gradient_where_nothing_is_checkpointed_reentrantly():
    base = tiny.make("vit")
    base.gradient_checkpointing_enable({"use_reentrant": False})
    model = tiny.prompted(base).train()
    seen = []
    tiny.blocks(model)[0].register_forward_pre_hook(lambda block, args: seen.append(args[0].requires_grad))
    model(pixel_values=tiny.images())
    assert seen == [False]


# ---- after the last adapter, and adapters that do not fit together --------------------------------------------


def test_without_an_adapter_there_are_no_prompts():
    base = tiny.make("vit")
    before = logits(base)
    model = tiny.prompted(base).eval()
    model.delete_adapter("default")
    with pytest.raises(ValueError, match="Prompts belong to one adapter, but 0 are active"):
        model.base_model.prompt_distribution()
    with pytest.raises(ValueError, match="Adapter default does not exist"):
        model.base_model.delete_adapter("default")
    assert torch.equal(logits(base), before)


def test_adapters_have_to_describe_the_same_backbone():
    model = tiny.prompted(tiny.make("vit"))
    mine = dict(block="ViTLayer", attention="attention", norm="layernorm_before", key="attention.k_proj")
    with pytest.raises(ValueError, match="have to describe the same `backbone`"):
        model.add_adapter("other", ProVPTConfig(backbone=mine | dict(value="attention.v_proj")))
    assert list(model.peft_config) == ["default"]
