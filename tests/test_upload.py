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
with torch.no_grad():
    same = torch.equal(model(pixel_values=tiny.images()).logits, here(pixel_values=tiny.images()).logits)
print(json.dumps([same, labels, processor.size["height"], PeftConfig.from_pretrained("me/flowers").peft_type]))
"""


@pytest.fixture
def base(tmp_path):
    tiny.make("vit").save_pretrained(tmp_path / "base")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def run(code, folder, address, token, *arguments):
    environment = {
        **os.environ, "HF_ENDPOINT": address, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(tiny.FOLDER), "HF_HUB_OFFLINE": "0", "no_proxy": "127.0.0.1",
    }  # fmt: skip
    environment.pop("HF_TOKEN", None)
    if token is not None:
        environment["HF_TOKEN"] = token
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("visibility", ["public", "private"])
def test_what_was_uploaded_is_downloaded(tmp_path, base, visibility):
    with hub_server.running() as (address, repositories):
        uploaded = run(UPLOAD, tmp_path, address, hub_server.TOKEN, base, visibility)
        assert uploaded.returncode == 0, uploaded.stderr
        assert "me/flowers/commit/" in uploaded.stdout
        assert repositories["me/flowers"].private == (visibility == "private")
        files = repositories["me/flowers"].files
        assert {"README.md", "adapter_config.json", "adapter_model.safetensors"} <= set(files)
        assert "preprocessor_config.json" in files
        card = ModelCard(files["README.md"].decode())
        assert card.data.license == "mit"
        assert "| prompts | 2 | 3 | 3 | 4 |" in card.text
        assert "load_image_classifier" in card.text

        downloaded = run(DOWNLOAD, tmp_path, address, hub_server.TOKEN, base)
        assert downloaded.returncode == 0, downloaded.stderr
        same, labels, height, peft_type = json.loads(downloaded.stdout.splitlines()[-1])
        assert same
        assert labels == {"0": "daisy", "1": "rose", "2": "tulip"}
        assert (height, peft_type) == (32, "PROVPT")
        check_adapter(tmp_path / "here")

        # Others see what is public, and a wrong token sees nothing. From folders without a cache.
        for token, may in [(None, visibility == "public"), ("hf_wrong", False)]:
            (tmp_path / str(token)).mkdir()
            other = run(DOWNLOAD.replace('"here"', '"../here"'), tmp_path / str(token), address, token, base)
            assert (other.returncode == 0) == may, other.stderr[-2000:]
            assert may or "401" in other.stderr


def test_a_wrong_token_may_not_upload(tmp_path, base):
    with hub_server.running() as (address, repositories):
        refused = run(UPLOAD, tmp_path, address, "hf_wrong", base, "public")
        assert refused.returncode != 0
        assert "401" in refused.stderr
        assert not repositories
