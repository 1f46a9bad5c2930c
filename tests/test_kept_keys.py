"""Keys and values of prompts that are kept from one evaluation to the next: kept while nothing changes, and only then.

The oracle computes them anew: the same pass right after everything that was kept has been dropped.
"""

import contextlib
import copy

import pytest
import tiny
import torch


@contextlib.contextmanager
def counted(model):
    """Counts the passes of prompts through the first block's key projection: inputs that are not the images'."""
    passes = []
    projection = model.base_model.blocks[0].attention.k_proj
    handle = projection.register_forward_hook(lambda module, args, output: passes.append(args[0].shape))
    yield lambda: len(passes)
    handle.remove()


def evaluate(model, inputs=None):
    with torch.no_grad():
        return model(pixel_values=tiny.images() if inputs is None else inputs).logits


def anew(model, inputs=None):
    model.base_model.bank.kept.clear()
    return evaluate(model, inputs)


def prompted(family="vit", **settings):
    model = tiny.prompted(tiny.make(family, **settings)).eval()
    with torch.no_grad():
        model.base_model.prompts().normal_()
    return model


@pytest.mark.parametrize("family", ["vit", "swin"])
def test_a_second_evaluation_projects_no_prompts(family):
    model = prompted(family)
    with counted(model) as passes:
        first = evaluate(model)
        assert passes() == 2  # the tokens and the prompts
        second = evaluate(model)
        assert passes() == 3  # the tokens
        other_size = evaluate(model, tiny.images(5))
        assert passes() == 4
    assert torch.equal(first, second)
    torch.testing.assert_close(other_size, anew(model, tiny.images(5)), atol=0, rtol=0)


def test_a_fused_optimizer_s_step_is_noticed():
    """It is not in PyTorch's count of changes, so nothing is kept between backward and step."""
    model = prompted()
    optimizer = torch.optim.AdamW([model.base_model.prompts()], lr=1.0, fused=True)
    model(pixel_values=tiny.images(), labels=tiny.labels()).loss.backward()
    before = evaluate(model)
    optimizer.step()
    after = evaluate(model)
    assert not torch.allclose(before, after, atol=1e-3)
    assert torch.equal(after, anew(model))
    optimizer.zero_grad()
    with counted(model) as passes:
        evaluate(model)
        evaluate(model)
        assert passes() == 3


@torch.no_grad()
def add_to(parameter):
    parameter.add_(torch.randn_like(parameter))


def replace_data(parameter):
    parameter.data = torch.randn_like(parameter)


def replace_data_until_the_address_is_the_first_again(model):
    prompts = model.base_model.prompts()
    address = prompts.data_ptr()
    for _ in range(100):
        prompts.data = torch.randn_like(prompts)
        if prompts.data_ptr() == address:
            break


def write_behind_the_version(model):
    """As copies of averaged weights are often made, before the call of `eval` that evaluation begins with."""
    model.base_model.prompts().data.normal_()
    model.eval()


def optimizer_step(model):
    optimizer = torch.optim.SGD([model.base_model.prompts()], lr=1.0)
    model(pixel_values=tiny.images(), labels=tiny.labels()).loss.backward()
    optimizer.step()


def load(model):
    state = model.state_dict()
    model.load_state_dict({k: v + 1 if "prompts" in k else v for k, v in state.items()})


def load_blocks(model):
    state = model.state_dict()
    model.load_state_dict({k: v.flip(0) if "blocks" in k else v for k, v in state.items()})


def other_adapter(model):
    model.add_adapter("other", tiny.ProVPTConfig(num_prompts=3))
    with torch.no_grad():
        model.base_model.prompts("other").normal_()
    model.set_adapter("other")


def same_name_again(model):
    model.add_adapter("other", tiny.ProVPTConfig(num_prompts=3))
    model.set_adapter("other")
    model.delete_adapter("default")
    evaluate(model)
    model.add_adapter("default", tiny.ProVPTConfig(num_prompts=3))
    with torch.no_grad():
        model.base_model.prompts("default").normal_()
    model.set_adapter("default")


def block(model):
    return model.base_model.blocks[1]


