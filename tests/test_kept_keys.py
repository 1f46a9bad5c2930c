"""Keys and values of the prompts: made anew in each evaluation, and within `kept_keys` only after what changes them.

The passes of prompts through a block's key projection are counted. The oracle of what a model gives is a copy of it.
"""

import contextlib
import copy
import pickle

import pytest
import tiny
import torch


@contextlib.contextmanager
def counted(model):
    """Counts the passes of prompts through the first block's key projection: fewer rows than an image or a window has
    tokens, which are at least 16."""
    passes = []

    def note(module, args, output):
        if args[0].shape[1] < 16:
            passes.append(args[0].shape)

    handle = model.base_model.blocks[0].attention.k_proj.register_forward_hook(note)
    yield lambda: len(passes)
    handle.remove()


def evaluate(model, inputs=None):
    with torch.no_grad():
        return model(pixel_values=tiny.images() if inputs is None else inputs).logits


def anew(model, inputs=None):
    """What a model gives that has never given anything."""
    return evaluate(copy.deepcopy(model), inputs)


def prompted(family="vit", **settings):
    model = tiny.prompted(tiny.make(family, **settings)).eval()
    with torch.no_grad():
        model.base_model.prompts().normal_()
    return model


# ---- by default -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["vit", "swin"])
def test_each_evaluation_makes_them_anew(family):
    model = prompted(family)
    with counted(model) as passes:
        first = evaluate(model)
        assert passes() == 1
        assert torch.equal(evaluate(model), first)
        assert passes() == 2
        with torch.inference_mode():
            model(pixel_values=tiny.images())
        assert passes() == 3


@torch.no_grad()
def add_to(parameter):
    parameter.add_(torch.randn_like(parameter))


def load(model):
    state = model.state_dict()
    model.load_state_dict({k: v + torch.randn_like(v) if "provpt_prompts" in k else v for k, v in state.items()})


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


# What the package sees: it is in its own hands, or the blocks' buffer changes. `test_changed_weights.py` has all else.
SEEN = {
    "move": lambda model: model.base_model.move_prompt(0, 4),
    "load": load,
    "load blocks": load_blocks,
    "other adapter": other_adapter,
    "same name again": same_name_again,
    "dtype": lambda model: model.to(torch.bfloat16).float(),
}


# ---- within the context ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["vit", "swin"])
def test_a_second_evaluation_projects_no_prompts(family):
    model = prompted(family)
    expected = [evaluate(model), evaluate(model, tiny.images(5))]
    with counted(model) as passes, model.base_model.kept_keys():
        for _ in range(2):
            assert torch.equal(evaluate(model), expected[0])
            # Another number of images.
            torch.testing.assert_close(evaluate(model, tiny.images(5)), expected[1], atol=0, rtol=0)
            assert passes() == 1


@pytest.mark.parametrize("change", SEEN)
def test_what_the_package_does_itself_is_noticed(change):
    model = prompted()
    with model.base_model.kept_keys():
        before = evaluate(model)
        SEEN[change](model)
        after = evaluate(model)
        assert not torch.equal(after, before)
        assert torch.equal(after, anew(model))
        with counted(model) as passes:
            evaluate(model)
            assert passes() == 0


def test_after_the_context_nothing_is_kept():
    model = prompted()
    with model.base_model.kept_keys():
        before = evaluate(model)
    with counted(model) as passes:
        assert torch.equal(evaluate(model), before)
        assert passes() == 1
    model.base_model.prompts().data.normal_()
    assert torch.equal(evaluate(model), anew(model))
    # Entered again, it begins empty; so it does after an exception.
    for _ in range(2):
        with contextlib.suppress(KeyError), model.base_model.kept_keys():
            assert torch.equal(evaluate(model), anew(model))
            model.base_model.prompts().data.normal_()
            raise KeyError
        assert torch.equal(evaluate(model), anew(model))


def test_contexts_within_each_other():
    model = prompted()
    with counted(model) as passes, model.base_model.kept_keys():
        evaluate(model)
        with model.base_model.kept_keys():
            evaluate(model)
            evaluate(model)
        within = passes()
        assert within <= 2
        evaluate(model)
        evaluate(model)
        assert passes() == within
    with model.base_model.kept_keys():
        with model.base_model.kept_keys():
            evaluate(model)
            model.base_model.move_prompt(0, 4)
        assert torch.equal(evaluate(model), anew(model))


def test_contexts_of_threads_that_leave_in_another_order_than_they_came():
    model = prompted()
    first, second = model.base_model.kept_keys(), model.base_model.kept_keys()
    first.__enter__()
    second.__enter__()
    before = evaluate(model)
    first.__exit__(None, None, None)
    with counted(model) as passes:
        assert torch.equal(evaluate(model), before)
        assert passes() == 0
    second.__exit__(None, None, None)
    add_to(model.base_model.prompts())
    assert torch.equal(evaluate(model), anew(model))


def test_a_change_within_the_inner_context_is_seen_in_the_outer_one():
    model = prompted()
    with model.base_model.kept_keys():
        before = evaluate(model)
        with model.base_model.kept_keys():
            model.base_model.move_prompt(0, 4)
            assert torch.equal(evaluate(model), anew(model))
        assert not torch.equal(evaluate(model), before)
        assert torch.equal(evaluate(model), anew(model))


