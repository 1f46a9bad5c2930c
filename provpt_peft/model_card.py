"""The model card of an adapter: how to load it, and where its prompts ended up."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open

from .config import ProVPTConfig
from .history import Run, printable, run_of
from .hub import PROMPT_BLOCKS, distribution_of, is_hub_id
from .relocation import RelocationConfig


TAGS = ("peft", "provpt", "visual-prompt-tuning")

# What stands between these lines is written anew at each save; the rest of the card is the user's.
_START = "<!-- provpt_peft: start, written anew at each save -->"
_END = "<!-- provpt_peft: end -->"

_CARD_NAME = "README.md"
PICTURE = "distribution.png"
_ADAPTER_TAG = "base_model:adapter:"

_CLASSIFIER_SNIPPET = """\
import provpt_peft
from PIL import Image

model, image_processor, labels = provpt_peft.load_image_classifier({arguments})  # this folder, or its Hub id
image = Image.new("RGB", (224, 224))  # or Image.open("photo.jpg")
logits = model(**image_processor(image, return_tensors="pt")).logits
{result}"""
_RESULTS = {
    "multi_label_classification": "print([labels[index] for index in (logits[0] > 0).nonzero()[:, 0].tolist()])",
    "regression": "print(logits[0].tolist())",
}
_ONE_LABEL = "print(labels[logits.argmax(-1).item()])"

_TRANSFORMERS_SNIPPET = """\
import provpt_peft
from peft import PeftConfig, PeftModel
from transformers import {base_class}

config = PeftConfig.from_pretrained(".")  # this folder, or its Hub id
base_model = {base_class}.from_pretrained({base_model})
model = PeftModel.from_pretrained(base_model, ".")"""

_OTHER_SNIPPET = """\
import provpt_peft
from peft import PeftModel

base_model = ...  # the {base_class} that the adapter was made with
model = PeftModel.from_pretrained(base_model, ".")  # this folder, or its Hub id"""


def update_model_card(
    folder: str | os.PathLike[str], config: ProVPTConfig, auto_mapping: dict[str, str] | None = None
) -> None:
    """Write what belongs to this method into the `README.md` of an adapter's folder, or make one.

    PEFT writes a card for the default adapter only, into the folder above for others. It takes a base model's path for
    a Hub id, which the Hub refuses: that is taken out of both. Nothing else happens where the folder has no adapter's
    tensors, and doing it twice changes nothing.

    Args:
        folder: Folder with `adapter_model.safetensors`.
        config: The adapter's config.
        auto_mapping: PEFT's name and module of the base model's class, by default what the config has.
    """
    folder = Path(folder)
    path = folder / _CARD_NAME
    card = ModelCard.load(path) if path.is_file() else _new_card(config)
    dropped = _drop_local_base_model(card)
    distribution = _saved_distribution(folder, config)
    if distribution is None:
        if dropped and path.is_file():
            card.save(path)
        return
    data: Any = card.data
    data.tags = sorted({*(data.tags or []), *TAGS})
    try:
        run = run_of(config, distribution[1:])
    except ValueError:  # a record that came with the adapter; saving must not fail for it
        run = Run(distribution[1:])
    section = _section(distribution, config, auto_mapping or config.auto_mapping or {}, run, _draw(folder, run))
    card.text = _with_section(card.text, section)
    card.save(path)

    above = folder.absolute().parent / _CARD_NAME
    # Only a card that PEFT wrote, and not that of another adapter.
    if (above.parent / SAFETENSORS_WEIGHTS_NAME).is_file():
        return
    if above.is_file() and "library_name: peft" in above.read_text(encoding="utf-8", errors="replace"):
        card = ModelCard.load(above)
        if _drop_local_base_model(card):
            card.save(above)


def _saved_distribution(folder: Path, config: ProVPTConfig) -> list[int] | None:
    """Prompts in none of the blocks and in each of the L blocks, or None where there is no adapter of ours."""
    path = folder / SAFETENSORS_WEIGHTS_NAME
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as tensors:
        if PROMPT_BLOCKS not in tensors.keys():  # noqa: SIM118, not a dict
            return None
        return distribution_of(config, tensors.get_tensor(PROMPT_BLOCKS))


def _new_card(config: ProVPTConfig) -> ModelCard:
    card = ModelCard("---\nlibrary_name: peft\n---\n\n# Visual prompts\n")
    name = config.base_model_name_or_path
    if name is not None:
        data: Any = card.data
        data.base_model = name
        data.tags = [f"{_ADAPTER_TAG}{name}"]
    return card


