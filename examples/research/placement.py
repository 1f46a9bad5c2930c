"""What should a moved prompt start from? Change of the loss by its placement, and its learning rate afterwards.

    python -m examples.research.placement --eps 1e-6

Prints, for each start and stage of training: the median and the largest absolute change of the training loss from
placing a prompt, the share of placements that change it by no more than the median exact idleness, and the relative
change of the row in an SGD step over that of its neighbours' median (median, smallest, largest).
"""

from __future__ import annotations

import argparse

import torch
from tqdm.auto import tqdm

from . import tasks
from .common import exact_idleness, make_model, make_optimizer, train_epoch


def starts(prompts: torch.Tensor, prompt: int, residents: list[int], idleness: torch.Tensor, bound: float) -> dict:
    """Candidates for the vector of a moved prompt, by name."""
    least = min(residents, key=lambda k: idleness[k].abs().item())
    best = min(residents, key=lambda k: idleness[k].item())
    return {
        "its own vector": prompts[prompt].clone(),
        "a fresh vector": torch.empty_like(prompts[prompt]).uniform_(-bound, bound),
        "mean of the block": prompts[residents].mean(dim=0),
        "copy of the least used": prompts[least].clone(),
        "copy of the best": prompts[best].clone(),
        "its own times 1e-3": prompts[prompt] * 1e-3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eps", type=float, default=1e-6, help="epsilon of the backbone's norms (default: 1e-6)")
    parser.add_argument("--epochs", type=int, nargs="+", default=[1, 3], help="stages to measure at (default: 1 3)")
    parser.add_argument("--placements", type=int, default=24, help="random placements a stage (default: 24)")
    parser.add_argument("--images", type=int, default=128, help="training images to measure on (default: 128)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    train = tasks.load("digits").train
    probe = train[: args.images]
    model = make_model(eps=args.eps)
    tuner = model.base_model
    prompts = tuner.prompts()
    optimizer = make_optimizer(model)
    generator = torch.Generator().manual_seed(5)
    for epoch in range(1, max(args.epochs) + 1):
        loss = train_epoch(model, optimizer, train, seed=epoch)
        if epoch not in args.epochs:
            continue
        idleness = exact_idleness(model, probe)
        limit = idleness.abs().median().item()
        changes: dict[str, list[float]] = {}
        rates: dict[str, list[float]] = {}
        for trial in tqdm(range(args.placements), desc=f"epoch {epoch}"):
            blocks = tuner.prompt_blocks()
            prompt = int(torch.randint(0, len(blocks), (1,), generator=generator))
            home, block = int(blocks[prompt]), trial % tuner.num_blocks + 1
            block = block % tuner.num_blocks + 1 if block == home else block
            residents = (blocks == block).nonzero()[:, 0].tolist()
            own = prompts.detach()[prompt].clone()
            tuner.move_prompt(prompt, 0)
            without = tasks.evaluate(model, probe)[0]
            tuner.move_prompt(prompt, block)
            for name, vector in starts(prompts.detach(), prompt, residents, idleness, tuner.bank.bound).items():
                prompts.data[prompt] = vector
                changes.setdefault(name, []).append(abs(tasks.evaluate(model, probe)[0] - without))
                model.train()
                torch.manual_seed(trial)
                model(pixel_values=probe.images, labels=probe.labels).loss.backward()
                relative = prompts.grad.norm(dim=1) / prompts.detach().norm(dim=1)
                rates.setdefault(name, []).append((relative[prompt] / relative[residents].median()).item())
                optimizer.zero_grad()
            prompts.data[prompt] = own
            tuner.move_prompt(prompt, home)

        print(f"eps {args.eps}, epoch {epoch}, training loss {loss:.3f}, median |exact idleness| {limit:.5f}")
        print(f"{'start':24}{'change':>10}{'largest':>10}{'<= median':>11}{'rate':>10}{'smallest':>10}{'largest':>10}")
        for name in changes:
            change, rate = torch.tensor(changes[name]), torch.tensor(rates[name])
            share = (change <= limit).float().mean()
            print(f"{name:24}{change.median():10.5f}{change.max():10.5f}{share:11.2f}"
                  f"{rate.median():10.2g}{rate.min():10.2g}{rate.max():10.2g}")  # fmt: skip


if __name__ == "__main__":
    main()
