"""Whatever writes into weights or buffers, and however: the next forward pass uses what is there now."""

import copy

import pytest
import tiny
import torch
from accelerate import cpu_offload
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from provpt_peft import ProVPTConfig
from provpt_peft.share.files import read_adapter


PROMPTS = "base_model.bank.provpt_prompts.default"
BLOCKS = "base_model.bank.provpt_prompt_blocks.default"


def made(**config):
    """A model with two prompts in each of four blocks."""
    return tiny.prompted(tiny.make("vit"), **(dict(num_prompts=2) | config))


def logits_of(model, images):
    with torch.no_grad():
        return model(pixel_values=images).logits


def logits(model):
    return logits_of(model, tiny.images())


def as_if_new(model):
    """The logits of a model that never made a forward pass before, with the weights of this one."""
    new = made(modules_to_save=model.peft_config["default"].modules_to_save)
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            parameter.copy_(weights[name])
    for prompt, row in enumerate(model.state_dict()[BLOCKS].tolist()):
        new.base_model.move_prompt(prompt, row.index(1.0))
    return logits(new.eval())


def other_prompts(model):
    return torch.randn(model.base_model.prompts().shape, generator=torch.Generator().manual_seed(7))


# ---- ways to write --------------------------------------------------------------------------------------------------


def by_copy(model):
    with torch.no_grad():
        model.base_model.prompts().copy_(other_prompts(model))


def through_data(model):
    model.base_model.prompts().data.copy_(other_prompts(model))


def by_new_data(model):
    model.base_model.prompts().data = other_prompts(model)


def by_new_data_at_the_old_address(model):
    """Memory that is let go is soon used again."""
    prompts = model.base_model.prompts()
    address = prompts.data_ptr()
    for seed in range(100):
        prompts.data = torch.randn(prompts.shape, generator=torch.Generator().manual_seed(seed))
        if prompts.data_ptr() == address:
            break


def by_swapped_tensors(model):
    torch.utils.swap_tensors(model.base_model.prompts(), nn.Parameter(other_prompts(model)))


def by_vector(model):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    nn.utils.vector_to_parameters(0.5 + nn.utils.parameters_to_vector(trained), trained)


def by_state_dict(model, **how):
    model.load_state_dict(model.state_dict() | {PROMPTS: other_prompts(model)}, **how)


def by_assigned_state_dict(model):
    by_state_dict(model, assign=True)


def by_peft_s_state_dict(model):
    state = get_peft_model_state_dict(model)
    set_peft_model_state_dict(model, {name: tensor.clone() for name, tensor in state.items()})
    through_data(model)


def by_an_optimizer(kind, **settings):
    def step(model):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with torch.enable_grad():
            model(pixel_values=tiny.images(), labels=tiny.labels()).loss.backward()
        kind(trained, lr=0.5, **settings).step()

    return step


