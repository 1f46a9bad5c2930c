import math

import pytest
import tiny
import torch
import transformers
from peft import get_peft_model
from torch import nn
from torch.nn import functional as F
from training import moving

from docs import backbones_table
from provpt_peft import ProVPTConfig, Relocator
from provpt_peft.backbone import families
from provpt_peft.backbone.families import FAMILIES
from provpt_peft.config import BackboneFamily


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


@pytest.mark.parametrize("family", tiny.ALL_FAMILIES)
def test_scores_moves_and_a_step_of_training(family):
    model = tiny.prompted(tiny.make(family)).train()
    tuner = model.base_model
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    batch = tiny.inputs(family, count=4, seed=5) | dict(labels=tiny.labels(4))
    relocator = Relocator(model, moving(), optimizer, score_batches=[batch])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def step():
        model(**tiny.inputs(family), labels=tiny.labels()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    assert relocator.relocate() == []
    step()
    (move,) = relocator.relocate()
    step()
    assert int(tuner.prompt_blocks()[move.prompt]) == move.block
    assert sum(tuner.prompt_distribution()) == 3 * tuner.num_blocks
    assert math.isfinite(move.idleness)
    # The size of the default score and this.
    assert move.idleness > 1e-3
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("provpt" in name or "modules_to_save" in name for name in changed)


def test_the_table_in_the_docs_is_that_of_the_registry():
    text = (tiny.FOLDER.parent / "docs" / "backbones.md").read_text()
    assert backbones_table.table() in text


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


# ---- models with other parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["CLIP", "Siglip", "Siglip2"])
def test_only_the_vision_side_of_a_dual_model(prefix):
    base = tiny.dual(prefix)
    inputs = tiny.inputs(prefix.lower()) | dict(input_ids=torch.tensor([[1, 5, 6, 2], [1, 7, 8, 2]]))
    plain = base(**inputs)
    model = get_peft_model(base, ProVPTConfig(num_prompts=2))
    assert model.base_model.prompt_distribution() == [2, 2]
    prompted = model(**inputs)
    assert torch.equal(prompted.text_embeds, plain.text_embeds)
    assert not torch.allclose(prompted.image_embeds, plain.image_embeds)
    text = getattr(transformers, f"{prefix}TextModel")(base.config.text_config)
    with pytest.raises(ValueError, match=f"every {prefix}EncoderLayer of the {prefix}TextModel is in a module that"):
        get_peft_model(text, ProVPTConfig())


def test_only_the_encoder_of_mae_and_not_its_decoder():
    config = transformers.ViTMAEConfig(
        **tiny.settings_of("mae"), decoder_hidden_size=16, decoder_num_hidden_layers=2, decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
    )  # fmt: skip
    model = get_peft_model(transformers.ViTMAEForPreTraining(config), ProVPTConfig(num_prompts=2))
    assert model.base_model.prompt_distribution() == [2, 2, 2, 2]
    model(**tiny.inputs("mae")).loss.backward()
    assert (model.base_model.prompts().grad != 0).any(dim=1).all()


def test_mae_weights_in_a_vit_with_mean_pooling(tmp_path):
    """What leaves the ViT has the image's tokens only, so a mean over them knows no prompts."""
    mae = tiny.make("mae").backbone
    mae.save_pretrained(tmp_path)
    vit = transformers.ViTModel.from_pretrained(tmp_path, add_pooling_layer=False)
    key = "layers.3.attention.k_proj.weight"
    assert torch.equal(vit.state_dict()[key], mae.state_dict()[key])
    model = tiny.prompted(tiny.Classifier(vit, 32)).eval()
    assert model.base_model.model.backbone(tiny.images()).last_hidden_state.shape == (2, 17, 32)
    assert model(pixel_values=tiny.images()).logits.shape == (2, 3)


def test_distilled_deit_with_both_heads():
    torch.manual_seed(0)
    config = transformers.DeiTConfig(**tiny.VIT_LIKE, intermediate_size=64)
    base = transformers.DeiTForImageClassificationWithTeacher(config).eval()
    heads = ["cls_classifier", "distillation_classifier"]
    model = get_peft_model(base, ProVPTConfig(num_prompts=2, modules_to_save=heads))
    output = model(pixel_values=tiny.images())
    nn.functional.cross_entropy(output.logits, tiny.labels()).backward()
    assert (model.base_model.prompts().grad != 0).all()
    trained = {name.split(".")[2] for name, p in model.named_parameters() if p.grad is not None}
    assert trained >= {*heads}


SWIN = dict(
    image_size=32, patch_size=2, embed_dim=16, depths=[2, 2, 2, 2], num_heads=[2, 4, 4, 4], window_size=4,
    out_features=["stage1", "stage2", "stage3", "stage4"],
)  # fmt: skip
MASKED = dict(
    hidden_dim=32, feature_size=32, mask_feature_size=32, encoder_layers=1, decoder_layers=2, num_attention_heads=2,
    encoder_feedforward_dim=32, dim_feedforward=32, num_queries=5, num_labels=3, train_num_points=8,
)  # fmt: skip


def wrapped(kind):
    """Models of transformers around a backbone, the number of its blocks, and their outputs to look at."""
    torch.manual_seed(0)
    if kind == "dpt":
        config = transformers.DPTConfig(
            **tiny.settings_of("dpt"), num_labels=3, neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8,
            use_auxiliary_head=False,
        )  # fmt: skip
        return transformers.DPTForSemanticSegmentation(config), 4, "logits"
    if kind == "dpt with dinov2":
        backbone = transformers.Dinov2Config(
            **tiny.settings_of("dinov2"), reshape_hidden_states=False,
            out_features=["stage1", "stage2", "stage3", "stage4"],
        )  # fmt: skip
        config = transformers.DPTConfig(
            backbone_config=backbone, num_labels=3, neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8
        )
        return transformers.DPTForDepthEstimation(config), 4, "predicted_depth"
    if kind == "auto backbone":
        return transformers.AutoBackbone.from_config(transformers.SwinConfig(**SWIN)), 8, "feature_maps"
    if kind == "mask2former":
        config = transformers.Mask2FormerConfig(backbone_config=transformers.SwinConfig(**SWIN), **MASKED)
        return transformers.Mask2FormerForUniversalSegmentation(config), 8, "masks_queries_logits"
    decoder = transformers.DetrConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=5,
    )  # fmt: skip
    config = transformers.MaskFormerConfig(
        backbone_config=transformers.SwinConfig(**SWIN), decoder_config=decoder, fpn_feature_size=32,
        mask_feature_size=32, num_labels=3,
    )  # fmt: skip
    return transformers.MaskFormerForInstanceSegmentation(config), 8, "masks_queries_logits"


