"""Pictures: the data in their axes, not only that there is a file."""

import json

import numpy as np
import pytest
import tiny
import torch
from peft import get_peft_model
from training import STEPS_AN_EPOCH, make_trainer, moving

import provpt_cli
from examples import attention_maps
from provpt_peft import ProVPTConfig, Relocation, RelocationConfig, Relocator, figures
from provpt_peft.records import Run
from provpt_peft.share.figures import read_run


def move(epoch, prompt, from_block, block, **others):
    return Relocation(epoch, prompt, from_block, block, idleness=0.1, **others)


# Two blocks start with 3 prompts each; before epochs 2 and 4 one goes from the first to the second.
RUN = Run([1, 5], [move(1, 0, 1, 2), Relocation(2, note="nothing"), move(3, 1, 1, 2)], epochs=4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    config = moving(score_images=8)
    trainer, callback = make_trainer(folder, config, eval_strategy="epoch", save_strategy="epoch")
    trainer.compute_metrics = lambda prediction: {"half": 0.5}
    trainer.train()
    trainer.model.save_pretrained(folder / "adapter")
    return folder, trainer, callback


# ---- reading --------------------------------------------------------------------------------------------------------


def test_the_distribution_over_time_by_hand():
    assert RUN.over_time() == [[3, 3], [2, 4], [2, 4], [1, 5]]


def test_prompts_from_and_to_no_block():
    run = Run([3, 1], [move(1, 0, 0, 1), move(2, 1, 2, 0)], epochs=3)
    assert run.over_time() == [[2, 2], [3, 2], [3, 1]]


def test_all_sources_tell_the_same(trained):
    folder, trainer, callback = trained
    assert len(callback.history) == 3
    start = [3] * 4
    runs = [read_run(s) for s in (callback, callback.run(), folder / "adapter", str(folder / "adapter"))]
    runs.append(read_run(folder / f"checkpoint-{4 * STEPS_AN_EPOCH}"))
    for run in runs:
        assert run.distribution == trainer.model.base_model.prompt_distribution()
        assert [(m.epoch, m.prompt, m.from_block, m.block) for m in run.choices] == [
            (m.epoch, m.prompt, m.from_block, m.block) for m in callback.history
        ]
        assert run.over_time()[0] == start
    # A checkpoint of the second epoch knows one move.
    early = read_run(folder / f"checkpoint-{2 * STEPS_AN_EPOCH}")
    assert len(early.choices) == 1
    assert early.over_time() == runs[0].over_time()[:2]


def test_a_relocator_is_a_source_too():
    batch = dict(pixel_values=tiny.images(4), labels=tiny.labels(4))
    relocator = Relocator(tiny.prompted(tiny.make("vit")), moving(), score_batches=[batch])
    for epoch in range(3):
        assert len(relocator.relocate()) == (epoch > 0)
    run = read_run(relocator)
    assert run.epochs == 3
    assert run.history == relocator.history
    assert run.distribution == relocator.tuner.prompt_distribution()
    assert len(figures.plot_distribution_over_time(relocator).axes[0].images[0].get_array()[0]) == 3


def test_what_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="training has not begun"):
        read_run(make_trainer(tmp_path)[1])
    with pytest.raises(ValueError, match="nothing has this name"):
        read_run("no/such/folder")
    with pytest.raises(ValueError, match="must have a history of relocations"):
        figures.plot_distribution_over_time(Run([1, 2]))


def test_the_best_model_s_history_ends_with_it(tmp_path):
    config = moving(score_images=8)
    scores = iter([1.0, 3.0, 2.0, 1.0])
    trainer, callback = make_trainer(
        tmp_path, config, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
        metric_for_best_model="eval_score", greater_is_better=True, save_total_limit=1,
    )  # fmt: skip
    trainer.compute_metrics = lambda prediction: {"score": next(scores)}
    trainer.train()
    assert len(callback.history) == 3
    training = trainer.model.peft_config["default"].training
    assert len(training["history"]) == 1
    assert training["metrics"]["eval_score"] == 3.0
    trainer.model.save_pretrained(tmp_path / "adapter")
    for run in (read_run(tmp_path / "adapter"), read_run(callback)):
        assert run.over_time()[0] == [3] * 4
        assert run.distribution == trainer.model.base_model.prompt_distribution()


