"""The statistics of the research scripts, by hand, and the reports of their results."""

import argparse
import importlib
import re
import sys

import pytest
import tiny
import torch
from scipy import ndimage

from examples.research import cost, offline, overheads, tasks
from examples.research.common import append_lines, peak_memory, starting_prompts, variance_components
from examples.research.methods import print_tables, read_runs, relocation_config, relocation_settings


REPORTS = {
    "adjustments": [],
    "cost": ["--num_prompts", "10", "100"],
    "idleness_fidelity": [],
    "offline": ["--device", "cpu", "--recipe", "first"],
    "recipes": [],
    "strategies": [],
}


def rows_of(text):
    return [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| ---")]


@pytest.fixture
def report(tmp_path, monkeypatch, capsys):
    """The rows that a research script prints of its committed results. Its pictures go to a temporary folder."""
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, "--report", "--threads", "1", *arguments])
        importlib.import_module(f"examples.research.{name}").main()
        return rows_of(capsys.readouterr().out)

    return run


@pytest.mark.parametrize("name", REPORTS)
def test_reports_of_the_committed_results(report, name):
    assert len(report(name, *REPORTS[name])) > 10


def marked_tables():
    """Page, command and text of what stands between `<!-- NAME --report ... -->` and `<!-- end -->` in the docs."""
    for page in sorted((tiny.FOLDER.parent / "docs").glob("*.md")):
        marked = re.findall(r"<!-- (\w+)(?:\.py)? --report(.*?) -->(.*?)<!-- end -->", page.read_text(), re.DOTALL)
        yield from ((page.name, name, options.split(), text) for name, options, text in marked)


def test_the_tables_of_the_docs_are_those_of_the_reports(report):
    found = list(marked_tables())
    assert found
    for page, name, options, text in found:
        missing = set(rows_of(text)) - set(report(name, *options))
        assert not missing, (page, name, options)


def test_a_relocation_is_timed_that_moves_a_prompt():
    median, slowest = overheads.relocation_ms(num_prompts=2, rounds=2)
    assert 0 < median <= slowest


def test_variance_components():
    # Three columns differ by 1 and two rows by 4, without a rest: variances 1 and 8.
    assert variance_components(torch.tensor([[1.0, 2, 3], [5, 6, 7]])) == (1.0, 8.0, 0.0)
    # The same difference of the columns with its sign turned: nothing is theirs. MS_rest = (1 + 0 + 1) * 2 / 2.
    assert variance_components(torch.tensor([[1.0, 2, 3], [3, 2, 1]])) == (0.0, 0.0, 2.0)
    # Effects -1, 0, 1 and residuals ±0.5 in two of the columns: MS_columns = 2 * 2 / 2, MS_rest = 4 * 0.25 / 2.
    columns, rows, rest = variance_components(torch.tensor([[-1.5, 0.5, 1], [-0.5, -0.5, 1]]))
    assert (columns, rows, rest) == (pytest.approx((2 - 0.5) / 2), 0.0, pytest.approx(0.5))
    # Rows differ by 4, residuals are 1: (2 * 8 - 4) / 2, and a rest of 4 with one degree of freedom.
    assert variance_components(torch.tensor([[1.0, 3], [7, 5]])) == (0.0, 6.0, 4.0)


def test_table_of_accuracies(capsys):
    def runs(parameters=1000, **accuracies):
        costs = {"num_trainable_params": parameters, "file_size": 4000, "accelerator_memory_max": 2e6}
        return [{"seed": int(seed[1:]), "test_accuracy": value, **costs} for seed, value in accuracies.items()]

    chosen = {
        ("vpt-deep", "a"): runs(s0=10.0, s1=20.0),
        ("vpt-deep", "b"): runs(s1=40.0, parameters=4000),
        ("lora", "a"): runs(s0=11.0, s1=24.0),
        ("linear", "a"): runs(s0=9.0, s1=16.0),
        ("linear", "b"): runs(s0=50.0, s1=43.0),
    }
    print_tables(chosen, {"first": ["a", "b"], "second": ["a"]}, ("lora", "linear", "vpt-deep"))
    output = capsys.readouterr().out.splitlines()
    # 10 and 20: 15, with a standard deviation of 50^0.5 and an error of 5. Both tasks of the first group have seed 1.
    accuracies = "15.00 ± 5.00 (2) | 40.00 (1) | 30.00 (1) | 15.00 ± 5.00 (2) | 25.00 (1)"
    # A mean over two tasks of the costs, though one has two runs.
    assert output[4] == f"| vpt-deep | {accuracies} | 2,500 | 4 | 2 |"
    assert output[2] == "| lora | 17.50 ± 6.50 (2) |  |  | 17.50 ± 6.50 (2) |  | 1,000 | 4 | 2 |"
    assert output[6] == "Test accuracy less VPT-Deep's of the same task and seed, in points:"
    # 1 and 4 points.
    assert output[10] == "| lora | +2.50 ± 1.50 (2) |  |  | +2.50 ± 1.50 (2) |  | +2.50 ± 1.50 (2) |"
    # -1 and -4 points, and 3: on seed 1 half a point less on the first group. All pairs: -2 / 3, variance 12.33.
    assert output[11] == (
        "| linear | -2.50 ± 1.50 (2) | +3.00 (1) | -0.50 (1) | -2.50 ± 1.50 (2) | -2.25 (1) | -0.67 ± 2.03 (3) |"
    )


