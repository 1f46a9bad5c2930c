"""Batches whose images have adapters of their own: each image's own pass with its own adapter is the oracle."""

import copy
import threading

import pytest
import tiny
import torch
from peft import get_peft_model
from torch._dynamo.testing import CompileCounterWithBackend

from provpt_peft import ProVPTConfig


# Adapter of each image; the base model's rows among them.
NAMES = ["many", "__base__", "default", "few", "many", "bare"]


def several(family, **settings):
    """A model with four adapters: other numbers in each block, none in some, moved prompts, heads of their own, and
    one without a head. In double precision."""
    model = tiny.prompted(tiny.make(family, **settings))
    blocks = model.base_model.num_blocks
    for name, count, head in (("few", 1, True), ("many", 5, True), ("bare", 2, False)):
        config = dict(num_prompts=[count] + [0] * (blocks - 2) + [count + 1], prompt_dropout=0.0)
        if name == "many":
            config["num_prompts"] = 5
        model.add_adapter(name, ProVPTConfig(**config, modules_to_save=["classifier"] if head else None))
    model = model.double().eval()
    tuner = model.base_model
    with torch.no_grad():
        for number, parameter in enumerate(
            p for n, p in model.named_parameters() if "provpt_" in n or "_to_save" in n
        ):
            parameter.normal_(generator=torch.Generator().manual_seed(number))
    tuner.move_prompt(0, blocks, adapter_name="default")
    tuner.move_prompt(1, 0, adapter_name="many")
    return model


def images_of(family, count):
    return {name: t.double() if t.is_floating_point() else t for name, t in tiny.inputs(family, count).items()}


def one_by_one(model, inputs, names):
    """Each image by itself, with its adapter."""
    rows = []
    for number, name in enumerate(names):
        image = {key: tensor[number : number + 1] for key, tensor in inputs.items()}
        if name == "__base__":
            with model.disable_adapter():
                rows.append(model(**image).logits)
        else:
            model.set_adapter(name)
            rows.append(model(**image).logits)
    return torch.cat(rows)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "implementation"),
    [(family, "eager") for family in tiny.ALL_FAMILIES]
    + [(family, "sdpa") for family in tiny.ALL_FAMILIES if family not in tiny.EAGER_ONLY],
)
def test_each_image_is_as_by_itself(family, implementation):
    model = several(family, attn_implementation=implementation)
    inputs = images_of(family, len(NAMES))
    expected = one_by_one(model, inputs, NAMES)
    tolerance = 1e-5 if implementation == "eager" and family not in tiny.EAGER_ONLY else 1e-10
    for active in ("default", "bare"):
        model.set_adapter(active)
        mixed = model(**inputs, adapter_names=NAMES).logits
        assert (mixed - expected).abs().max() < tolerance
    plain = model.get_base_model()
    with model.disable_adapter():
        assert (plain(**inputs).logits[1] - mixed[1]).abs().max() < tolerance
    assert (expected[0] - expected[4]).abs().max() > 1e3 * tolerance
    # Kept keys are each adapter's own.
    with model.base_model.kept_keys():
        for _ in range(2):
            assert (model(**inputs, adapter_names=NAMES).logits - expected).abs().max() < tolerance
    # Nothing stays behind.
    model.set_adapter("few")
    assert (model(**inputs).logits - one_by_one(model, inputs, ["few"] * 6)).abs().max() < tolerance


@torch.no_grad()
def test_a_shallow_adapter_that_is_active_stays_out():
    model = several("vit")
    inputs = images_of("vit", 6)
    expected = one_by_one(model, inputs, NAMES)
    model.add_adapter("shallow", ProVPTConfig(num_prompts=2, shallow=True))
    model.double().eval().set_adapter("shallow")
    assert (model(**inputs, adapter_names=NAMES).logits - expected).abs().max() < 1e-10
    assert (model.base_model(**inputs, adapter_names=NAMES).logits - expected).abs().max() < 1e-10