def test_the_record_survives_a_resume_and_says_how_many_epochs(tmp_path):
    config = moving(score_images=8)
    trainer, _ = make_trainer(tmp_path, config, save_strategy="steps", save_steps=STEPS_AN_EPOCH * 2 + 1)
    trainer.train()
    epochs = trainer.model.peft_config["default"].training["epochs"]
    assert epochs == 4
    resumed, _ = make_trainer(tmp_path, config, num_train_epochs=2, save_strategy="no")
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS_AN_EPOCH * 2 + 1}"))
    assert len(resumed.model.peft_config["default"].training["history"]) == 2


def test_a_config_that_is_used_twice_knows_nothing_of_the_other_model(tmp_path):
    config = ProVPTConfig(num_prompts=3, modules_to_save=["classifier"])
    model = get_peft_model(tiny.make("vit"), config)
    make_trainer(tmp_path, moving(score_images=8), model=model)[0].train()
    other = get_peft_model(tiny.make("vit"), config)
    assert model.peft_config["default"].training is not None
    assert other.peft_config["default"].training is None


def test_metrics_of_several_data_sets(tmp_path):
    trainer, _ = make_trainer(tmp_path, eval_strategy="epoch", num_train_epochs=2)
    trainer.eval_dataset = {"a": trainer.eval_dataset, "b": trainer.eval_dataset}
    trainer.train()
    assert set(trainer.model.peft_config["default"].training["metrics"]) == {"eval_a_loss", "eval_b_loss"}


# ---- pictures of runs -----------------------------------------------------------------------------------------------


def test_bars_of_several_runs():
    figure = figures.plot_distribution({"ours": RUN, "uniform": Run([3, 3])})
    (axes,) = figure.axes
    heights = [[bar.get_height() for bar in bars] for bars in axes.containers]
    assert heights == [[1, 5], [3, 3]]
    # Side by side around the block's number.
    centres = [[bar.get_x() + bar.get_width() / 2 for bar in bars] for bars in axes.containers]
    np.testing.assert_allclose(np.mean(centres, axis=0), [1, 2])
    assert axes.get_xlabel() == "block"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["uniform", "ours", "uniform"]
    assert axes.lines[0].get_ydata()[0] == 3


def test_runs_of_other_backbones_do_not_go_side_by_side():
    with pytest.raises(ValueError, match=r"same number of blocks, got \{'a': 2, 'b': 3\}"):
        figures.plot_distribution({"a": Run([1, 2]), "b": Run([1, 2, 3])})


@pytest.mark.parametrize("nothing", [{}, Run([]), {"a": Run([]), "b": Run([])}, [RUN], None, torch.nn.Linear(1, 1)])
def test_nothing_to_draw(nothing):
    message = r"(`sources`|A run|A source) must .*, got (none|one without|an object of type \w+)\. (Give|Save)"
    with pytest.raises(ValueError, match=message):
        figures.plot_distribution(nothing)
    for plot in (figures.plot_distribution_over_time, figures.plot_idleness):
        with pytest.raises(ValueError, match="must "):
            plot(nothing)


def test_a_run_whose_prompts_are_in_no_block():
    run = Run([0, 0], [move(1, 0, 1, 0, block_idleness=[0.5, None])], epochs=2)
    assert [bar.get_height() for bar in figures.plot_distribution(run).axes[0].containers[0]] == [0, 0]
    assert figures.plot_distribution_over_time(run).axes[0].images[0].get_array().tolist() == [[1, 0], [0, 0]]
    assert len(figures.plot_idleness(run).axes[0].images[0].get_array()) == 2


