"""Two learning rates in a line: which parameter is in which group, and a Trainer that trains with them."""

import pytest
import tiny
import torch
from peft import PeftModel
from training import Images
from transformers import Trainer, TrainerCallback, TrainingArguments

from provpt_peft import create_provpt_optimizer


def groups_of(model, **settings):
    optimizer = create_provpt_optimizer(model, torch.optim.AdamW, **(dict(lr=0.1, head_lr=0.01) | settings))
    return optimizer.param_groups


def test_prompts_and_head_have_a_group_each():
    model = tiny.prompted(tiny.make("vit"), modules_to_save=["classifier"])
    prompts, head = groups_of(model, weight_decay=0.5, betas=(0.8, 0.9))
    assert [id(p) for p in prompts["params"]] == [id(model.base_model.prompts())]
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    assert {id(p) for p in head["params"]} == trained - {id(model.base_model.prompts())}
    assert (prompts["lr"], head["lr"]) == (0.1, 0.01)
    assert (prompts["weight_decay"], head["weight_decay"]) == (0.0, 0.5)
    assert prompts["betas"] == head["betas"] == (0.8, 0.9)


@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        (dict(num_prompts=1), 3e-3 * 5**0.5),
        (dict(num_prompts=5), 3e-3),
        (dict(num_prompts=20), 1.5e-3),  # four times as many, half of it
        (dict(num_prompts=[0, 30, 0, 9], reserve=1), 1.5e-3),  # 40 for two blocks
        (dict(num_prompts=20, shallow=True), 1.5e-3),  # all of them in the first block
    ],
)
def test_the_more_prompts_the_lower_their_rate_by_default(settings, rate):
    model = tiny.prompted(tiny.make("vit"), **settings)
    prompts, head = create_provpt_optimizer(model, torch.optim.AdamW).param_groups
    assert (prompts["lr"], head["lr"]) == (pytest.approx(rate), 1e-3)


def test_sgd_has_no_default():
    model = tiny.prompted(tiny.make("vit"))
    with pytest.raises(ValueError, match=r"SGD must be given `lr`.*0\.05 to 50 times"):
        create_provpt_optimizer(model, torch.optim.SGD)


def test_what_is_frozen_is_in_no_group():
    model = tiny.prompted(tiny.make("vit"), modules_to_save=None)
    (only,) = groups_of(model)
    assert len(only["params"]) == 1
    model.add_adapter("other", tiny.ProVPTConfig(num_prompts=2))
    model.set_adapter("other")
    (only,) = groups_of(model)
    assert [id(p) for p in only["params"]] == [id(model.base_model.prompts("other"))]


def test_models_without_prompts_to_train_are_refused(tmp_path):
    tiny.prompted(tiny.make("vit")).save_pretrained(tmp_path)
    frozen = PeftModel.from_pretrained(tiny.make("vit"), tmp_path)
    for model in (tiny.make("vit"), frozen):
        with pytest.raises(ValueError, match=r"needs trainable prompts, but the \w+ has none\. Wrap .*is_trainable"):
            groups_of(model)


class Rates(TrainerCallback):
    def __init__(self):
        self.rates = []

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        self.rates.append([group["lr"] for group in optimizer.param_groups])


def test_the_trainer_s_schedule_scales_both_rates(tmp_path):
    model = tiny.prompted(tiny.make("vit"), modules_to_save=["classifier"])
    optimizer = create_provpt_optimizer(model, torch.optim.SGD, lr=0.8, head_lr=0.4)
    args = TrainingArguments(
        str(tmp_path), num_train_epochs=1, per_device_train_batch_size=6, lr_scheduler_type="linear", use_cpu=True,
        report_to="none", save_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    rates = Rates()
    Trainer(model, args, train_dataset=Images(24), callbacks=[rates], optimizers=(optimizer, None)).train()
    # Of four steps.
    torch.testing.assert_close(
        torch.tensor(rates.rates), torch.tensor([[0.6, 0.3], [0.4, 0.2], [0.2, 0.1], [0.0, 0.0]])
    )
