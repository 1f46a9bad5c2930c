"""Relocation in a custom training loop, without the Trainer.

    python examples/dinov2_small.py .cache/dinov2-small
    python examples/custom_loop.py

The function `train` is the whole loop. With the same settings and seed it makes the same moves as the Trainer with
`RelocationTrainerCallback`: it shuffles and clips as the Trainer does by default, and its schedule is that of
`lr_scheduler_type="cosine", warmup_steps=0.3`.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler
from tqdm.auto import tqdm
from transformers import AutoModelForImageClassification, get_cosine_schedule_with_warmup

from provpt_peft import ProVPTConfig, Relocation, RelocationConfig, Relocator, create_provpt_optimizer
from provpt_peft.relocation.batches import first_batches


# Written by dinov2_small.py.
DEMO = ".cache/dinov2-small"
# Those of ImageNet, which most backbones expect.
IMAGE_MEAN, IMAGE_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Example = dict[str, torch.Tensor]


class Examples(Dataset[Example]):
    """Images (B, 3, size, size) and labels (B,) under the names of the model's arguments."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Example:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def load_data(size: int, train_images: int, seed: int) -> tuple[Examples, Examples]:
    """scikit-learn's 1,797 handwritten digits at `size` pixels a side, split into training and test images."""
    digits = load_digits()
    gray = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    gray = F.interpolate(gray, size=(size, size), mode="bicubic").clamp(0, 1)
    mean, std = (torch.tensor(values)[:, None, None] for values in (IMAGE_MEAN, IMAGE_STD))
    images, labels = (gray - mean) / std, torch.tensor(digits.target)  # (B, 3, size, size), (B,)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, test = order[:train_images], order[train_images:]
    return Examples(images[train], labels[train]), Examples(images[test], labels[test])


def train(
    model: PeftModel,
    train_dataset: Dataset[Example],
    relocation_config: RelocationConfig,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float | None = None,
    seed: int,
    progress_bar: bool = True,
) -> Relocator:
    """Train prompts and head, and relocate prompts along the way. Returns the relocator, which has the history.

    Args:
        model: What `get_peft_model` returned, on its device.
        train_dataset: Images and labels under the names of the model's arguments, with a length.
        relocation_config: When prompts move, which ones, and where to.
        epochs: Passes over the training images.
        batch_size: Images per step.
        learning_rate: Peak learning rate of the prompts; the default depends on their number. It warms up over 0.3 of
            the steps, then decays as a cosine.
        seed: Seed of dropout and shuffling.
        progress_bar: Whether to show a progress bar.
    """
    torch.manual_seed(seed)
    device = next(model.parameters()).device
    shuffling = torch.Generator().manual_seed(seed)
    loader = DataLoader(train_dataset, batch_size, sampler=RandomSampler(train_dataset, generator=shuffling))
    steps = epochs * len(loader)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = create_provpt_optimizer(model, torch.optim.AdamW, lr=learning_rate)
    schedule = get_cosine_schedule_with_warmup(optimizer, math.ceil(0.3 * steps), steps)

    score_batches = first_batches(loader, relocation_config.score_images)
    relocator = Relocator(model, relocation_config, optimizer, score_batches=score_batches)
    every = len(loader) if relocation_config.relocate_every == "epoch" else relocation_config.relocate_every

    model.train()
    step = 0
    with tqdm(total=steps, disable=not progress_bar) as bar:
        for epoch in range(epochs):
            shuffling.manual_seed(seed + epoch)  # as the Trainer's sampler does
            for batch in loader:
                if step % every == 0:  # before each epoch, unless the config has a number of steps
                    relocator.relocate(progress=step / steps)
                loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(trainable, 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                step += 1
                bar.update()
    relocator.finish()
    return relocator


@torch.no_grad()
def accuracy(model: PeftModel, dataset: Dataset[Example], batch_size: int = 128) -> float:
    """The share of images that the model classifies correctly, in eval mode."""
    model.eval()
    device = next(model.parameters()).device
    right = [
        model(pixel_values=batch["pixel_values"].to(device)).logits.argmax(dim=-1).cpu() == batch["labels"]
        for batch in DataLoader(dataset, batch_size)
    ]
    return torch.cat(right).float().mean().item()


def describe(record: Relocation) -> str:
    """A line for a record of the relocator's history."""
    if record.prompt is None:
        return f"after epoch {record.epoch}: {record.note}"
    stays = record.block == record.from_block
    where = f"stays in block {record.block}" if stays else f"from block {record.from_block} to {record.block}"
    # A note says why there is no reward.
    outcome = record.note or f"reward {record.reward:+.4f}"
    return f"after epoch {record.epoch}: prompt {record.prompt} {where}, idleness {record.idleness:+.4f}, {outcome}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model_name_or_path", default=DEMO, help=f"checkpoint of the backbone (default: the demo's, {DEMO})"
    )  # fmt: skip
    parser.add_argument("--num_prompts", type=int, default=5, help="prompts in each block at the start (default: 5)")
    parser.add_argument("--epochs", type=int, default=9, help="epochs (default: 9)")
    parser.add_argument("--train_images", type=int, default=800, help="training images (default: 800)")
    parser.add_argument("--image_size", type=int, default=56, help="side of an image in pixels (default: 56)")
    parser.add_argument("--batch_size", type=int, default=8, help="images per step (default: 8)")
    parser.add_argument(
        "--learning_rate", type=float, help="learning rate of the prompts (default: depends on their number)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed (default: 0)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("outputs/custom_loop"), help="folder of the trained adapter"
    )
    args = parser.parse_args()
    if args.model_name_or_path == DEMO and not Path(DEMO).exists():
        parser.error(
            f"there is no backbone in {DEMO}. Run `python examples/dinov2_small.py {DEMO}`, "
            "or name another checkpoint with `--model_name_or_path`"
        )
    images = len(load_digits().target)
    if not 0 < args.train_images < images:
        parser.error(f"--train_images must be between 1 and {images - 1}, which leaves an image to test on")
    for name in ("num_prompts", "epochs", "batch_size", "image_size", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    torch.set_num_threads(args.threads)

    train_dataset, test_dataset = load_data(args.image_size, args.train_images, args.seed)
    torch.manual_seed(args.seed)  # for the new head
    base = AutoModelForImageClassification.from_pretrained(
        args.model_name_or_path, num_labels=10, ignore_mismatched_sizes=True
    )
    model = get_peft_model(base, ProVPTConfig(num_prompts=args.num_prompts, modules_to_save=["classifier"]))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    relocator = train(
        model,
        train_dataset,
        RelocationConfig(seed=args.seed),
        epochs=args.epochs,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        seed=args.seed,
    )

    for record in relocator.history:
        print(describe(record))
    print(f"prompts in each block: {model.base_model.prompt_distribution()}")
    print(f"test accuracy: {accuracy(model, test_dataset):.4f}")
    model.save_pretrained(args.output_dir)
    print(f"The adapter is in {args.output_dir}.")


if __name__ == "__main__":
    main()