def test_each_adapter_has_its_own():
    model = prompted()
    model.add_adapter("other", tiny.ProVPTConfig(num_prompts=3, modules_to_save=["classifier"]))
    with torch.no_grad():
        model.base_model.prompts("other").normal_()
    expected = {}
    for name in ("default", "other"):
        model.set_adapter(name)
        expected[name] = evaluate(model)
    with counted(model) as passes, model.base_model.kept_keys():
        for name in ("default", "other") * 3:
            model.set_adapter(name)
            assert torch.equal(evaluate(model), expected[name])
        assert passes() == 2


def test_an_adapter_that_is_switched_off_and_on_is_still_kept():
    model = prompted()
    with model.base_model.kept_keys():
        before = evaluate(model)
        with counted(model) as passes:
            with model.disable_adapter():
                assert not torch.equal(evaluate(model), before)
            assert torch.equal(evaluate(model), before)
            assert passes() == 0


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_begin_empty(how):
    model = prompted()
    with model.base_model.kept_keys():
        before = evaluate(model)
        clone = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
        for _ in range(2):
            # Nothing of the original's, and nothing kept: the context is the original's.
            clone.base_model.prompts().data.normal_()
            assert not torch.equal(evaluate(clone), before)
            assert torch.equal(evaluate(clone), anew(clone))
        with counted(model) as passes:
            assert torch.equal(evaluate(model), before)
            assert passes() == 0


def test_a_deleted_adapter_leaves_nothing():
    model = prompted()
    model.add_adapter("other", tiny.ProVPTConfig(num_prompts=3))
    with model.base_model.kept_keys():
        before = evaluate(model)
        with pytest.warns(UserWarning, match="Setting active adapter to other"):
            model.delete_adapter("default")
        after = evaluate(model)
        assert not torch.equal(after, before)
        assert torch.equal(after, anew(model))


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

    def logits(vectors):
        return torch.func.functional_call(model, {name: vectors}, (), {"pixel_values": inputs}).logits

    changed_by_one = copy.deepcopy(model)
    with torch.no_grad():
        changed_by_one.base_model.prompts().add_(1.0)
    with torch.no_grad(), model.base_model.kept_keys():
        expected = evaluate(model)  # something is kept by now
        changed = evaluate(changed_by_one)
        assert not torch.equal(changed, expected)
        # Tracing runs the model again to compare graphs, in which the prompts have to be found.
        traced = torch.jit.trace(Logits(model).eval(), inputs)
        stacked = torch.stack([prompts.detach(), prompts.detach() + 1.0])
        both = torch.vmap(logits)(stacked)
        torch.testing.assert_close(both, torch.stack([expected, changed]), atol=1e-5, rtol=1e-5)
        # The change of the logits along a direction, against a difference quotient.
        _, tangent = torch.func.jvp(logits, (prompts.detach(),), (torch.ones_like(prompts),))
        assert torch.equal(evaluate(model), expected)
    step = 1e-3
    with torch.no_grad():
        quotient = (logits(prompts + step) - logits(prompts - step)) / (2 * step)
        torch.testing.assert_close(tangent, quotient, atol=1e-3, rtol=1e-2)
        prompts.add_(1.0)
        torch.testing.assert_close(traced(inputs), changed, atol=1e-5, rtol=1e-5)


def test_each_dtype_has_its_own():
    model = prompted()
    plain = evaluate(model)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = evaluate(model)
    assert not torch.equal(rounded, plain)
    with counted(model) as passes, model.base_model.kept_keys():
        for _ in range(2):
            assert torch.equal(evaluate(model), plain)
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(evaluate(model), rounded)
        assert passes() == 2


def test_nothing_is_kept_in_training_or_with_gradients():
    model = prompted()
    with counted(model) as passes, model.base_model.kept_keys():
        evaluate(model)
        for expected in (2, 3):
            model(pixel_values=tiny.images(), labels=tiny.labels()).loss.backward()
            assert passes() == expected
        assert model.base_model.prompts().grad.abs().sum() > 0
        model.train()
        for expected in (4, 5):
            evaluate(model)
            assert passes() == expected


def test_what_is_kept_in_inference_mode_serves_evaluation_and_never_training():
    model = prompted()
    with model.base_model.kept_keys():
        with torch.inference_mode():
            inferred = model(pixel_values=tiny.images()).logits.clone()
        with counted(model) as passes:
            assert torch.equal(evaluate(model), inferred)
            assert passes() == 0
        model(pixel_values=tiny.images(), labels=tiny.labels()).loss.backward()
        assert model.base_model.prompts().grad.abs().sum() > 0


def test_weights_made_in_inference_mode():
    with torch.inference_mode():
        model = prompted()
        expected = evaluate(model)
        with model.base_model.kept_keys():
            assert torch.equal(evaluate(model), expected)
            assert torch.equal(evaluate(model), expected)
            model.base_model.move_prompt(0, 4)
            assert torch.equal(evaluate(model), anew(model))
