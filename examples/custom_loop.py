"""Relocation in a training loop of one's own, without the Trainer.

    python examples/custom_loop.py

`train` is the whole of it. With the same settings and seed it makes the same moves as the Trainer with
`RelocationTrainerCallback`: it shuffles, clips and schedules as the Trainer does by default.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset
from tqdm.auto import tqdm

from provpt_peft import ProVPTConfig, RelocationConfig, Relocator


sys.path.append(str(Path(__file__).resolve().parent / "benchmarks"))
import tasks
from common import make_base


Example = dict[str, torch.Tensor]


class Examples(Dataset[Example]):
    """A split with its tensors under the names of the model's arguments."""

    def __init__(self, split: tasks.Split) -> None:
        self.split = split

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> Example:
        return {"pixel_values": self.split.images[index], "labels": self.split.labels[index]}


def train(
    model: PeftModel,
    train_dataset: Dataset[Example],
    relocation_config: RelocationConfig,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    score_dataset: Dataset[Example] | None = None,
    progress_bar: bool = True,
) -> Relocator:
    """Train prompts and head, and relocate prompts meanwhile. Returns the relocator, which has the history.

    Args:
        model: What `get_peft_model` returned, on its device.
        train_dataset: Images and labels under the names of the model's arguments, with a length.
        relocation_config: When, which and where to.
        epochs: Passes over the training images.
        batch_size: Images of a step, and of a batch of score images.
        learning_rate: The first learning rate; it falls linearly to 0.
        seed: Seed of dropout and shuffling.
        score_dataset: Images to measure scores on, by default `score_images` of the training images.
        progress_bar: Whether to show one.
    """
    torch.manual_seed(seed)
    device = next(model.parameters()).device
    shuffling = torch.Generator()
    loader = DataLoader(train_dataset, batch_size, sampler=RandomSampler(train_dataset, generator=shuffling))
    steps = epochs * len(loader)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)

    if score_dataset is None and relocation_config.score_images > 0:
        score_dataset = Subset(train_dataset, relocation_config.choose_score_images(len(train_dataset)))
    # Without them, scores are gathered in the training steps.
    score_batches = None
    if score_dataset is not None:
        # A generator of its own, since iterating draws a number, and dropout would draw others.
        score_batches = DataLoader(score_dataset, batch_size, generator=torch.Generator())
    relocator = Relocator(model, relocation_config, optimizer, score_batches=score_batches)
    every = len(loader) if relocation_config.relocate_every == "epoch" else relocation_config.relocate_every

    model.train()
    step = 0
    with tqdm(total=steps, disable=not progress_bar) as bar:
        for epoch in range(epochs):
            shuffling.manual_seed(seed + epoch)  # as the Trainer's sampler does
            for batch in loader:
                # Before the first step there is nothing to go by, and this does nothing.
                if step % every == 0:
                    relocator.relocate(progress=step / steps)
                loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
                loss.backward()
                relocator.record_step(loss)
                torch.nn.utils.clip_grad_norm_(trainable, 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                step += 1
                bar.update()
    relocator.finish()
    return relocator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", help="checkpoint of the backbone (default: the demo's DINOv2-S)")
    parser.add_argument("--num_prompts", type=int, default=5, help="prompts in each block at the start (default: 5)")
    parser.add_argument("--epochs", type=int, default=9, help="epochs (default: 9)")
    parser.add_argument("--train_images", type=int, default=800, help="training images (default: 800)")
    parser.add_argument("--image_size", type=int, default=56, help="side of an image in pixels (default: 56)")
    parser.add_argument("--batch_size", type=int, default=32, help="images of a step (default: 32)")
    parser.add_argument("--learning_rate", type=float, default=3e-3, help="first learning rate (default: 3e-3)")
    parser.add_argument("--seed", type=int, default=0, help="seed (default: 0)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("outputs/custom_loop"), help="folder of the trained adapter"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    task = tasks.load("digits", args.image_size, args.train_images, seed=args.seed)
    base = make_base(task.num_labels, args.seed, args.model_name_or_path)
    model = get_peft_model(base, ProVPTConfig(num_prompts=args.num_prompts, modules_to_save=["classifier"]))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    relocator = train(
        model,
        Examples(task.train),
        RelocationConfig(seed=args.seed),
        epochs=args.epochs,
        batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        seed=args.seed,
    )

    for move in relocator.history:
        if move.prompt is None:
            print(f"after epoch {move.epoch}: {move.note}")
        else:
            reward = "not known" if move.reward is None else f"{move.reward:+.4f}"
            print(
                f"after epoch {move.epoch}: prompt {move.prompt} from block {move.from_block} to {move.block}, "
                f"idleness {move.idleness:+.4f}, reward {reward}"
            )
    print(f"prompts in each block: {model.base_model.prompt_distribution()}")
    print(f"test accuracy: {tasks.evaluate(model, task.test)[1]:.4f}")
    model.save_pretrained(args.output_dir)
    print(f"The adapter is in {args.output_dir}.")


if __name__ == "__main__":
    main()