def test_a_run_of_very_many_periods(tmp_path):
    """It neither fails at its end nor costs the memory of whoever looks at it."""
    model = tiny.prompted(tiny.make("vit"))
    relocator = Relocator(model, RelocationConfig(relocate_every=1), score_batches=[{}])
    for epoch, epochs in [(10**6, 10**6 + 1), (1, 10**9), (10**9, 0)]:
        training = dict(epochs=epochs, history=[dict(epoch=epoch, prompt=0, from_block=1, block=4, block_idleness=[])])
        model.peft_config["default"].training = training | dict(relocation={"relocate_every": 1})
        assert relocator.run().epochs == epochs
        model.save_pretrained(tmp_path)
        if epochs:
            assert f"1 move in {epochs} periods of 1 steps" in (tmp_path / "README.md").read_text()
        assert provpt_cli.main(["show", str(tmp_path)]) == 0
        assert sum(bar.get_height() for bar in figures.plot_distribution(tmp_path).axes[0].containers[0]) == 12
        for plot in (figures.plot_distribution_over_time, figures.plot_idleness):
            with pytest.raises(
                ValueError, match=r"at most 100000 periods of 1 steps to be drawn, got 10000\d+\. Draw the"
            ):
                plot(tmp_path)


def test_pictures_of_long_runs_have_a_size_that_can_be_saved(tmp_path):
    run = Run([1, 5], [move(1, 0, 1, 2), move(2999, 1, 1, 2)], epochs=3000)
    figure = figures.plot_distribution_over_time(run)
    assert figure.get_size_inches()[0] == 40
    figure.savefig(tmp_path / "long.png", dpi=20)


def test_heat_map_with_arrows():
    axes = figures.plot_distribution_over_time(RUN).axes[0]
    (image,) = axes.images
    assert image.get_array().tolist() == [[3, 2, 2, 1], [3, 4, 4, 5]]
    assert image.get_extent() == [0.5, 4.5, 0.5, 2.5]
    # Between the first and the second epoch, and between the third and the fourth.
    assert [(arrow.xyann, arrow.xy) for arrow in axes.texts] == [((1.5, 1), (1.5, 2)), ((3.5, 1), (3.5, 2))]


def test_idleness_of_blocks():
    run = Run([1, 5], [move(1, 0, 1, 2, block_idleness=[0.5, None]), move(3, 1, 1, 2, block_idleness=[-1.0, 0.2])], 4)
    (image,) = figures.plot_idleness(run).axes[0].images
    table = image.get_array().filled(np.nan)
    np.testing.assert_allclose(table, [[0.5, np.nan, -1.0], [np.nan, np.nan, 0.2]], rtol=1e-6)
    assert image.get_clim() == (-1, 1)
    with pytest.raises(ValueError, match="must hold the blocks' idleness"):
        figures.plot_idleness(RUN)


# ---- pictures of models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["vit", "dinov2", "data2vec", "swin", "swinv2"])
def test_attention_on_prompts(family):
    """Against a model whose eager attention gives its weights."""
    model = tiny.prompted(tiny.make(family), num_prompts=2).train()
    counts = [1, 3, *[2] * (model.base_model.num_blocks - 2)]
    model.base_model.move_prompt(0, 2)
    means = attention_maps.prompt_attention(model, **tiny.inputs(family))
    assert [len(block) for block in means] == counts
    assert all(0 < weight < 1 for block in means for weight in block)
    assert model.training
    assert not any("attend" in vars(block) for block in model.base_model.blocks)
    if family in ("vit", "dinov2"):
        base = tiny.make(family, attn_implementation="eager")
        eager = tiny.prompted(base, num_prompts=2)
        eager.base_model.prompts().data.copy_(model.base_model.prompts())
        eager.base_model.move_prompt(0, 2)
        weights = eager(**tiny.inputs(family), output_attentions=True).attentions
        expected = [block[:, :, 0, 17:].mean(dim=(0, 1)).tolist() for block in weights]
        for mine, theirs in zip(means, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4)
    axes = attention_maps.plot_prompt_attention(model, **tiny.inputs(family)).axes[0]
    np.testing.assert_allclose([bar.get_height() for bar in axes.patches], [sum(block) for block in means], rtol=1e-6)


