"""The pages: every Python block runs, every link leads somewhere, the site builds without a warning."""

import html
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import nbformat
import numpy as np
import pytest
import tiny
import torch
import transformers
from peft import get_peft_model
from PIL import Image
from safetensors.torch import save_file
from training import Images
from transformers import TrainingArguments, ViTImageProcessor
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from docs import make_notebook
from examples import finetune_detection
from provpt_peft import ProVPTConfig, Relocation, create_provpt_optimizer
from provpt_peft.backbone.families import FAMILIES, BackboneFamily


ROOT = tiny.FOLDER.parent
PAGES = sorted([*ROOT.glob("*.md"), ROOT / "tests" / "README.md", *(ROOT / "docs").rglob("*.md")])
VIT, SWIN = "google/vit-base-patch16-224-in21k", "microsoft/swin-tiny-patch4-window7-224"
DINOV2 = ".cache/dinov2-small"


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def checkpoints(tmp_path):
    """Tiny models in the places of those that the pages name, and what they take: 224 px."""
    # As on the Hub: the ViT without a head, the Swin with that of other classes.
    vit = tiny.make("vit", image_size=224, patch_size=56).vit
    vit.config.save_pretrained(tmp_path / "vit")
    # What `ViTModel.save_pretrained` of transformers 5.9 writes is missed by its classifier.
    tensors = {f"vit.{name}": tensor.contiguous() for name, tensor in vit.state_dict().items() if "pooler" not in name}
    save_file(tensors, tmp_path / "vit" / "model.safetensors", metadata={"format": "pt"})
    tiny.make("swin", num_labels=5).save_pretrained(tmp_path / "swin")
    tiny.make("dinov2", num_labels=10).save_pretrained(tmp_path / "dinov2")
    for name in ("vit", "swin", "dinov2"):
        ViTImageProcessor(size={"height": 224, "width": 224}).save_pretrained(tmp_path / name)
    return {VIT: str(tmp_path / "vit"), SWIN: str(tmp_path / "swin"), DINOV2: str(tmp_path / "dinov2")}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty place to run in, with a few images of one's own."""
    generator = np.random.default_rng(0)
    for label in ("cat", "dog"):
        for number in range(10):
            path = tmp_path / "run" / "my-images" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 255, (20, 20, 3), dtype=np.uint8)).save(path)
    monkeypatch.chdir(tmp_path / "run")
    # In its place transformers 5.9 has something that asks for torchvision.
    monkeypatch.setattr(transformers, "AutoImageProcessor", AutoImageProcessor)
    return tmp_path / "run"