def by_an_average(model):
    """An exponential mean of the weights, as recipes evaluate it."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    by_copy(model)
    average.update_parameters(model)
    logits(model)
    for parameter, averaged in zip(model.parameters(), average.module.parameters(), strict=True):
        parameter.data.copy_(averaged)


def of_a_frozen_norm(model):
    tiny.blocks(model)[1].layernorm_before.weight.data.mul_(3.0)


def of_a_frozen_projection(model):
    tiny.blocks(model)[1].attention.v_proj.weight.data.mul_(3.0)


def of_a_new_projection(model):
    tiny.blocks(model)[1].attention.v_proj = nn.Linear(32, 32).requires_grad_(False)


def blocks_by_copy(model):
    state = model.state_dict()[BLOCKS]
    state.copy_(state.roll(1, dims=0))


def blocks_through_data(model):
    buffer = model.base_model.bank.provpt_prompt_blocks["default"]
    buffer.data.copy_(buffer.roll(1, dims=0))


def blocks_by_index(model):
    model.base_model.bank.provpt_prompt_blocks["default"][0] = torch.tensor([1.0, 0, 0, 0, 0])


def blocks_by_swapped_tensors(model):
    buffer = model.base_model.bank.provpt_prompt_blocks["default"]
    torch.utils.swap_tensors(buffer, buffer.roll(1, dims=0))


WAYS = [
    by_copy, through_data, by_new_data, by_new_data_at_the_old_address, by_swapped_tensors, by_vector, by_state_dict,
    by_assigned_state_dict, by_peft_s_state_dict, by_an_average, of_a_frozen_norm, of_a_frozen_projection,
    of_a_new_projection, blocks_by_copy, blocks_through_data, blocks_by_index, blocks_by_swapped_tensors,
]  # fmt: skip
OPTIMIZERS = {
    "sgd": by_an_optimizer(torch.optim.SGD, momentum=0.9),
    "adamw": by_an_optimizer(torch.optim.AdamW),
    "adamw, fused": by_an_optimizer(torch.optim.AdamW, fused=True),
    "adamw, foreach": by_an_optimizer(torch.optim.AdamW, foreach=True),
    "rmsprop": by_an_optimizer(torch.optim.RMSprop),
}


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", [*WAYS, *OPTIMIZERS.values()], ids=[w.__name__ for w in WAYS] + list(OPTIMIZERS))
def test_the_next_pass_uses_what_was_written(write, around):
    model = made().eval()
    with around():
        before = model(pixel_values=tiny.images()).logits.clone()
    write(model)
    with around():
        after = model(pixel_values=tiny.images()).logits.clone()
    assert torch.equal(after, as_if_new(model))
    assert not torch.equal(after, before)
    # And training can go on with what was read in an evaluation.
    model.train()(pixel_values=tiny.images(), labels=tiny.labels()).loss.backward()


@tiny.needs_compile
@pytest.mark.parametrize("write", [by_copy, through_data, by_state_dict, of_a_frozen_norm])
def test_compiled_models_use_what_was_written(write):
    model = made().eval()
    compiled = torch.compile(model, backend="aot_eager")
    logits(compiled)
    write(model)
    torch.testing.assert_close(logits(compiled), as_if_new(model))


@tiny.needs_compile
@pytest.mark.parametrize("write", [blocks_by_copy, blocks_through_data])
def test_compiled_models_fail_where_blocks_were_written_into_the_buffer(write):
    model = made().eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    logits(compiled)
    write(model)
    with pytest.raises(RuntimeError, match="a compiled model does not notice"):
        logits(compiled)
    logits(model)
    torch.testing.assert_close(logits(compiled), as_if_new(model))


def test_a_hook_and_a_parametrization_of_what_prompts_pass_through():
    model = made().eval()
    plain = logits(model)
    block = tiny.blocks(model)[1]
    hook = block.attention.v_proj.register_forward_hook(lambda module, args, output: 2 * output)
    hooked = logits(model)
    hook.remove()
    assert torch.equal(logits(model), plain)
    # Twice the values of tokens and prompts: so do twice the weights.
    with torch.no_grad():
        block.attention.v_proj.weight.mul_(2)
        block.attention.v_proj.bias.mul_(2)
    torch.testing.assert_close(logits(model), hooked)
    nn.utils.parametrizations.weight_norm(block.attention.k_proj)
    torch.testing.assert_close(logits(model), hooked)
    block.attention.k_proj.parametrizations.weight.original0.data.mul_(3)
    assert not torch.allclose(logits(model), hooked)


def test_writing_in_training_between_two_evaluations_of_an_average():
    """As exponential averages are evaluated: swapped in through `.data`, and out again."""
    model = made().eval()
    first = logits(model)
    kept = model.base_model.prompts().detach().clone()
    through_data(model)
    assert torch.equal(logits(model), as_if_new(model))
    model.base_model.prompts().data.copy_(kept)
    assert torch.equal(logits(model), first)


# ---- averages -------------------------------------------------------------------------------------------------------


def blocks_of(state):
    return state[BLOCKS].argmax(dim=1).tolist()


@pytest.mark.parametrize("decay", [0.5, 0.99, 0.9999])
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16])
def test_a_prompt_of_an_averaged_state_dict_stands_where_it_has_stood(decay, dtype):
    model = tiny.prompted(tiny.make("vit", num_hidden_layers=12), num_prompts=1)
    copied = {
        name: tensor.clone() if dtype is None else tensor.to(dtype) for name, tensor in model.state_dict().items()
    }
    model.base_model.move_prompt(0, 11)
    seen = set()
    for _ in range(100):
        for name, tensor in model.state_dict().items():
            copied[name].copy_(decay * copied[name] + (1 - decay) * tensor.to(copied[name].dtype))
        seen.add(blocks_of(copied)[0])
        # No prompt moves that did not move.
        assert blocks_of(copied)[1:] == list(range(2, 13))
    assert seen <= {1, 11}
    if dtype is not torch.bfloat16:
        # A half or a hundredth at a time, the average follows; in a hundred steps of 0.0001 it does not yet.
        assert blocks_of(copied)[0] == (1 if decay == 0.9999 else 11)
    average = copy.deepcopy(model)
    average.load_state_dict({name: tensor.to(model.state_dict()[name].dtype) for name, tensor in copied.items()})
    assert average.base_model.prompt_blocks().tolist() == blocks_of(copied)
    logits(average)


@pytest.mark.parametrize("decay", [0.5, 0.99])
def test_a_prompt_of_an_averaged_adapter_stands_where_it_has_stood(decay):
    """As LoRA's scripts average what PEFT saves."""
    model = made()
    averaged = {name: tensor.clone() for name, tensor in get_peft_model_state_dict(model).items()}
    model.base_model.move_prompt(0, 4)
    seen = set()
    for _ in range(100):
        for name, tensor in get_peft_model_state_dict(model).items():
            averaged[name].copy_(decay * averaged[name] + (1 - decay) * tensor)
        average = made()
        set_peft_model_state_dict(average, averaged)
        seen.add(average.base_model.prompt_blocks().tolist()[0])
    assert seen == {1, 4} if decay == 0.99 else {4}
    assert average.base_model.prompt_blocks()[0] == 4


