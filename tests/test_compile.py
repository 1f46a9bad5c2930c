"""`torch.compile`: the same function, and few recompiles while prompts move."""

import pytest
import tiny
import torch
from accelerate.utils import compile_regions
from torch._dynamo.utils import counters


# (prompt, block): a block gets more prompts and fewer, one and four, none, and its first one again.
MOVES = [(0, 2), (1, 2), (2, 2), (2, 1), (0, 0), (0, 1)]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@tiny.needs_compile
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_equals_eager_before_and_after_moves(backend):
    # Two blocks: what compiling costs is proportional to their number.
    model = tiny.prompted(tiny.make("vit", num_hidden_layers=2)).train()
    tuner = model.base_model
    compiled = torch.compile(model, backend=backend, fullgraph=True)

    def logits_and_gradient(model):
        output = model(pixel_values=tiny.images(), labels=tiny.labels())
        tuner.prompts().grad = None
        output.loss.backward()
        return output.logits.detach(), tuner.prompts().grad

    graphs = []
    for move in [None, *MOVES]:
        if move is not None:
            tuner.move_prompt(*move)
        expected, expected_gradient = logits_and_gradient(model)
        logits, gradient = logits_and_gradient(compiled)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    # One graph, a second one for a block without prompts.
    assert graphs == [1, 1, 1, 2, 2, 2, 2]
    # The size of the images is noted in compiled training too.
    model.peft_config["default"].image_size = None
    logits_and_gradient(compiled)
    assert model.peft_config["default"].image_size == [32, 32]


@tiny.needs_compile
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_checkpoint_that_a_graph_breaks_in_is_not_reentrant():
    """It is run uncompiled then."""
    gradients = []
    for settings in (None, dict(use_reentrant=True)):
        model = tiny.prompted(tiny.make("vit", num_hidden_layers=2)).train()
        if settings is not None:
            model.gradient_checkpointing_enable(settings)
            for block in tiny.blocks(model):
                block.layernorm_before.register_forward_hook(lambda *args: torch._dynamo.graph_break())
            model.compile(backend="aot_eager")
        model(pixel_values=tiny.images(), labels=tiny.labels()).loss.backward()
        gradients.append(model.base_model.prompts().grad)
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-5)


@tiny.needs_compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_blocks_compiled_one_by_one_are_called_through_their_model(caplog):
    """accelerate's copy of the model shares what the tuner keeps."""
    model = compile_regions(tiny.prompted(tiny.make("vit")).train(), backend="eager")
    model(pixel_values=tiny.images())
    assert not [record for record in caplog.records if record.name.startswith("provpt_peft")]
