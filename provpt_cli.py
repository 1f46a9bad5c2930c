"""The `provpt` command.

This module is outside the package and imports it only to run a command, so `--help` and `--version` answer at once.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


_USAGE = """Inspect adapters from the command line.

provpt show ADAPTER                     print base model, labels, prompts in each block, relocations
provpt plot ADAPTER -o picture.png      draw the prompts in each block, over time if that is recorded
provpt check ADAPTER                    check the files; exit with code 1 and a reason if one is broken
"""
_LONGEST = 40  # length of the longest bar of `show`, in characters
_MOST_LABELS = 10  # most labels that `show` names


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        print(f"provpt_peft {metadata.version('provpt-peft')}")
        parser.exit()


def main(arguments: list[str] | None = None) -> int:
    """Run a command, by default from `sys.argv`. Returns its exit code: 0, or 1 with a reason on stderr."""
    parser = argparse.ArgumentParser(
        prog="provpt", description=_USAGE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{show,plot,check}")
    for name, function, explanation in (
        ("show", _show, "print a summary of an adapter"),
        ("plot", _plot, "draw the distribution of an adapter's prompts"),
        ("check", _check, "check an adapter's files"),
    ):
        command = commands.add_parser(name, help=explanation, description=explanation)
        command.add_argument("adapter", type=Path, help="folder written by save_pretrained or the Trainer")
        command.set_defaults(function=function)
    plot = commands.choices["plot"]
    plot.add_argument("-o", "--output", type=Path, required=True, help="picture to write, such as out.png")
    kinds = (
        "prompts by block, prompts over time, or idleness over time: the mean score of a block's prompts, above 0 if "
        "the model can do without them (default: over time if recorded)"
    )
    plot.add_argument("--kind", choices=("auto", "blocks", "time", "idleness"), default="auto", help=kinds)
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # terminals that cannot print the bars
    try:
        options.function(options)
        sys.stdout.flush()
    except BrokenPipeError:  # a reader such as `head` has closed the pipe; Python would flush once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, ImportError, OSError) as error:
        from provpt_peft.records import printable

        print(printable(f"provpt {options.command}: {error}"), file=sys.stderr)
        return 1
    return 0


def _show(options: argparse.Namespace) -> None:
    """Print a summary of an adapter, with its prompts in each block as a bar chart."""
    from provpt_peft.records import printable
    from provpt_peft.share.files import PROMPT_BLOCKS, PROMPTS, read_adapter

    config, tensors, run = read_adapter(options.adapter)
    counts = run.distribution
    undistributed = len(tensors[PROMPTS]) - sum(counts)
    labels = list((config.id2label or {}).values())
    named = ", ".join(labels[:_MOST_LABELS]) + (", …" if len(labels) > _MOST_LABELS else "")
    parameters = sum(tensor.numel() for name, tensor in tensors.items() if name != PROMPT_BLOCKS)
    where = "the first block, as tokens" if config.shallow else f"{len(counts)} blocks"
    rows = {
        "base model": config.base_model_name_or_path or "not known",
        "labels": f"{len(labels)}: {named}" if labels else "none",
        "prompts": f"{sum(counts)} in {where}" + (f", {undistributed} in none" if undistributed else ""),
        "parameters": f"{parameters:,} that were trained",
        "relocations": run.moves if run.epochs else "none recorded",
        "made with": f"provpt_peft {config.provpt_version}",
    }
    rows |= {name: f"{value:g}" for name, value in run.metrics.items()}
    width = max(map(len, rows))
    lines = [f"{name:{width}}  {value}" for name, value in rows.items()]
    scale = min(1.0, _LONGEST / max(*counts, 1))
    bars = [
        f"block {block:>2}  {'█' * round(count * scale):{_LONGEST}} {count}" for block, count in enumerate(counts, 1)
    ]
    print(*map(printable, lines), "", *bars, sep="\n")


def _plot(options: argparse.Namespace) -> None:
    from provpt_peft.share import figures

    run = figures.read_run(options.adapter)
    kind = options.kind if options.kind != "auto" else ("time" if run.history else "blocks")
    draw = {
        "blocks": figures.plot_distribution,
        "time": figures.plot_distribution_over_time,
        "idleness": figures.plot_idleness,
    }[kind]
    output = options.output if options.output.suffix else options.output.with_suffix(".png")
    draw(run).savefig(output, dpi=150)
    print(f"The picture is in {output}.")


def _check(options: argparse.Namespace) -> None:
    from provpt_peft.share.files import read_adapter

    read_adapter(options.adapter)
    print(f"{options.adapter}: nothing is wrong.")


if __name__ == "__main__":
    sys.exit(main())
