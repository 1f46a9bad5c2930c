"""VPT-Shallow: tokens that enter the first block and travel, against blocks that are called by hand."""

import pytest
import tiny
import torch
import transformers
from peft import PeftModel, get_peft_model
from torch.nn import functional as F

from provpt_peft import ProVPTConfig, Relocator, check_adapter


SHALLOW = [f for f in tiny.ALL_FAMILIES if f not in ("siglip2", "beit", "data2vec", "dpt", *tiny.WINDOWED)]


def insert_after_the_first_token(model, prompts):
    """The oracle: at another place than ours, which does not matter to attention but for rotary positions."""
    first, *_, last = tiny.blocks(model)
    count = len(prompts)

    def insert(block, args):
        tokens = args[0]
        return torch.cat([tokens[:, :1], prompts.expand(len(tokens), -1, -1), tokens[:, 1:]], dim=1), *args[1:]

    first.register_forward_pre_hook(insert)
    last.register_forward_hook(lambda block, args, out: torch.cat([out[:, :1], out[:, 1 + count :]], dim=1))


def run(model, family, prompts):
    output = model(**tiny.inputs(family), labels=tiny.labels())
    prompts.grad = None
    output.loss.backward()
    return output.logits.detach(), prompts.grad


@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("family", SHALLOW)
def test_same_function_as_tokens_that_travel(family, checkpointing):
    plain = tiny.make(family).requires_grad_(False)
    model = tiny.prompted(tiny.make(family), num_prompts=5, shallow=True)
    prompts = model.base_model.prompts()
    assert prompts.shape == (5, 32)
    assert model.base_model.prompt_distribution() == [5, 0, 0, 0]
    oracle_prompts = prompts.detach().clone().requires_grad_()
    insert_after_the_first_token(plain, oracle_prompts)
    if checkpointing is not None:
        backbone = next(m for m in model.modules() if isinstance(m, transformers.PreTrainedModel))
        backbone.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.train()
    for mine, theirs in zip(run(model, family, prompts), run(plain, family, oracle_prompts), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_by_hand_and_with_dropout():
    model = tiny.prompted(tiny.make("vit"), num_prompts=5, shallow=True, prompt_dropout=0.5).train()
    prompts, vit = model.base_model.prompts(), model.base_model.model.vit
    torch.manual_seed(3)
    logits = model(pixel_values=tiny.images()).logits
    torch.manual_seed(3)
    with torch.no_grad(), model.disable_adapter():
        dropped = F.dropout(prompts.expand(2, -1, -1), 0.5)
        tokens = torch.cat([dropped, vit.embeddings(tiny.images())], dim=1)
        for layer in vit.layers:
            tokens = layer(tokens)
        head = model.base_model.model.classifier.modules_to_save["default"]
        expected = head(vit.layernorm(tokens[:, 5:])[:, 0])
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-5)


def test_beside_a_deep_adapter(tmp_path):
    base = tiny.make("vit")
    inputs = dict(pixel_values=tiny.images())
    with torch.no_grad():
        plain = base(**inputs).logits
        model = tiny.prompted(base, "deep").eval()
        deep = model(**inputs).logits
        model.add_adapter("shallow", ProVPTConfig(num_prompts=4, shallow=True, modules_to_save=["classifier"]))
        assert torch.equal(model(**inputs).logits, deep)
        model.set_adapter("shallow")
        shallow = model(**inputs).logits
        assert not torch.allclose(shallow, deep)
        with model.disable_adapter():
            assert torch.equal(model(**inputs).logits, plain)
        model.save_pretrained(tmp_path)
        check_adapter(tmp_path / "shallow")
        assert "4 prompts that enter the first block as tokens" in (tmp_path / "shallow" / "README.md").read_text()
        loaded = PeftModel.from_pretrained(tiny.make("vit"), tmp_path / "shallow").eval()
        assert torch.equal(loaded(**inputs).logits, shallow)
        model.set_adapter("deep")
        model.delete_adapter("shallow")
        assert torch.equal(model(**inputs).logits, deep)
        unloaded = model.unload().eval()
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in unloaded.modules())


@pytest.mark.parametrize(
    ("family", "reason"),
    [("swin", "blocks of Swin"), ("beit", "blocks of BEiT"), ("siglip2", "SigLIP 2"), ("swinv2", "Swin V2")],
)
def test_backbones_that_take_no_more_tokens(family, reason):
    base = tiny.make(family)
    before = set(base.state_dict())
    with pytest.raises(ValueError, match=rf"`shallow=True` needs blocks.*{reason}.*Leave `shallow` out"):
        tiny.prompted(base, shallow=True)
    assert set(base.state_dict()) == before


def test_feature_maps_are_refused():
    config = transformers.Dinov2Config(**tiny.settings_of("dinov2"), out_features=["stage2", "stage4"])
    with pytest.raises(ValueError, match="feature maps of Dinov2Backbone"):
        get_peft_model(transformers.AutoBackbone.from_config(config), ProVPTConfig(shallow=True))


def test_nothing_moves():
    model = tiny.prompted(tiny.make("vit"), shallow=True)
    with pytest.raises(ValueError, match=r"Prompts of VPT-Shallow stay at the first block.*`shallow=False`"):
        model.base_model.move_prompt(0, 2)
    with pytest.raises(ValueError, match="Relocation needs prompts that can move"):
        Relocator(model, score_batches=[tiny.inputs("vit") | dict(labels=tiny.labels())])
    assert model.base_model.prompt_blocks().tolist() == [1, 1, 1]


@pytest.mark.parametrize("settings", [dict(num_prompts=[3, 0, 0, 0]), dict(reserve=2)])
def test_one_number_of_prompts(settings):
    with pytest.raises(ValueError, match=r"With `shallow=True` all prompts enter at the first block"):
        ProVPTConfig(shallow=True, **settings)