def test_maps_of_attention_show_where_the_class_token_looks():
    model = tiny.prompted(tiny.make("vit"), num_prompts=2)
    maps = attention_maps.attention_map(model, tiny.images())
    assert maps.shape == (2, 4, 4)
    torch.testing.assert_close(maps.sum(dim=(1, 2)), torch.ones(2))
    eager = tiny.prompted(tiny.make("vit", attn_implementation="eager"), num_prompts=2)
    eager.base_model.prompts().data.copy_(model.base_model.prompts())
    last = eager(pixel_values=tiny.images(), output_attentions=True).attentions[-1][:, :, 0, 1:17].mean(dim=1)
    torch.testing.assert_close(maps, (last / last.sum(dim=1, keepdim=True)).view(2, 4, 4), atol=1e-5, rtol=1e-4)
    figure = attention_maps.plot_attention_maps({"VPT-Deep": model, "PRO-VPT": model}, tiny.images())
    assert [axes.get_title() for axes in figure.axes[:3]] == ["image", "VPT-Deep", "PRO-VPT"]
    np.testing.assert_allclose(figure.axes[1].images[1].get_array(), maps[0], rtol=1e-6)
    with pytest.raises(ValueError, match="which Swin lacks"):
        attention_maps.attention_map(tiny.prompted(tiny.make("swin")), tiny.images())


def test_attention_under_a_boolean_mask_is_that_of_eager():
    means = []
    for implementation in ("sdpa", "eager"):
        model = tiny.prompted(tiny.make("siglip2", attn_implementation=implementation), num_prompts=2)
        means.append(attention_maps.prompt_attention(model, **tiny.inputs("siglip2")))
    np.testing.assert_allclose(*means, rtol=1e-4)


def test_models_that_a_picture_does_not_fit():
    with pytest.raises(ValueError, match="those of VPT-Shallow are tokens"):
        attention_maps.prompt_attention(tiny.prompted(tiny.make("vit"), shallow=True), pixel_values=tiny.images())
    with pytest.raises(ValueError, match="needs a class token beside the 16 patches"):
        attention_maps.attention_map(tiny.prompted(tiny.make("ijepa")), tiny.images())


def test_models_without_prompts():
    with pytest.raises(ValueError, match="has no PROVPT adapter"):
        attention_maps.prompt_attention(tiny.make("vit"), pixel_values=tiny.images())
    model = tiny.prompted(tiny.make("vit"), num_prompts=[1, 0, 0, 0])
    model.base_model.move_prompt(0, 0)
    assert attention_maps.prompt_attention(model, pixel_values=tiny.images()) == [[]] * 4
    with pytest.raises(ValueError, match=r"got all prompts in no block\. Move one"):
        attention_maps.plot_prompt_attention(model, pixel_values=tiny.images())


def test_the_record_in_a_config_is_json(trained):
    folder, *_ = trained
    training = json.loads((folder / "adapter" / "adapter_config.json").read_text())["training"]
    assert training["epochs"] == 4
    assert training["relocation"] == moving(score_images=8).settings()
    assert len(training["history"]) == 3
    assert training["metrics"]["eval_half"] == 0.5
    assert not any("runtime" in name or "per_second" in name for name in training["metrics"])
    assert ProVPTConfig.from_pretrained(folder / "adapter").training == training
    means = training["history"][0]["block_idleness"]
    assert len(means) == 4
    with pytest.raises(ValueError, match="`training` must be a dict"):
        ProVPTConfig(training=[1])


def test_idleness_of_blocks_is_the_mean_of_their_prompts():
    model = tiny.prompted(tiny.make("vit"))
    batch = dict(pixel_values=tiny.images(4), labels=tiny.labels(4))
    config = RelocationConfig(idleness="exact", prompts_per_relocation=2)
    relocator = Relocator(model, config, score_batches=[batch])
    scores, _ = relocator.measure()
    blocks = model.base_model.prompt_blocks()
    assert relocator.relocate(progress=0) == []
    record, *_ = relocator.relocate(progress=0)
    expected = [scores.score[blocks == block].mean().item() for block in range(1, 5)]
    assert record.block_idleness == pytest.approx(expected)
