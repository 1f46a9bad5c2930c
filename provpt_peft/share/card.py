"""The model card of an adapter: how to load it, and where its prompts ended up."""

from __future__ import annotations

import json
import logging
import re
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from peft import PeftModel
from peft.utils import CONFIG_NAME, WEIGHTS_NAME
from torch import nn

from ..config import ProVPTConfig
from ..records import Run, printable, run_of
from ..relocation import RelocationConfig
from .files import distribution_of, read_config, saved_blocks
from .hub import is_hub_id


logger = logging.getLogger(__name__)

# The text between these lines is rewritten at each save. The rest of the card is the user's.
_START = "<!-- provpt_peft: start, written anew at each save -->"
_END = "<!-- provpt_peft: end -->"

# PEFT's heading for the library versions that an adapter was made with.
_VERSIONS = "### Framework versions"

_PICTURE = "distribution.png"
_ADAPTER_TAG = "base_model:adapter:"

_CLASSIFIER_SNIPPET = """\
import provpt_peft
from PIL import Image

model, image_processor, labels = provpt_peft.load_image_classifier({arguments})  # this folder, or its Hub id
image = Image.new("RGB", (224, 224))  # or Image.open("photo.jpg")
logits = model(**image_processor(image, return_tensors="pt")).logits
{result}"""
_PIPELINE = (
    "`pipeline` and `AutoModelForImageClassification.from_pretrained` cannot load the adapter by its name. "
    "Pass a pipeline what the snippet loads: "
    '`pipeline("image-classification", model=model, image_processor=image_processor)`.'
)
_RESULTS = {
    "single_label_classification": "print(labels[logits.argmax(-1).item()])",
    "multi_label_classification": "print([labels[index] for index in (logits[0] > 0).nonzero()[:, 0].tolist()])",
    "regression": "print(logits[0].tolist())",
}

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
    folder: str, config: ProVPTConfig | None = None, auto_mapping: dict[str, str] | None = None
) -> None:
    """Write this method's section into the `README.md` of an adapter's folder, and create the file if there is none.

    PEFT writes a card for the default adapter only. It writes a base model's path as if it were a Hub id, which the
    Hub refuses, so the path is removed. Nothing else happens in a folder without an adapter's tensors, and a second
    call changes nothing. Errors here are only warnings, so that an adapter is saved even if its card is not.

    Args:
        folder: The adapter's folder.
        config: The adapter's config, by default the one in the folder.
        auto_mapping: PEFT's name and module of the base model's class, by default what the config has.
    """
    try:
        _update(Path(folder), config, auto_mapping)
    except Exception as error:
        logger.warning("%s: the model card was not written, %s: %s", folder, type(error).__name__, error)


def keep_card(model: nn.Module) -> None:
    """Let a `PeftModel` rewrite our section whenever its model card is replaced.

    `Trainer.create_model_card` overwrites our card and then calls the model's `create_or_update_model_card`.
    `PeftModel.push_to_hub` overwrites it and then calls `_upload_modified_files`. Neither calls the tuner or the
    config, so both methods are replaced on this one model; PEFT's classes do not change. PEFT shows the model to our
    tuner when it saves or loads an adapter, which comes before.
    """
    if isinstance(model, PeftModel):
        for method in (create_or_update_model_card, _upload_modified_files):
            setattr(model, method.__name__, MethodType(method, model))


def create_or_update_model_card(model: PeftModel, output_dir: str) -> None:
    """PEFT's method of this name, followed by our section."""
    type(model).create_or_update_model_card(model, output_dir)
    update_model_card(output_dir)


def _upload_modified_files(model: PeftModel, working_dir: str, *args: Any, **kwargs: Any) -> Any:
    update_model_card(working_dir)
    return type(model)._upload_modified_files(model, working_dir, *args, **kwargs)


def _update(folder: Path, config: ProVPTConfig | None, auto_mapping: dict[str, str] | None) -> None:
    path = folder / "README.md"
    blocks = saved_blocks(folder)
    if blocks is None and not (path.is_file() and (config is None or (folder / WEIGHTS_NAME).is_file())):
        return  # the README of something else
    card = ModelCard.load(path) if path.is_file() else ModelCard(f"{_title(config)}\n")
    dropped = _drop_local_base_model(card)
    if blocks is not None:
        config = config or read_config(folder / CONFIG_NAME)
        distribution = distribution_of(config, blocks)
        try:
            run = run_of(config.training, distribution[1:])
        except ValueError:  # the record came with the adapter and is not valid
            run = Run(distribution[1:])
        _fill_in(card, config)
        card.text = _without_template(card.text, config)
        picture = _draw(folder, run)
        section = _section(distribution, config, auto_mapping or config.auto_mapping or {}, run, picture)
        card.text = _with_section(card.text, section)
    if blocks is not None or dropped:
        card.save(path)


def _fill_in(card: ModelCard, config: ProVPTConfig) -> None:
    """Add the metadata that tells the Hub what this is. PEFT's card has it already, other cards do not."""
    data: Any = card.data
    data.library_name = "peft"
    tags = {*(data.tags or []), "peft", "provpt", "visual-prompt-tuning"}
    if is_hub_id(config.base_model_name_or_path):
        data.base_model = data.base_model or config.base_model_name_or_path
        tags.add(f"{_ADAPTER_TAG}{config.base_model_name_or_path}")
    data.tags = sorted(tags)


