import pytest
import tiny
import torch
import transformers
from peft import get_peft_model
from torch import nn

from provpt_peft import ProVPTConfig


@pytest.mark.parametrize(
    ("family", "num_blocks", "width"),
    [("vit", 4, 32), ("deit", 4, 32), ("dinov2", 4, 32), ("dinov2_registers", 4, 32), ("swin", 6, 64)],
)
def test_blocks_and_widths(family, num_blocks, width):
    tuner = tiny.prompted(tiny.make(family), num_prompts=2).base_model
    assert tuner.num_blocks == num_blocks
    assert tuner.prompt_distribution() == [2] * num_blocks
    assert tuner.prompts().shape == (2 * num_blocks, width)


def test_swin_prompt_uses_the_first_entries_of_its_row():
    tuner = tiny.prompted(tiny.make("swin"), num_prompts=1).base_model
    assert tuner.bank.widths == [16, 16, 32, 32, 64, 64]
    tuner.model(pixel_values=tiny.images(), labels=tiny.labels()).loss.backward()
    for row, width in zip(tuner.prompts().grad, tuner.bank.widths, strict=True):
        assert (row[:width] != 0).all()
        assert (row[width:] == 0).all()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_bare_models(family):
    classifier = tiny.make(family)
    bare = next(child for child in classifier.children() if isinstance(child, transformers.PreTrainedModel))
    plain = bare(pixel_values=tiny.images()).last_hidden_state
    model = get_peft_model(bare, ProVPTConfig(num_prompts=2))
    prompted = model(pixel_values=tiny.images()).last_hidden_state
    assert prompted.shape == plain.shape
    assert not torch.allclose(prompted, plain)


@pytest.mark.parametrize("backbone", ["dinov2", "swin"])
def test_backbone_inside_a_segmentation_model(backbone):
    torch.manual_seed(0)
    if backbone == "swin":
        backbone_config = transformers.SwinConfig(
            image_size=32, patch_size=2, embed_dim=16, depths=[2, 2, 2, 2], num_heads=[2, 4, 4, 4], window_size=4,
            out_features=["stage1", "stage2", "stage3", "stage4"],
        )  # fmt: skip
    else:
        backbone_config = transformers.Dinov2Config(
            hidden_size=32, num_hidden_layers=4, num_attention_heads=4, image_size=32, patch_size=8, mlp_ratio=2,
            out_features=["stage1", "stage2", "stage3", "stage4"], reshape_hidden_states=True,
        )  # fmt: skip
    config = transformers.UperNetConfig(
        backbone_config=backbone_config, hidden_size=16, auxiliary_channels=16, num_labels=3,
        pool_scales=[1, 2], auxiliary_in_channels=32 if backbone == "dinov2" else 64,
    )  # fmt: skip
    base = transformers.UperNetForSemanticSegmentation(config).eval()
    # Without gradients: attention takes another kernel where a relative position bias requires one.
    with torch.no_grad():
        plain = base(pixel_values=tiny.images()).logits
        model = get_peft_model(base, ProVPTConfig(num_prompts=2, modules_to_save=["decode_head"]))
        prompted = model(pixel_values=tiny.images()).logits
        assert prompted.shape == plain.shape
        assert not torch.allclose(prompted, plain)
        with model.disable_adapter():
            assert torch.equal(model(pixel_values=tiny.images()).logits, plain)


def test_unknown_model_names_the_known_families_and_the_way_out():
    model = transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], num_labels=2)
    )
    before = set(model.state_dict())
    with pytest.raises(ValueError, match=r"ViT, DeiT, DINOv2, DINOv2 with registers, Swin.*ProVPTConfig.backbone="):
        get_peft_model(model, ProVPTConfig())
    assert set(model.state_dict()) == before


class MyLayer(transformers.models.vit.modeling_vit.ViTLayer):
    """A block that no family knows."""


MINE = {
    "block": "MyLayer",
    "attention": "attention",
    "norm": "layernorm_before",
    "key": "attention.k_proj",
    "value": "attention.v_proj",
}


def make_mine():
    model = tiny.make("vit")
    for layer in model.vit.layers:
        layer.__class__ = MyLayer
    return model


def test_described_backbone(tmp_path):
    known = tiny.prompted(tiny.make("vit"))
    described = tiny.prompted(make_mine(), backbone=MINE)
    described.base_model.prompts().data.copy_(known.base_model.prompts())
    assert torch.equal(described(pixel_values=tiny.images()).logits, known(pixel_values=tiny.images()).logits)
    described.save_pretrained(tmp_path)
    assert ProVPTConfig.from_pretrained(tmp_path).backbone == MINE


def test_described_backbone_that_is_not_there():
    with pytest.raises(ValueError, match="has no module of class 'MyLayer'"):
        tiny.prompted(tiny.make("vit"), backbone=MINE)
    with pytest.raises(ValueError, match=r"these do not: norm='norm_first'\. The block has \['attention'"):
        tiny.prompted(make_mine(), backbone=MINE | {"norm": "norm_first"})


def test_list_of_prompts_has_one_number_for_each_block():
    model = tiny.make("vit")
    config = model.vit.layers[0].attention.config
    with pytest.raises(ValueError, match="each of the model's 4 blocks, got 3 numbers"):
        tiny.prompted(model, num_prompts=[1, 2, 3])
    assert model.vit.layers[0].attention.config is config
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_initialisation_bound():
    # ViT-B/16: sqrt(6 / (3 * 16 * 16 + 768)) = sqrt(6 / 1536) = 0.0625.
    from provpt_peft.prompts import init_bound

    assert init_bound(16, 768) == 0.0625
    assert init_bound((16, 16), 768) == 0.0625
    # The tiny ViT: patches of 8, width 32.
    prompts = tiny.prompted(tiny.make("vit"), num_prompts=200).base_model.prompts().detach()
    bound = (6 / (3 * 64 + 32)) ** 0.5
    assert prompts.abs().max() <= bound
    assert prompts.abs().max() > 0.99 * bound
    assert abs(prompts.std().item() - bound / 3**0.5) < 0.01 * bound


def test_initialisation_repeats_under_a_seed():
    first, second = (tiny.prompted(tiny.make("vit")).base_model.prompts() for _ in range(2))
    assert torch.equal(first, second)


def test_modules_that_only_look_like_blocks_are_no_blocks():
    class ViTLayer(nn.Module):
        pass

    model = nn.Sequential(ViTLayer())
    with pytest.raises(ValueError, match="found none in Sequential"):
        get_peft_model(model, ProVPTConfig())
