"""A prompted model leaves PyTorch: exported at batch 2, run at other batch sizes."""

import onnx.reference
import pytest
import tiny
import torch
from torch import nn


class Logits(nn.Module):
    """Export takes a module with positional inputs and plain tensors as outputs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pixel_values):
        return self.model(pixel_values=pixel_values).logits


@pytest.fixture
def model():
    model = tiny.prompted(tiny.make("vit")).eval()
    with torch.no_grad():
        model.base_model.prompts().normal_()
    # A block without prompts, one with more than the others, and a prompt in no block.
    for prompt, block in [(0, 4), (1, 4), (2, 4), (5, 0)]:
        model.base_model.move_prompt(prompt, block)
    return Logits(model)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:You are using the legacy TorchScript-based ONNX export:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The feature will be removed:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Constant folding - Only steps=1 can be constant folded:UserWarning")
def test_onnx_at_batch_2_runs_at_1_and_5(tmp_path, model):
    # The exporter on top of `torch.export` gives the same but needs one more package, onnxscript.
    path = tmp_path / "model.onnx"
    torch.onnx.export(
        model,
        (tiny.images(2),),
        path,
        dynamo=False,
        input_names=["pixel_values"],
        output_names=["logits"],
        dynamic_axes={"pixel_values": {0: "batch"}, "logits": {0: "batch"}},
    )
    exported = onnx.reference.ReferenceEvaluator(str(path))
    for batch in (1, 2, 5):
        pixel_values = tiny.images(batch, seed=batch)
        (logits,) = exported.run(None, {"pixel_values": pixel_values.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(logits), model(pixel_values), atol=1e-4, rtol=1e-4)


@tiny.needs_compile
def test_torch_export_at_batch_2_runs_at_1_and_5(model):
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (tiny.images(2),), dynamic_shapes={"pixel_values": {0: batch}})
    exported = program.module()
    for batch in (1, 2, 5):
        pixel_values = tiny.images(batch, seed=batch)
        with torch.no_grad():
            torch.testing.assert_close(exported(pixel_values), model(pixel_values), atol=1e-4, rtol=1e-4)