@pytest.mark.parametrize("kind", ["dpt", "dpt with dinov2", "auto backbone", "mask2former", "maskformer"])
def test_backbone_inside_another_model(kind):
    base, num_blocks, name = wrapped(kind)
    # As wrapping does: PyTorch's multi-head attention takes another path where a weight requires a gradient.
    base.eval().requires_grad_(False)
    inputs = tiny.images(size=64) if "former" in kind else tiny.images()

    def look(model):
        output = getattr(model(pixel_values=inputs), name)
        return output[-1] if isinstance(output, tuple) else output

    with torch.no_grad():
        plain = look(base)
    model = get_peft_model(base, ProVPTConfig(num_prompts=2))
    tuner = model.base_model
    assert tuner.prompt_distribution() == [2] * num_blocks
    prompted = look(model)
    assert prompted.shape == plain.shape
    assert (prompted - plain).abs().max() > 1e-3 * plain.abs().max()
    (prompted / plain.abs().max()).square().mean().backward()
    assert (tuner.prompts().grad != 0).any(dim=1).all()
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(look(model), plain)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        # Ten prompts per block: 10 * L * D.
        (transformers.ViTConfig(), 10 * 12 * 768),
        (transformers.ViTConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16), 10 * 24 * 1024),
        (
            transformers.ViTConfig(hidden_size=1280, num_hidden_layers=32, num_attention_heads=16, patch_size=14),
            10 * 32 * 1280,
        ),
        # Swin T, S, B and L: the width of the last stage, of which earlier stages use the first entries.
        (transformers.SwinConfig(embed_dim=96, depths=[2, 2, 6, 2], num_heads=[3, 6, 12, 24]), 10 * 12 * 768),
        (transformers.SwinConfig(embed_dim=96, depths=[2, 2, 18, 2], num_heads=[3, 6, 12, 24]), 10 * 24 * 768),
        (transformers.SwinConfig(embed_dim=128, depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32]), 10 * 24 * 1024),
        (transformers.SwinConfig(embed_dim=192, depths=[2, 2, 18, 2], num_heads=[6, 12, 24, 48]), 10 * 24 * 1536),
    ],
)
def test_published_shapes(config, parameters):
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
        model = get_peft_model(model, ProVPTConfig(num_prompts=10))
    assert model.get_nb_trainable_parameters()[0] == parameters


# ---- backbones that no family knows ---------------------------------------------------------------------------------