def _title(config: ProVPTConfig | None) -> str:
    base_model = config.base_model_name_or_path if config is not None else None
    return f"# Visual prompts for {base_model}" if base_model and is_hub_id(base_model) else "# Visual prompts"


def _without_template(text: str, config: ProVPTConfig) -> str:
    """Reduce PEFT's template to a title and the library versions if nobody has filled it in."""
    before, start, rest = text.partition(_START)
    _, stop, after = rest.partition(_END)
    body, heading, versions = (before + after if start and stop else text).partition(_VERSIONS)
    return f"{_title(config)}\n\n{heading}{versions}" if body.split() == _template() else text


@cache
def _template() -> list[str]:
    """The words of huggingface_hub's model card, which PEFT's is made from."""
    return ModelCard.from_template(ModelCardData()).text.split()


def _drop_local_base_model(card: ModelCard) -> bool:
    """Remove a base model that is not a Hub id from the metadata. Returns whether there was one."""
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
    """The card's text with the section where the old one was, or below the title."""
    section = f"{_START}\n\n{section}\n\n{_END}"
    before, start, rest = text.partition(_START)
    _, stop, after = rest.partition(_END)
    if start and stop:
        return before + section + after
    # The Trainer's card has a comment above its title.
    title = re.match(r"(?:\s*<!--(?:(?!-->).)*-->)*\s*# [^\n]*", text, re.DOTALL)
    end = title.end() if title else 0
    return f"\n{text[:end].strip()}\n\n{section}\n\n{text[end:].lstrip()}"


def _section(
    distribution: list[int], config: ProVPTConfig, auto_mapping: dict[str, str], run: Run, picture: bool
) -> str:
    undistributed, *counts = distribution
    parts = ["## Visual prompts in the blocks"]
    if config.shallow:
        parts.append(f"This adapter has {sum(counts)} prompts that enter the first block as tokens (VPT-Shallow).")
    else:
        spare = f", {undistributed} of them in no block" if undistributed else ""
        total = f"{sum(distribution)} prompts in a vision transformer of {len(counts)} blocks{spare}"
        rows = [["block", *range(1, len(counts) + 1)], ["---"] * (len(counts) + 1), ["prompts", *counts]]
        parts.append(f"This adapter has {total}. The distribution over the blocks:")
        parts.append("\n".join(f"| {' | '.join(map(str, row))} |" for row in rows))
    if picture:
        parts.append(f"![Prompts in each block]({_PICTURE})")
    if run.epochs:
        default = RelocationConfig().settings()
        changed = {name: value for name, value in run.settings.items() if value != default.get(name)}
        settings = _code(json.dumps(changed)[1:-1]) if changed else "the default"
        parts.append(
            f"The prompts were relocated while they were trained: {run.moves}, with the settings of "
            f"`RelocationConfig` ({settings})."
        )
    if run.metrics:
        metrics = [f"| {_code(name.removeprefix('eval_'))} | {value:.4g} |" for name, value in run.metrics.items()]
        parts += ["## The last evaluation", "\n".join(["| | |", "| --- | --- |", *metrics])]
    parts += [
        "## How to load it",
        "The adapter needs the package `provpt-peft`: `pip install PATH` with the path of its source or its wheel, or "
        "`pip install provpt-peft` if a package index has it. `import provpt_peft` registers the method with PEFT, "
        "and `PeftModel.from_pretrained` needs it too.",
        f"```python\n{_snippet(config, auto_mapping)}\n```",
    ]
    if config.id2label is not None:
        parts.append(_PIPELINE)
    if not is_hub_id(config.base_model_name_or_path):
        parts.append("The base model was not from the Hub: load the adapter where that model is available.")
    return "\n\n".join(parts)


def _code(text: str) -> str:
    """Text from a file as inline code, without links or pictures. It cannot end its code, line or table cell."""
    return f"`{printable(text, forbidden='|`') or '?'}`"


def _draw(folder: Path, run: Run) -> bool:
    """Draw the distribution of a relocated adapter into its folder, if matplotlib is installed."""
    try:
        if run.history:
            from . import figures

            figures.plot_distribution(run).savefig(folder / _PICTURE, dpi=100)
            return True
    except ImportError:
        pass
    except Exception as error:
        logger.warning("%s: the picture was not drawn, %s: %s", folder, type(error).__name__, error)
    return False


def _snippet(config: ProVPTConfig, auto_mapping: dict[str, str]) -> str:
    known = bool(config.base_model_name_or_path)
    if config.id2label is not None:
        arguments = '"."' if known else '".", base_model="path/to/the/base/model"'
        result = _RESULTS[config.problem_type or "single_label_classification"]
        return _CLASSIFIER_SNIPPET.format(arguments=arguments, result=result)
    base_class = auto_mapping.get("base_model_class", "model")
    if auto_mapping.get("parent_library", "").split(".")[0] == "transformers":
        base_model = "config.base_model_name_or_path" if known else '"path/to/the/base/model"'
        return _TRANSFORMERS_SNIPPET.format(base_class=base_class, base_model=base_model)
    return _OTHER_SNIPPET.format(base_class=base_class)