def given(page, checkpoints):
    """What a page takes for granted."""
    arguments = TrainingArguments(
        "out", num_train_epochs=3, per_device_train_batch_size=4, report_to="none", remove_unused_columns=False
    )
    names = dict(Trainer=transformers.Trainer, args=arguments, get_peft_model=get_peft_model)
    if page == "README.md":
        base = transformers.ViTForImageClassification.from_pretrained
        vit, fresh = (base(checkpoints[VIT], num_labels=3) for _ in range(2))
        data = Images()
        data.pixel_values = torch.nn.functional.interpolate(data.pixel_values, (224, 224))
        return names | dict(vit=vit, fresh_vit=fresh, train=data, validation=data)
    if page == "settings.md":
        data = torch.utils.data.Subset(Images(), range(8))
        return dict(base=tiny.make("vit"), train=data)
    if page == "relocation.md":
        model = tiny.prompted(tiny.make("vit"))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        return dict(model=model, optimizer=optimizer, loader=torch.utils.data.DataLoader(Images(), 8), epochs=3)
    if page == "tasks.md":
        swin = transformers.SwinConfig(**tiny.settings_of("swin"), out_features=["stage2", "stage3"])
        config = transformers.DeformableDetrConfig(
            backbone_config=swin, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=4, num_feature_levels=2,
        )  # fmt: skip
        label = {"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2]])}
        train = [{"pixel_values": image, "labels": label} for image in tiny.images(8)]
        return names | dict(
            config=config, train=train, collate=finetune_detection.collate, ProVPTConfig=ProVPTConfig,
            DeformableDetrForObjectDetection=transformers.DeformableDetrForObjectDetection,
            create_provpt_optimizer=create_provpt_optimizer, torch=torch,
        )  # fmt: skip
    return {}


def with_checkpoints(code, checkpoints):
    for name, path in checkpoints.items():
        code = code.replace(name, path)
    return code


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set:UserWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:You are using the legacy TorchScript-based ONNX export:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The feature will be removed:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Constant folding - Only steps=1 can be constant folded:UserWarning")
@pytest.mark.parametrize(
    "page", ["README.md", "quickstart.md", "howto.md", "tasks.md", "relocation.md", "settings.md"]
)
def test_snippets_run(page, checkpoints, folder):
    namespace = given(page, checkpoints)
    path = next(path for path in PAGES if path.name == page and "tests" not in path.parts)
    for number, code in enumerate(blocks(path)):
        exec(compile(with_checkpoints(code, checkpoints), f"{page}, block {number}", "exec"), namespace)


@pytest.mark.parametrize("page", ["quickstart.md", "howto.md"])
def test_printed_records_read_well(page, capsys):
    history = [
        Relocation(epoch=2, prompt=7, from_block=3, block=9, idleness=0.5),
        Relocation(epoch=3, prompt=8, from_block=4, block=4, idleness=0.5),
        Relocation(epoch=4, note="Not finite."),
    ]
    owner = SimpleNamespace(history=history)
    code = "".join(blocks(ROOT / "docs" / page))
    (loop,) = re.findall(r"^for \w+ in \w+\.history:\n(?: .*\n)+", code, re.MULTILINE)
    exec(loop, dict(callback=owner, relocator=owner))
    assert capsys.readouterr().out.splitlines() == [
        "after epoch 2: prompt 7 from block 3 to 9",
        "after epoch 3: prompt 8 stays in block 4",
        "after epoch 4: Not finite.",
    ]


def test_each_page_with_snippets_is_run_somewhere():
    with_snippets = {page.name for page in PAGES if blocks(page)}
    assert with_snippets == {
        "quickstart.md", "howto.md", "README.md", "backbones.md", "tasks.md", "relocation.md", "settings.md"
    }  # fmt: skip


def test_the_descriptions_of_a_family_are_right():
    entry, config = blocks(ROOT / "docs" / "backbones.md")
    assert eval(entry, dict(BackboneFamily=BackboneFamily)) == FAMILIES[0]
    assert set(eval(config, dict(ProVPTConfig=ProVPTConfig)).backbone) == {
        "block",
        "attention",
        "norm",
        "key",
        "value",
    }


@pytest.mark.parametrize("page", [*PAGES, make_notebook.NOTEBOOK], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if path.startswith(("http://", "https://")):
            continue
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
            assert anchor in slugs, target


def test_the_notebook_is_that_of_the_page():
    assert nbformat.read(make_notebook.NOTEBOOK, 4) == make_notebook.notebook()


@pytest.mark.slow  # its cells are those of the quick start, which `test_snippets_run` runs
def test_the_notebook_runs(checkpoints, folder):
    from nbclient import NotebookClient

    notebook = make_notebook.notebook()
    for cell in notebook.cells:
        cell.source = with_checkpoints(cell.source, checkpoints)
    beside = folder / "examples"
    beside.mkdir()
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(beside)}}).execute()
    assert (folder / "learned.png").is_file()
    assert (folder / "digits-provpt" / "adapter_model.safetensors").is_file()


def dead_links(site):
    """Page and target of the links and pictures that lead nowhere in a site, headings included."""
    texts = {path: path.read_text() for path in site.rglob("*.html")}
    for page, text in texts.items():
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            parts = urlsplit(html.unescape(link))
            if parts.scheme or parts.netloc:
                continue
            path = unquote(parts.path)
            file = (site / path[1:] if path.startswith("/") else page.parent / path).resolve() if path else page
            file = file / "index.html" if file.is_dir() else file
            fragment = unquote(parts.fragment)
            if not file.is_file() or (fragment and f'id="{fragment}"' not in texts.get(file, "")):
                yield page.relative_to(site), link


def test_a_dead_link_is_found(tmp_path):
    (tmp_path / "a.html").write_text('<a href="b.html#there">x</a> <a href="b.html#gone">x</a> <img src="c.png">')
    (tmp_path / "b.html").write_text('<h1 id="there">x</h1> <a href="https://elsewhere">x</a>')
    assert [link for _, link in dead_links(tmp_path)] == ["b.html#gone", "c.png"]


def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-3000:]
    assert not re.search(r"^WARNING", built.stderr, re.MULTILINE)
    api = (tmp_path / "site" / "api" / "index.html").read_text()
    for name in ("ProVPTConfig", "Relocator", "load_image_classifier", "plot_distribution_over_time"):
        assert f'id="provpt_peft.{name}"' in api or f'id="provpt_peft.share.figures.{name}"' in api
    assert Path(tmp_path / "site" / "quickstart" / "index.html").is_file()
    assert not [*dead_links(tmp_path / "site")]