CHANGES = {
    "prompts": lambda model: add_to(model.base_model.prompts()),
    "prompts replaced": lambda model: replace_data(model.base_model.prompts()),
    "prompts replaced more than once": replace_data_until_the_address_is_the_first_again,
    "prompts behind the version": write_behind_the_version,
    "norm": lambda model: add_to(block(model).block.layernorm_before.bias),
    "key projection": lambda model: add_to(block(model).attention.k_proj.weight),
    "value projection replaced": lambda model: replace_data(block(model).attention.v_proj.weight),
    "module replaced": lambda model: setattr(block(model).attention, "v_proj", torch.nn.Linear(32, 32)),
    "optimizer step": optimizer_step,
    "move": lambda model: model.base_model.move_prompt(0, 4),
    "load": load,
    "load blocks": load_blocks,
    "other adapter": other_adapter,
    "same name again": same_name_again,
    "dtype": lambda model: model.to(torch.bfloat16).float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_is_seen(change):
    model = prompted()
    before = evaluate(model)
    CHANGES[change](model)
    after = evaluate(model)
    assert not torch.equal(after, before)
    assert torch.equal(after, anew(model))


def test_an_adapter_that_is_switched_off_and_on_is_still_kept():
    model = prompted()
    before = evaluate(model)
    with counted(model) as passes:
        with model.disable_adapter():
            assert not torch.equal(evaluate(model), before)
        assert torch.equal(evaluate(model), before)
        assert passes() == 2


def test_copies_keep_nothing():
    model = prompted()
    before = evaluate(model)
    clone = copy.deepcopy(model)
    assert model.base_model.bank.kept
    assert not clone.base_model.bank.kept
    assert torch.equal(evaluate(clone), before)
    with torch.no_grad():
        clone.base_model.prompts().normal_()
    assert torch.equal(evaluate(model), before)
    assert not torch.equal(evaluate(clone), before)


def test_a_deleted_adapter_and_an_unloaded_model_leave_nothing():
    model = prompted()
    model.add_adapter("other", tiny.ProVPTConfig(num_prompts=3))
    tuner = model.base_model
    evaluate(model)
    assert tuner.bank.kept
    with pytest.warns(UserWarning, match="Setting active adapter to other"):
        model.delete_adapter("default")
    assert not tuner.bank.kept
    evaluate(model)
    assert tuner.bank.kept
    model.unload()
    assert not tuner.bank.kept


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pixel_values):
        return self.model(pixel_values=pixel_values).logits


@pytest.mark.filterwarnings(
    "ignore:`torch.jit", "ignore::torch.jit.TracerWarning", "ignore:There is a performance drop"
)
def test_recorded_and_transformed_passes_keep_nothing():
    # The fused kernel knows no forward-mode differentiation.
    model = prompted(attn_implementation="eager")
    inputs = tiny.images()
    prompts = model.base_model.prompts()
    name = next(name for name, parameter in model.named_parameters() if parameter is prompts)
    expected = evaluate(model)  # something is kept by now

    def logits(vectors):
        return torch.func.functional_call(model, {name: vectors}, (), {"pixel_values": inputs}).logits

    with torch.no_grad():
        # Tracing runs the model again to compare graphs, in which the prompts have to be found.
        traced = torch.jit.trace(Logits(model).eval(), inputs)
        evaluate(model)
        prompts.add_(1.0)
        changed = anew(model)
        assert not torch.equal(changed, expected)
        stacked = torch.stack([prompts.detach() - 1.0, prompts.detach()])
        both = torch.vmap(logits)(stacked)
        torch.testing.assert_close(both, torch.stack([expected, changed]), atol=1e-5, rtol=1e-5)
        # The change of the logits along a direction, against a difference quotient.
        _, tangent = torch.func.jvp(logits, (prompts.detach(),), (torch.ones_like(prompts),))
        step = 1e-3
        quotient = (logits(prompts + step) - logits(prompts - step)) / (2 * step)
        torch.testing.assert_close(tangent, quotient, atol=1e-3, rtol=1e-2)
        torch.testing.assert_close(traced(inputs), changed, atol=1e-5, rtol=1e-5)


def test_autocast_keeps_its_own():
    model = prompted()
    plain = evaluate(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(evaluate(model), anew(model))
    assert torch.equal(evaluate(model), plain)


def test_nothing_is_kept_in_training_or_with_gradients():
    model = prompted()
    model(pixel_values=tiny.images())
    assert not model.base_model.bank.kept
    model.train()
    evaluate(model)
    assert not model.base_model.bank.kept


def test_what_is_kept_in_inference_mode_serves_evaluation_and_never_training():
    model = prompted()
    with torch.inference_mode():
        inferred = model(pixel_values=tiny.images()).logits.clone()
    assert torch.equal(evaluate(model), inferred)
    model(pixel_values=tiny.images(), labels=tiny.labels()).loss.backward()
    assert model.base_model.prompts().grad.abs().sum() > 0


def test_weights_made_in_inference_mode_are_not_kept():
    with torch.inference_mode():
        model = prompted()
        assert torch.equal(evaluate(model), anew(model))
        assert not model.base_model.bank.kept
