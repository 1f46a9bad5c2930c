"""The same samples in other micro-batches, and other clipping: the same scores, the same move, the same reward."""

import pytest
import tiny
import torch
from training import moving, trained
from transformers import Trainer


def run(folder, batch_size, accumulation, trainer_class=Trainer, **settings):
    """Two moves' worth of history. Learning rate 0, since clipping changes what is learned."""
    _, callback = trained(
        # Ten images are no whole number of micro-batches of 8 or 4.
        folder, config=moving(score_images=10), model=tiny.prompted(tiny.make("vit")), trainer_class=trainer_class,
        num_train_epochs=3, per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulation,
        learning_rate=0.0, **settings,
    )  # fmt: skip
    return callback.history


class OwnLoss(Trainer):
    """A loss that the Trainer knows nothing of: a mean over the micro-batch, not divided by a number of items."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        return torch.nn.functional.cross_entropy(model(**inputs).logits, labels)


@pytest.mark.parametrize("trainer_class", [Trainer, OwnLoss])
def test_accumulation_and_clipping_do_not_matter(tmp_path, trainer_class):
    expected = run(tmp_path, 8, 1, trainer_class)
    assert len(expected) == 2
    assert expected[0].reward is not None
    variants = [
        run(tmp_path, 4, 2, trainer_class),
        run(tmp_path, 2, 4, trainer_class),
        run(tmp_path, 1, 8, trainer_class),
        run(tmp_path, 8, 1, trainer_class, max_grad_norm=0.01),
        run(tmp_path, 2, 4, trainer_class, max_grad_norm=0.0),
    ]
    for history in variants:
        assert len(history) == 2
        for one, other in zip(expected, history, strict=True):
            assert (one.prompt, one.from_block, one.block) == (other.prompt, other.from_block, other.block)
            for name in ("idleness", "idleness_stderr", "loss_before", "loss_after", "reward"):
                assert getattr(other, name) == pytest.approx(getattr(one, name), abs=1e-5)