def test_unknown_model_names_the_known_families_and_the_way_out():
    model = transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], num_labels=2)
    )
    before = set(model.state_dict())
    with pytest.raises(ValueError, match=r"ViT, DeiT, .*, DINOv2, .*Swin V2.*ProVPTConfig.backbone="):
        get_peft_model(model, ProVPTConfig())
    assert set(model.state_dict()) == before


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            "k_proj",
            r"in transformers .* Missing in ViTLayer: key='attention.k_proj'\. The block has \[.*renamed",
        ),
        (None, "every CLIPEncoderLayer of the CLIPTextModel is in a module that `not_in` excludes: CLIPTextModel"),
    ],
)
def test_a_known_class_that_cannot_be_used_says_why(part, message):
    if part is None:
        config = transformers.CLIPTextConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=8
        )
        model = transformers.CLIPTextModel(config)
    else:
        model = tiny.make("vit")
        for block in tiny.blocks(model):
            block.attention.renamed = block.attention._modules.pop(part)
    with pytest.raises(ValueError, match=message):
        get_peft_model(model, ProVPTConfig())


class TeacherAndStudent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.teacher, self.student = tiny.make("vit"), tiny.make("vit")

    def forward(self, pixel_values, labels=None):
        return self.student(pixel_values=pixel_values, labels=labels)


def test_models_with_several_vision_towers_are_refused():
    both = TeacherAndStudent()
    config = ProVPTConfig(num_prompts=2, modules_to_save=["student.classifier"])
    message = r"one vision model, but the TeacherAndStudent has several: 'teacher.vit', 'student.vit'"
    with pytest.raises(ValueError, match=message):
        get_peft_model(both, config)
    both.student = get_peft_model(both.student, ProVPTConfig(num_prompts=2))
    assert not hasattr(tiny.blocks(both.teacher)[0].attention, "provpt_block")


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


def test_a_family_is_one_entry(monkeypatch):
    entry = BackboneFamily(name="Mine", **MINE)
    monkeypatch.setattr(families, "FAMILIES", (*FAMILIES, entry))
    assert tiny.prompted(make_mine()).base_model.prompt_distribution() == [3, 3, 3, 3]


def test_described_backbone_that_is_not_there():
    with pytest.raises(ValueError, match="has no module of class 'MyLayer'"):
        tiny.prompted(tiny.make("vit"), backbone=MINE)
    with pytest.raises(ValueError, match=r"these do not: norm='norm_first'\. The block has \['attention'"):
        tiny.prompted(make_mine(), backbone=MINE | {"norm": "norm_first"})


class OwnArithmetic(torch.nn.Module):
    """An attention that never calls the registry, though it may have a config."""

    def __init__(self, attention, config):
        super().__init__()
        self.k_proj, self.v_proj = attention.k_proj, attention.v_proj
        if config:
            self.config = attention.config

    def forward(self, hidden_states, *args, **kwargs):
        value = self.v_proj(hidden_states)
        return F.scaled_dot_product_attention(hidden_states, self.k_proj(hidden_states), value), None


def make_with_own_arithmetic(config):
    model = make_mine()
    for layer in model.vit.layers:
        layer.attention = OwnArithmetic(layer.attention, config)
    return model


def test_described_attention_that_leaves_the_prompts_out():
    prompted = tiny.prompted(make_with_own_arithmetic(config=True), backbone=MINE)
    with pytest.raises(ValueError, match=r"'attention' of MyLayer \(OwnArithmetic\) did not, so the prompts had"):
        prompted(pixel_values=tiny.images())
    # Taken out again, it is nobody's business.
    prompted.unload()(pixel_values=tiny.images())


def test_described_parts_that_prompts_cannot_use():
    model = make_with_own_arithmetic(config=False)
    for _ in range(2):  # the model is then as it was
        with pytest.raises(ValueError, match=r"a `config`, but 'attention' of MyLayer \(OwnArithmetic\) has none"):
            tiny.prompted(model, backbone=MINE)
    with pytest.raises(ValueError, match=r"with a `weight`, but 'mlp' of MyLayer \(ViTMLP\) has none"):
        tiny.prompted(make_mine(), backbone=MINE | {"norm": "mlp"})


def test_list_of_prompts_has_one_number_for_each_block():
    model = tiny.make("vit")
    config = model.vit.layers[0].attention.config
    with pytest.raises(ValueError, match="has a number for each of 3 blocks, and the model has 4"):
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
    # The tiny Swin: patches of 2, and the width of its last stage, 64.
    swin = tiny.make("swin")
    assert (swin.config.patch_size, swin.config.hidden_size) == (2, 64)
    prompts = tiny.prompted(swin, num_prompts=200).base_model.prompts().detach()
    bound = (6 / (3 * 4 + 64)) ** 0.5
    assert 0.99 * bound < prompts.abs().max() <= bound


def test_initialisation_repeats_under_a_seed():
    first, second = (tiny.prompted(tiny.make("vit")).base_model.prompts() for _ in range(2))
    assert torch.equal(first, second)


def test_modules_that_only_look_like_blocks_are_no_blocks():
    class ViTLayer(nn.Module):
        pass

    model = nn.Sequential(ViTLayer())
    with pytest.raises(ValueError, match="found none in Sequential"):
        get_peft_model(model, ProVPTConfig())