@torch.no_grad()
def test_written_blocks_are_read():
    model = several("vit")
    inputs = images_of("vit", 6)
    tuner = model.base_model
    model(**inputs, adapter_names=NAMES)
    tuner.bank.provpt_prompt_blocks["many"].copy_(tuner.bank.one_hot(torch.full((20,), 2)))
    mixed = model(**inputs, adapter_names=NAMES).logits
    assert (mixed - one_by_one(model, inputs, NAMES)).abs().max() < 1e-10


@torch.no_grad()
def test_one_adapter_for_all_and_none_for_any():
    model = several("vit")
    inputs = images_of("vit", 6)
    for names in (["few"] * 6, ["__base__"] * 6):
        mixed = model(**inputs, adapter_names=names).logits
        assert (mixed - one_by_one(model, inputs, names)).abs().max() < 1e-10


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    model = several("vit")
    half = copy.deepcopy(model).to(dtype)
    inputs = images_of("vit", 6)
    rounded = {name: tensor.to(dtype) for name, tensor in inputs.items()}
    expected = one_by_one(half, rounded, NAMES)
    mixed = half(**rounded, adapter_names=NAMES).logits
    assert mixed.dtype == dtype
    exact = model(**inputs, adapter_names=NAMES).logits
    # As far from double precision as each image by itself is.
    assert (mixed - exact).abs().max() < 2 * (expected - exact).abs().max()


@torch.no_grad()
@pytest.mark.parametrize("family", ["vit", "swin"])
def test_threads_do_not_mix(family):
    model = several(family)
    model.set_adapter("default")
    batches = {"plain": (images_of(family, 2), {}), "mixed": (images_of(family, 6), dict(adapter_names=NAMES))}
    expected = {kind: model(**inputs, **names).logits for kind, (inputs, names) in batches.items()}
    wrong = []

    def run(kind):
        inputs, names = batches[kind]
        with torch.no_grad():
            for _ in range(20):
                try:
                    if (model(**inputs, **names).logits - expected[kind]).abs().max() > 1e-10:
                        wrong.append(kind)
                except Exception as error:
                    wrong.append(error)

    threads = [threading.Thread(target=run, args=(kind,)) for kind in ("plain", "mixed", "plain", "mixed")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@tiny.needs_compile
@torch.no_grad()
def test_compiled():
    model = several("vit", num_hidden_layers=2)
    inputs = images_of("vit", 6)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    batches = (NAMES, NAMES[::-1], ["few"] * 6, [*NAMES[1:], "few"], ["many", "many", *NAMES[:4]], ["bare"] * 6)
    expected = [one_by_one(model, inputs, names) for names in batches]
    model.set_adapter("default")
    frames = set()
    for names, logits in [*zip(batches, expected, strict=True)] * 2:
        assert (compiled(**inputs, adapter_names=names).logits - logits).abs().max() < 1e-10
        frames.add(counter.frame_count)
    # The first batch compiles the parts, another one what it is the first to need, the second round nothing.
    assert len(frames) <= len(batches)
    assert counter.frame_count < 2 * min(frames)
    assert (compiled(**inputs).logits - model(**inputs).logits).abs().max() < 1e-10


@tiny.needs_compile
@torch.no_grad()
def test_compiled_for_any_number_of_images():
    model = several("vit", num_hidden_layers=2)
    model.set_adapter("default")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    frames = []
    for count in (2, 3, 4, 5):
        inputs, names = images_of("vit", count), ["many", "default", "many", "default", "many"][:count]
        expected = model(**inputs, adapter_names=names).logits
        assert (compiled(**inputs, adapter_names=names).logits - expected).abs().max() < 1e-10
        frames.append(counter.frame_count)
    # The second and third number make sizes dynamic. After that only the head is compiled, by PEFT's own code.
    assert frames[3] - frames[2] <= 1


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["many"] * 5, "must name an adapter for each image, got 5 names for 6 images"),
        (["many"] * 5 + ["missing"], r"must name adapters of the model, \['bare', .*got missing"),
        ("many", "must be a list of names"),
        ([0] * 6, "must be a list of names"),
        (["shallow"] * 6, "cannot name adapters of VPT-Shallow"),
    ],
)
def test_names_that_do_not_fit_are_refused(names, message):
    model = several("vit")
    model.add_adapter("shallow", ProVPTConfig(num_prompts=2, shallow=True))
    model.double().eval()
    with pytest.raises(ValueError, match=message):
        model(**images_of("vit", 6), adapter_names=names)
    assert model.base_model.bank.mixed() is None


