"""Install the wheel into an empty environment, and use it there as a user would.

    python tests/wheel.py dist .venv-wheel

The environment borrows the dependencies of the interpreter that runs this, but not its editable install of ours.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path


SMOKE = """
import sys, torch, provpt_peft
from peft import PeftModel, get_peft_model
from transformers import ViTConfig, ViTForImageClassification
from provpt_peft import ProVPTConfig, create_provpt_optimizer

assert provpt_peft.__file__.startswith(sys.prefix), provpt_peft.__file__
torch.manual_seed(0)
sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32)
base = ViTForImageClassification(ViTConfig(patch_size=16, num_labels=3, **sizes))
base.save_pretrained("base")
model = get_peft_model(base, ProVPTConfig(num_prompts=2, modules_to_save=["classifier"]))
optimizer = create_provpt_optimizer(model, torch.optim.AdamW)
images, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 0])
first = model(pixel_values=images, labels=labels).loss
first.backward()
optimizer.step()
model.base_model.move_prompt(0, 2)
model.save_pretrained("adapter")
with torch.no_grad():
    expected = model.eval()(pixel_values=images).logits
    again = PeftModel.from_pretrained(ViTForImageClassification.from_pretrained("base"), "adapter").eval()
    torch.testing.assert_close(again(pixel_values=images).logits, expected)
assert model.base_model.prompt_distribution() == [1, 3]
"""


def main() -> None:
    wheels, folder = Path(sys.argv[1]), Path(sys.argv[2]).resolve()
    (wheel,) = wheels.glob("*.whl")
    venv.create(folder, with_pip=True, clear=True)
    (folder / ".gitignore").write_text("*\n")
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # A path in a .pth file is searched, but no .pth file in it is read: so the editable install stays unseen.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([python, "-W", "ignore", "-c", SMOKE], check=True, cwd=scratch)
        for command in (["--version"], ["check", "adapter"], ["show", "adapter"]):
            subprocess.run([folder / "bin" / "provpt", *command], check=True, cwd=scratch)


if __name__ == "__main__":
    main()