def _drop_local_base_model(card: ModelCard) -> bool:
    """Take a base model that is no Hub id out of the metadata. Returns whether there was one."""
    data: Any = card.data
    tags = data.tags or []
    kept = [tag for tag in tags if not tag.startswith(_ADAPTER_TAG) or is_hub_id(tag.removeprefix(_ADAPTER_TAG))]
    is_local = isinstance(data.base_model, str) and not is_hub_id(data.base_model)
    if kept != tags:
        data.tags = kept
    if is_local:
        data.pop("base_model")
    return is_local or kept != tags


def _with_section(text: str, section: str) -> str:
    """The card's text with the section in its place: where it was, or below the title."""
    section = f"{_START}\n\n{section}\n\n{_END}"
    before, start, rest = text.partition(_START)
    _, end, after = rest.partition(_END)
    if start and end:
        return before + section + after
    title, _, body = text.lstrip("\n").partition("\n")
    if not title.startswith("# "):
        title, body = "", text
    return f"\n{title}\n\n{section}\n\n{body.lstrip()}"


def _section(
    distribution: list[int], config: ProVPTConfig, auto_mapping: dict[str, str], run: Run, picture: bool
) -> str:
    undistributed, *counts = distribution
    columns = [str(number) for number in range(1, len(counts) + 1)]
    rows = [["block", *columns], ["---"] * (len(counts) + 1), ["prompts", *map(str, counts)]]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    spare = f", {undistributed} of them in no block" if undistributed else ""
    if config.shallow:
        prompts = [f"This adapter has {sum(counts)} prompts that enter the first block as tokens (VPT-Shallow)."]
    else:
        blocks = f"{sum(distribution)} prompts in a vision transformer of {len(counts)} blocks{spare}"
        prompts = [f"This adapter has {blocks}. The distribution over the blocks:", table]
    parts = [
        "## Visual prompts in the blocks",
        *prompts,
        *(["![Prompts in each block](" + PICTURE + ")"] if picture else []),
        *_training(run),
        "## How to load it",
        "The adapter needs the package `provpt-peft`. `import provpt_peft` is what teaches PEFT the method: "
        "`PeftModel.from_pretrained` needs it too.",
        f"```python\n{_snippet(config, auto_mapping)}\n```",
    ]
    if not is_hub_id(config.base_model_name_or_path):
        parts.append("The base model was not from the Hub: the adapter has to be loaded where that model is at hand.")
    return "\n\n".join(parts)


def _training(run: Run) -> list[str]:
    """Paragraphs on how the prompts were relocated, and on the last evaluation."""
    parts = []
    if run.epochs:
        default = asdict(RelocationConfig())
        changed = {name: value for name, value in run.settings.items() if value != default.get(name)}
        settings = _code(json.dumps(changed)[1:-1]) if changed else "the default"
        parts.append(
            f"The prompts were relocated while they were trained: {run.num_moves} moves in {run.epochs} "
            f"{run.periods}, with the settings of `RelocationConfig` ({settings})."
        )
    if run.metrics:
        rows = [f"| {_code(name.removeprefix('eval_'))} | {value:.4g} |" for name, value in run.metrics.items()]
        parts += ["## The last evaluation", "\n".join(["| | |", "| --- | --- |", *rows])]
    return parts


def _code(text: str) -> str:
    """Text of a file's as code, which makes no links or pictures of it. It shall not end the code, the line or the
    cell that it is in."""
    return f"`{printable(text, forbidden='|`') or '?'}`"


def _draw(folder: Path, run: Run) -> bool:
    """Draw the distribution of a relocated adapter into its folder, where matplotlib is installed."""
    if not run.history:
        return False
    try:
        from . import viz
    except ImportError:
        return False
    viz.plot_distribution(run).savefig(folder / PICTURE, dpi=100)
    return True


def _snippet(config: ProVPTConfig, auto_mapping: dict[str, str]) -> str:
    known = bool(config.base_model_name_or_path)
    if config.id2label is not None:
        return _CLASSIFIER_SNIPPET.format(
            arguments='"."' if known else '".", base_model="path/to/the/base/model"',
            result=_RESULTS.get(config.problem_type or "", _ONE_LABEL),
        )
    base_class = auto_mapping.get("base_model_class", "model")
    if auto_mapping.get("parent_library", "").split(".")[0] == "transformers":
        base_model = "config.base_model_name_or_path" if known else '"path/to/the/base/model"'
        return _TRANSFORMERS_SNIPPET.format(base_class=base_class, base_model=base_model)
    return _OTHER_SNIPPET.format(base_class=base_class)