def test_a_file_with_the_numbers_of_blocks_loads(tmp_path):
    """As version 0.1 wrote them."""
    model = made()
    model.base_model.move_prompt(0, 4)
    model.base_model.move_prompt(1, 0)
    model.save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    key = "base_model.bank.provpt_prompt_blocks"
    tensors[key] = tensors[key].argmax(dim=1)
    save_file(tensors, path)
    loaded = PeftModel.from_pretrained(tiny.make("vit"), tmp_path)
    assert torch.equal(loaded.base_model.prompt_blocks(), model.base_model.prompt_blocks())
    assert read_adapter(tmp_path).run.distribution == model.base_model.prompt_distribution()


@pytest.mark.parametrize("use_buffers", [False, True])
def test_torch_s_averaged_model(use_buffers):
    model = made().train()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.6), use_buffers=use_buffers).eval()
    average.update_parameters(model)
    before = logits(average)
    model.base_model.move_prompt(0, 4)
    through_data(model)
    average.update_parameters(model)
    inner = average.module
    # Averaged buffers have 0.6 of the old block.
    assert inner.base_model.prompt_blocks()[0] == (1 if use_buffers else 4)
    after = logits(average)
    assert not torch.equal(after, before)
    average.update_parameters(model)
    assert inner.base_model.prompt_blocks()[0] == 4
    inner.load_state_dict({k: v if k != BLOCKS else model.state_dict()[k] for k, v in inner.state_dict().items()})
    assert torch.equal(logits(average), as_if_new(inner))


# ---- passes that are recorded or transformed ------------------------------------------------------------------------


def ensemble(*moves):
    models = [made().eval() for _ in range(2)]
    for model in models:
        for move in moves:
            model.base_model.move_prompt(*move)
    with torch.no_grad():
        models[1].base_model.prompts().normal_()
    return models


def run_together(models):
    """PyTorch's recipe for ensembles."""
    weights, buffers = torch.func.stack_module_state(models)
    shell, inputs = made().eval(), {"pixel_values": tiny.images()}

    def run(weights, buffers):
        return torch.func.functional_call(shell, (weights, buffers), (), inputs).logits

    with torch.no_grad():
        return torch.func.vmap(run)(weights, buffers)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_models_that_vmap_runs_together_have_their_own_blocks():
    models = ensemble((0, 4), (1, 0))
    torch.testing.assert_close(run_together(models), torch.stack([logits(model) for model in models]))
    models[0].base_model.move_prompt(2, 3)
    with pytest.raises(ValueError, match="must have their prompts in the same blocks"):
        run_together(models)


