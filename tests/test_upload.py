"""Uploading to and downloading from a Hub on the loopback address."""

import json
import os
import subprocess
import sys

import hub_server
import pytest
import tiny
from huggingface_hub import ModelCard
from transformers import ViTImageProcessor

from provpt_peft import check_adapter


# In a process of its own, since the Hub's address is read when huggingface_hub is imported.
UPLOAD = """
import sys
import tiny
from transformers import ViTForImageClassification, ViTImageProcessorPil
import provpt_peft
base, private = sys.argv[1:]
model = tiny.prompted(ViTForImageClassification.from_pretrained(base), id2label={0: "daisy", 1: "rose", 2: "tulip"})
model.base_model.move_prompt(0, 4)
processor = ViTImageProcessorPil.from_pretrained(base)
print(provpt_peft.push_to_hub(model, "me/flowers", processor, license="mit", private=private == "private"))
model.save_pretrained("here")
"""
DOWNLOAD = """
import json, sys
import tiny, torch
from peft import AutoPeftModel, PeftConfig
import provpt_peft
model, processor, labels = provpt_peft.load_image_classifier("me/flowers", base_model=sys.argv[1])
here = provpt_peft.load_image_classifier("here", base_model=sys.argv[1]).model
auto = AutoPeftModel.from_pretrained("me/flowers").eval()
with torch.no_grad():
    first, *others = (m(pixel_values=tiny.images()).logits for m in (model, here, auto))
same = all(torch.equal(first, other) for other in others)
print(json.dumps([same, labels, processor.size["height"], PeftConfig.from_pretrained("me/flowers").peft_type]))
"""
PROCESSORS = """
import sys
import tiny
from huggingface_hub import upload_file
from transformers import ViTForImageClassification
import provpt_peft
base = sys.argv[1]
model = tiny.prompted(ViTForImageClassification.from_pretrained(base))
tiny.processor(24).save_pretrained("processor")
for name in ("me/flowers", "me/trained"):
    provpt_peft.push_to_hub(model, name, tiny.processor(16))
    if name == "me/trained":  # as a Trainer whose processing class it is uploads it
        file = "processor_config.json"
        upload_file(path_or_fileobj=f"processor/{file}", path_in_repo=file, repo_id=name)
    print(provpt_peft.load_image_classifier(name, base_model=base).image_processor.crop_size["height"])
"""
PUSH = """
import sys
import tiny
from training import make_trainer
from transformers import ViTForImageClassification
base, way = sys.argv[1:]
model = tiny.prompted(ViTForImageClassification.from_pretrained(base), id2label={0: "daisy", 1: "rose", 2: "tulip"})
for prompt in range(2):
    model.base_model.move_prompt(prompt, 4)
    if way == "model":
        model.push_to_hub("me/flowers")
    else:
        make_trainer("out", model=model, callback=False, hub_model_id="me/flowers")[0].push_to_hub()
"""
# What downloading and uploading begin with, without our imports.
CREATE = "import huggingface_hub; huggingface_hub.HfApi().create_repo('me/flowers')"
FETCH = "import huggingface_hub; huggingface_hub.snapshot_download('me/flowers')"