def test_runs_of_a_preset_that_has_changed_are_left_out(tmp_path):
    run = {"method": "pro-vpt-default", "prune_share": None, "epochs": 1}
    present = relocation_settings(relocation_config("pro-vpt-default", None))
    changed = present | {"settle": 0.9}
    lines = [
        run | {"relocation": present, "seed": 0, "train_loss": float("nan")},
        run | {"relocation": changed, "seed": 1},
        run | {"method": "linear", "relocation": None, "seed": 2},
        run | {"method": "linear", "relocation": None, "seed": 3, "epochs": 2},
        {"method": "pro-vpt-A", "prune_share": 0.2, "epochs": 1, "seed": 4}
        | {"relocation": relocation_settings(relocation_config("pro-vpt-A", 0.2))},
    ]
    append_lines(tmp_path / "results.jsonl", lines)
    found = read_runs(tmp_path / "results.jsonl", {"epochs": 1})
    assert [line["seed"] for line in found] == [0, 2, 4]
    # JSON as the standard has it.
    assert found[0]["train_loss"] is None


def test_runs_on_other_images_are_not_mixed(tmp_path):
    args = argparse.Namespace(
        output=tmp_path / "results.jsonl",
        train_images=800,
        validation_images=200,
        image_size=28,
        num_prompts=5,
        recipe="own",
    )
    seen = {"task": "digits", "seed": 0, "train_images": 800, "validation_images": 200, "image_size": 28}
    append_lines(args.output, [seen | {"data_hash": "another"}])
    with pytest.raises(SystemExit, match="has runs on other images of digits, seed 0"):
        offline.run("linear", "digits", 0, (1e-3, None), args)


def test_a_task_has_too_few_images():
    with pytest.raises(ValueError, match=r"A task of 1797 images cannot give 1700 training and 97 validation images"):
        tasks.load("digits", 28, train=1700, validation=97)


@pytest.mark.parametrize(
    ("strategy", "prune_share", "counts", "reserve"),
    [
        ("vpt-deep", None, [2] * 6, 0),
        # 12 prompts in two blocks, and in five.
        ("vpt-deep-5-6", None, [0, 0, 0, 0, 6, 6], 0),
        ("VPT in blocks 1-5", None, [3, 3, 2, 2, 2, 0], 0),
        # Half of 24 is the budget.
        ("B", 0.5, [4] * 6, 0),
        # One for each epoch but the first, until half of the budget is to be added.
        ("adding", None, [2, 2, 2, 2, 1, 1], 2),
    ],
)
def test_starting_prompts(strategy, prune_share, counts, reserve):
    assert starting_prompts(strategy, 2, 6, 3, prune_share) == (counts, reserve)


def test_peak_memory():
    model = torch.nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()

    def allocate():
        first, second = torch.empty(1_000_000), torch.empty(500_000)
        del first, second
        torch.empty(1_200_000)

    # Weights and momentum of 10,000 numbers; the first two tensors are there at once.
    assert peak_memory(model, optimizer, allocate) == pytest.approx(4 * (2 * 10_000 + 1_500_000), rel=1e-3)


@pytest.mark.parametrize("name", ["digits", "location", "orientation", "count", "distance"])
def test_tasks_are_the_same_for_the_same_seed(name):
    one, again, other = (tasks.load(name, 28, train=40, validation=10, seed=seed) for seed in (0, 0, 1))
    assert tasks.data_hash(one) == tasks.data_hash(again) != tasks.data_hash(other)
    assert (len(one.train), len(one.validation)) == (40, 10)
    assert len(one.test) == 1000
    labels = torch.cat([one.train.labels, one.validation.labels, one.test.labels])
    assert labels.unique().tolist() == list(range(one.num_labels))


def test_the_count_task_shows_as_many_shapes_as_its_label_says():
    split = tasks.load("count", 112, train=40, validation=10).train
    pictures = split.images * tasks.STD + tasks.MEAN
    for picture, label in zip(pictures, split.labels.tolist(), strict=True):
        ground = picture[:, 0, 0][:, None, None]  # no shape reaches the corner
        _, number = ndimage.label(((picture - ground).abs().amax(dim=0) > 0.1).numpy())
        assert number == label + 3


def test_nearer_objects_stand_lower_in_the_distance_task():
    split = tasks.load("distance", 112, train=300, validation=10).train
    pictures = split.images * tasks.STD + tasks.MEAN
    ground = pictures[:, :, -1, 0][:, :, None, None]  # nothing stands in the corner
    rows = ((pictures - ground).abs().amax(dim=1) > 0.02).any(dim=2)  # (B, size)
    lowest = (rows * torch.arange(rows.shape[1])).amax(dim=1).double()
    means = torch.stack([lowest[split.labels == label].mean() for label in range(6)])
    assert (means.diff() < 0).all()
    # An object at a distance of 2.5 heights stands at 0.3 + 1.3 / 2.5 of the side, a triangle's corner not quite.
    assert 0.85 * (0.3 + 1.3 / 2.5) < means[0] / 112 < 1.05 * (0.3 + 1.3 / 2.5)


def test_an_unknown_task_is_refused():
    with pytest.raises(ValueError, match=r"must be one of digits, stamps, textile, .*got 'cats'"):
        tasks.load("cats")


def test_an_unknown_contender_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cost.py", "--contenders", "prepended tokens, compiled", "VPT"])
    with pytest.raises(SystemExit):
        cost.main()
    assert "there is no contender 'VPT', they are 'frozen backbone', 'prepended tokens'" in capsys.readouterr().err


def test_stamps_that_cannot_be_fetched_say_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(tasks, "CACHE", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"`apt-get download`, which failed: .*by hand and put it at .*_all\.deb"):
        tasks.load("stamps")
    (tmp_path / "tuxpaint-stamps-default_2022.06.04-1_all.deb").write_bytes(b"something else")
    with pytest.raises(RuntimeError, match=r"must have the SHA-256 6db6c1bfc870\w+, but has \w+\. Remove it\."):
        tasks.load("stamps")