def test_other_tensors_under_a_derivative():
    model, other = made().eval(), made().eval()
    other.base_model.move_prompt(0, 4)

    def total(images):
        return torch.func.functional_call(model, other.state_dict(), (), {"pixel_values": images}).logits.sum()

    _, found = torch.func.grad_and_value(total)(tiny.images())
    torch.testing.assert_close(found, logits(other).sum())
    assert not torch.isclose(found, logits(model).sum())


@pytest.mark.parametrize("write", [blocks_by_copy, blocks_through_data])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.*:DeprecationWarning")
def test_a_trace_after_blocks_were_written_has_the_new_ones(write):
    model = made().eval()
    logits(model)
    write(model)
    model.requires_grad_(False)
    traced = torch.jit.trace(lambda images: model(pixel_values=images).logits, tiny.images(), check_trace=False)
    torch.testing.assert_close(traced(tiny.images()), as_if_new(model))


def test_passes_without_numbers():
    model = made().eval()
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        assert model(pixel_values=torch.empty(2, 3, 32, 32)).logits.shape == (2, 3)
    model.to("meta")
    assert logits_of(model, tiny.images().to("meta")).shape == (2, 3)


@pytest.mark.parametrize("settings", [{}, dict(num_prompts=3, shallow=True)])
def test_offloaded_prompts_are_refused(settings):
    model = cpu_offload(made(**settings).eval(), execution_device="cpu")
    with pytest.raises(ValueError, match=r"must have values, but those of default are on the meta device\. Offload"):
        logits(model)


def test_one_number_is_read_in_a_pass():
    """On a GPU each waits for the device."""

    class Reads(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.read = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
                self.read.append(function)
            return function(*args, **(kwargs or {}))

    model = made().eval()
    comparisons = []
    equal = torch.equal
    with pytest.MonkeyPatch.context() as patch, Reads() as reads:
        patch.setattr(torch, "equal", lambda *args: comparisons.append(args) or equal(*args))
        logits(model)
    # The comparison is outside of dispatch modes.
    assert (len(comparisons), reads.read) == (1, [])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_each_image_with_dropout():
    model = made(prompt_dropout=0.5).train()
    weights = {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}

    def loss(weights, image, label):
        inputs = {"pixel_values": image[None], "labels": label[None]}
        return torch.func.functional_call(model, weights, (), inputs).loss

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), randomness="different")
    gradient = each(weights, tiny.images(4), tiny.labels(4))[PROMPTS]
    assert gradient.shape == (4, 8, 32)
    # Other entries are dropped for each image.
    dropped = gradient == 0
    assert 0.4 < dropped.float().mean() < 0.6
    assert not torch.equal(dropped[0], dropped[1])


# ---- what is left out -----------------------------------------------------------------------------------------------


def test_prompts_without_their_blocks_are_refused_before_anything_is_changed():
    model = made(modules_to_save=["classifier"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    saved = {
        name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    assert BLOCKS not in saved
    new = made(modules_to_save=["classifier"])
    before = copy.deepcopy(new.state_dict())
    for module in (new, nn.ModuleDict({"model": new})):
        state = saved if module is new else {f"model.{name}": tensor for name, tensor in saved.items()}
        with pytest.raises(ValueError, match="Prompts must be loaded with their blocks"):
            module.load_state_dict(state, strict=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in new.state_dict().items())
    # As the message says.
    new.load_state_dict(saved | {BLOCKS: new.state_dict()[BLOCKS]}, strict=False)
    assert torch.equal(new.base_model.prompts(), model.base_model.prompts())


def test_a_state_dict_of_something_else_loads_as_ever():
    model = made(modules_to_save=["classifier"])
    head = {name: tensor for name, tensor in model.state_dict().items() if "classifier" in name}
    model.load_state_dict(head, strict=False)
    model.add_adapter("other", ProVPTConfig(num_prompts=1))
    model.load_state_dict(model.state_dict())