@pytest.fixture
def base(tmp_path):
    tiny.make("vit").save_pretrained(tmp_path / "base")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def run(code, folder, address, token, *arguments):
    environment = {
        **os.environ, "HF_ENDPOINT": address, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": os.pathsep.join([str(tiny.FOLDER), str(tiny.FOLDER.parent)]), "HF_HUB_OFFLINE": "0",
        "no_proxy": "127.0.0.1",
    }  # fmt: skip
    environment.pop("HF_TOKEN", None)
    if token is not None:
        environment["HF_TOKEN"] = token
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_what_was_uploaded_is_downloaded(tmp_path, base):
    with hub_server.running() as (address, repositories):
        uploaded = run(UPLOAD, tmp_path, address, hub_server.TOKEN, base, "public")
        assert uploaded.returncode == 0, uploaded.stderr
        assert "me/flowers/commit/" in uploaded.stdout
        assert not repositories["me/flowers"].private
        files = repositories["me/flowers"].files
        assert {"README.md", "adapter_config.json", "adapter_model.safetensors"} <= set(files)
        assert "preprocessor_config.json" in files
        card = ModelCard(files["README.md"].decode())
        assert card.data.license == "mit"
        assert "| prompts | 2 | 3 | 3 | 4 |" in card.text
        assert "load_image_classifier" in card.text

        # By anybody.
        downloaded = run(DOWNLOAD, tmp_path, address, None, base)
        assert downloaded.returncode == 0, downloaded.stderr
        same, labels, height, peft_type = json.loads(downloaded.stdout.splitlines()[-1])
        assert same
        assert labels == {"0": "daisy", "1": "rose", "2": "tulip"}
        assert (height, peft_type) == (32, "PROVPT")
        check_adapter(tmp_path / "here")


def test_the_image_processor_of_a_processor_is_uploaded_and_either_file_is_read(tmp_path, base):
    with hub_server.running() as (address, repositories):
        done = run(PROCESSORS, tmp_path, address, hub_server.TOKEN, base)
        assert done.returncode == 0, done.stderr
        files = repositories["me/flowers"].files
        assert "preprocessor_config.json" in files
        assert not [name for name in files if "token" in name]
        assert {"preprocessor_config.json", "processor_config.json"} <= set(repositories["me/trained"].files)
        assert [line for line in done.stdout.splitlines() if line.isdigit()] == ["16", "24"]


@pytest.mark.parametrize("way", [pytest.param("model", marks=pytest.mark.slow), "trainer"])
def test_other_ways_to_upload_keep_the_card(tmp_path, base, way):
    with hub_server.running() as (address, repositories):
        uploaded = run(PUSH, tmp_path, address, hub_server.TOKEN, base, way)
        assert uploaded.returncode == 0, uploaded.stderr
        card = ModelCard(repositories["me/flowers"].files["README.md"].decode())
        assert card.data.library_name == "peft"
        assert "provpt" in card.data.tags
        assert card.text.count("provpt_peft: start") == card.text.count("load_image_classifier(") == 1
        assert "| prompts | 1 | 3 | 3 | 5 |" in card.text  # the second upload's
        assert ("### Training hyperparameters" in card.text) == (way == "trainer")
        if way == "model":  # the Trainer writes its card anew
            files = repositories["me/flowers"].files
            files["README.md"] = files["README.md"].replace(b"## Model Card Contact", b"## Of my garden")
            (tmp_path / "again").mkdir()  # without a cache
            again = run(PUSH, tmp_path / "again", address, hub_server.TOKEN, base, way)
            assert again.returncode == 0, again.stderr
            text = files["README.md"].decode()
            assert text.count("## Of my garden") == text.count("provpt_peft: start") == 1


@pytest.mark.slow
def test_a_private_repository_is_its_owner_s(tmp_path, base):
    with hub_server.running() as (address, repositories):
        uploaded = run(UPLOAD, tmp_path, address, hub_server.TOKEN, base, "private")
        assert uploaded.returncode == 0, uploaded.stderr
        assert repositories["me/flowers"].private
        for token, may in [(hub_server.TOKEN, True), (None, False), ("hf_wrong", False)]:
            folder = tmp_path / str(token)  # without a cache
            folder.mkdir()
            result = run(FETCH, folder, address, token)
            assert (result.returncode == 0) == may, result.stderr
            assert may or "401" in result.stderr


def test_a_wrong_token_may_not_upload(tmp_path):
    with hub_server.running() as (address, repositories):
        refused = run(CREATE, tmp_path, address, "hf_wrong")
        assert refused.returncode != 0
        assert "401" in refused.stderr
        assert not repositories