@torch.no_grad()
@pytest.mark.parametrize("family", ["vit", "swin"])
def test_samples_of_several_images(family):
    """As where a larger model cuts its samples into tiles: the first has three of the four images."""

    class Tiles(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.vision = tiny.make(family)

        def forward(self, tokens, tiles):
            return self.vision(pixel_values=tiles.flatten(0, 1)).logits

    model = get_peft_model(Tiles(), ProVPTConfig(num_prompts=3)).eval()
    model.add_adapter("other", ProVPTConfig(num_prompts=3))
    for adapter in ("default", "other"):
        model.base_model.prompts(adapter).normal_()
    tokens, tiles = torch.zeros(2, 5), tiny.images(4).unflatten(0, (2, 2))
    with pytest.raises(
        ValueError, match=r"each image that the vision model sees, got 2 names for 4 images\. If a sample"
    ):
        model(tokens, tiles, adapter_names=["default", "other"])
    names = ["default", "default", "default", "other"]
    mixed = model(tokens, tiles, adapter_names=names)
    for adapter in ("default", "other"):
        model.set_adapter(adapter)
        rows = torch.tensor([name == adapter for name in names])
        torch.testing.assert_close(mixed[rows], model(tokens, tiles)[rows], atol=1e-5, rtol=1e-5)


def test_training_is_refused():
    model = several("vit").train()
    with pytest.raises(ValueError, match="`adapter_names` is for inference"):
        model(**images_of("vit", 6), adapter_names=NAMES)


@tiny.needs_compile
@torch.no_grad()
def test_compiled_in_another_thread():
    model = several("vit")
    inputs = images_of("vit", 6)
    model.set_adapter("default")
    compiled = torch.compile(model, backend="eager")
    expected = model(**inputs).logits
    found = []

    def plain():
        with torch.no_grad():
            found.append(compiled(**inputs).logits)

    with model.base_model.bank.mix(NAMES[::-1]):
        thread = threading.Thread(target=plain)
        thread.start()
        thread.join()
    assert (found[0] - expected).abs().max() < 1e-10


def test_contexts_within_each_other():
    model = several("vit")
    bank = model.base_model.bank
    with bank.mix(NAMES):
        outer = bank.mixed()
        with bank.mix(["few"]):
            assert bank.mixed().names == ["few"]
        assert bank.mixed() is outer
    assert bank.mixed() is None


def test_a_trained_projection_of_prompts_is_refused():
    model = tiny.prompted(tiny.make("vit"), modules_to_save=["classifier", "k_proj"]).eval()
    with pytest.raises(ValueError, match="a norm or a projection that prompts go through"):
        model(pixel_values=tiny.images(), adapter_names=["default", "__base__"])


def test_modules_that_cannot_be_mixed_are_refused():
    base = tiny.make("vit")
    base.classifier = torch.nn.Sequential(base.classifier)
    model = get_peft_model(base, ProVPTConfig(num_prompts=1, modules_to_save=["classifier"])).eval()
    with pytest.raises(ValueError, match=r"got a Sequential\. Run one batch for each adapter"):
        model(pixel_values=tiny.images(), adapter_names=["default", "__base__"])
