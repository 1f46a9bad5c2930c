"""The images that scores are measured on, the first ones of the training loader. Training does not notice."""

import contextlib
import io
import os
import random
import zipfile

import datasets
import numpy as np
import pytest
import tiny
import torch
import transformers
from accelerate.data_loader import IterableDatasetShard
from training import Images, every_epoch, make_trainer, moving
from transformers import BatchFeature, Trainer, TrainerCallback

from provpt_peft import RelocationConfig, RelocationTrainerCallback, Relocator
from provpt_peft.relocation import first_batches


# Everything is set up and measured once, and nothing ever moves.
NEVER = RelocationConfig(warmup_epochs=99)


class Recording(Trainer):
    """Keeps the micro-batches that it trains on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def training_step(self, model, inputs, *args, **kwargs):
        self.seen.append(copied(inputs))
        return super().training_step(model, inputs, *args, **kwargs)


class Keeps(TrainerCallback):
    """Looks at the relocator that a run begins with, which the callback lets go of after training."""

    def __init__(self, callback, look=lambda relocator: relocator.score_batches):
        self.callback, self.look = callback, look

    def on_train_begin(self, args, state, control, **kwargs):
        self.found = self.look(self.callback.relocator)


def copied(batch):
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def run(folder, *args, look=None, **settings):
    """Train; gives the Trainer, its callback, and what the relocator began with."""
    trainer, callback = make_trainer(folder, *args, **(dict(trainer_class=Recording) | settings))
    keeps = None
    if callback is not None:
        keeps = Keeps(callback) if look is None else Keeps(callback, look)
        trainer.add_callback(keeps)
    trainer.train()
    return trainer, callback, keeps and keeps.found


def assert_same_batches(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[name])), name


def assert_same_training(found, expected):
    assert_same_batches(found.seen, expected.seen)
    for (name, one), other in zip(found.model.named_parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(one, other), name


# ---- which images, and in which batches -----------------------------------------------------------------------------


@pytest.mark.parametrize(("score_images", "sizes"), [(10, [3, 3, 3, 1]), (6, [3, 3]), (1, [1]), (32, [3] * 8)])
def test_batches_are_micro_batches_of_training(tmp_path, score_images, sizes):
    trainer, _, batches = run(
        tmp_path, RelocationConfig(score_images=score_images), per_device_train_batch_size=3,
        gradient_accumulation_steps=4, num_train_epochs=1,
    )  # fmt: skip
    assert [len(batch["labels"]) for batch in batches] == sizes
    assert {len(batch["labels"]) for batch in trainer.seen} == {3}
    # The first images of the first epoch.
    assert_same_batches(batches, [cut(b, size) for b, size in zip(trainer.seen, sizes, strict=False)])


def collate_sizes(items):
    return {
        "pixel_values": torch.stack([item["pixel_values"] for item in items]),
        "labels": torch.stack([item["labels"] for item in items]),
        "interpolate_pos_encoding": True,
    }


def cut(batch, size):
    return {name: value[:size] for name, value in batch.items()}


@pytest.mark.parametrize(
    ("collate", "images"), [(collate_sizes, 3), (lambda items: collate_sizes(items) | {"names": ["a"] * 8}, 8)]
)
def test_options_in_a_batch_do_not_keep_it_whole(collate, images):
    # A list may belong to the images.
    (batch,) = first_batches(torch.utils.data.DataLoader(Images(8), batch_size=8, collate_fn=collate), 3)
    assert {len(batch[name]) for name in ("pixel_values", "labels")} == {images}
    assert batch["interpolate_pos_encoding"] is True


def test_the_last_batch_keeps_its_type():
    """As what an image processor makes, whose tensors are attributes too."""

    def collate(items):
        return BatchFeature(dict(torch.utils.data.default_collate(items)))

    loader = torch.utils.data.DataLoader(Images(8), batch_size=4, collate_fn=collate)
    whole, cut = first_batches(loader, 6)
    assert type(whole) is type(cut) is BatchFeature
    assert (len(whole.pixel_values), len(cut.pixel_values), len(cut.labels)) == (4, 2, 2)


class Augmented(Images):
    """Draws from all three global generators. Each image says what it drew."""

    def __getitem__(self, index):
        item = super().__getitem__(index)
        drawn = random.random() + 10 * np.random.random() + 100 * torch.rand(()).item()
        return item | {"pixel_values": item["pixel_values"] + drawn}


def test_they_are_the_same_in_each_relocation_and_after_a_resume(tmp_path):
    looked = []

    class Looks(TrainerCallback):
        def on_epoch_begin(self, args, state, control, **kwargs):
            looked.append([copied(batch) for batch in callback.relocator.score_batches])

    settings = dict(train_dataset=Augmented(), save_strategy="steps", save_steps=8)
    for checkpoint in (None, str(tmp_path / "checkpoint-8")):
        config = every_epoch(score_images=10)
        trainer, callback = make_trainer(tmp_path, config, callbacks=[Looks()], **settings)
        # Other random numbers have been drawn by the time of the second.
        random.random(), np.random.random(), torch.rand(())
        trainer.train(resume_from_checkpoint=checkpoint)
    assert len(looked) == 4 + 3
    for batches in looked[1:]:
        assert_same_batches(batches, looked[0])


def test_first_batches_of_a_plain_loader_with_a_generator_of_its_own():
    generator = torch.Generator().manual_seed(5)
    loader = torch.utils.data.DataLoader(Augmented(), batch_size=4, shuffle=True, generator=generator)
    before = loader.generator.get_state(), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    batches = first_batches(loader, 10)
    after = loader.generator.get_state(), torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[1], before[1])
    assert after[2:] == before[2:]
    assert_same_batches(first_batches(loader, 10), batches)
    assert [len(batch["labels"]) for batch in batches] == [4, 4, 2]
    in_order = torch.utils.data.DataLoader(Images(), batch_size=4)
    expected = [cut(batch, size) for batch, size in zip(in_order, (4, 4, 2), strict=False)]
    assert_same_batches(first_batches(in_order, 10), expected)
    with pytest.raises(ValueError, match="the training loader has none"):
        first_batches([], 1)
    with pytest.raises(ValueError, match="`num_images` must be at least 1, got 0"):
        first_batches(loader, 0)


class StatefulDataLoader(torch.utils.data.DataLoader):
    """As torchdata's: an iterator of its own, which draws from the sampler that the next epoch draws from."""

    def __iter__(self):
        return iter([self.collate_fn([self.dataset[i] for i in indices]) for indices in self.batch_sampler])


def test_a_loader_with_a_state_of_its_own_is_left_as_it_was():
    def loader():
        generator = torch.Generator().manual_seed(5)
        return StatefulDataLoader(Images(12), batch_size=4, shuffle=True, generator=generator)

    read = loader()
    first_batches(read, 8)
    for ours, untouched in zip(read, loader(), strict=True):
        assert torch.equal(ours["pixel_values"], untouched["pixel_values"])


def test_batches_are_copied_out_of_the_memory_that_workers_share():
    loader = torch.utils.data.DataLoader(Images(8), batch_size=4, num_workers=1)
    assert not any(batch["pixel_values"].is_shared() for batch in first_batches(loader, 8))


def test_a_sampler_s_data_are_not_copied():
    class Raw(Images):
        def __deepcopy__(self, memo):
            raise TypeError("cannot pickle an open file")

    raw = Raw()
    transformed = [raw[index] for index in range(len(raw))]
    sampler = torch.utils.data.RandomSampler(raw, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(transformed, batch_size=4, sampler=sampler)
    assert_same_batches(first_batches(loader, 24), list(loader))


def test_first_batches_are_those_of_the_loader_s_first_epoch():
    # The loader draws from the generator that its sampler draws from.
    generator = torch.Generator().manual_seed(5)
    loader = torch.utils.data.DataLoader(Images(), batch_size=4, shuffle=True, generator=generator)
    batches = first_batches(loader, 24)
    assert_same_batches(batches, list(loader))


@pytest.mark.parametrize(
    ("first", "count"),
    [
        (dict(flag=True), 10),
        # A batch with lists is not cut.
        (dict(names=["a", "b", "c", "d"]), 12),
        # Seven objects in each of four images, and none.
        (dict(labels=[{"class_labels": torch.zeros(7)}] * 4), 12),
        (dict(labels=[{"class_labels": torch.zeros(0)}] * 4), 12),
    ],
)
def test_images_are_counted_whatever_a_batch_begins_with(first, count):
    batches = first_batches([first | {"pixel_values": tiny.images(4)}] * 10, 10)
    assert sum(len(batch["pixel_values"]) for batch in batches) == count


# ---- training is as it would be -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "workers",
    [
        {},
        dict(dataloader_num_workers=2),
        dict(dataloader_num_workers=2, dataloader_persistent_workers=True, dataloader_prefetch_factor=2),
    ],
    ids=["none", "workers", "persistent workers"],
)
def test_generators_shuffling_and_dropout_are_left_alone(tmp_path, workers):
    runs = [
        run(tmp_path, callback=callback, config=NEVER, train_dataset=Augmented(), num_train_epochs=2, **workers)[0]
        for callback in (True, False)
    ]
    assert_same_training(*runs)
    assert len({batch["pixel_values"].sum().item() for batch in runs[0].seen}) == 12


class Zipped(torch.utils.data.Dataset):
    """Opens an archive with the first image that it is asked for, as a data set that is to have workers does.

    A file that is open when workers are forked is theirs together: they read from where another has left off.
    """

    def __init__(self, folder):
        self.path, self.opened, self.archive = folder / "images.zip", folder / "opened", None
        self.labels = tiny.labels(24, seed=4)
        with zipfile.ZipFile(self.path, "w") as archive:
            for index, image in enumerate(tiny.images(24, seed=3)):
                archive.writestr(f"{index}.npy", image.numpy().tobytes())

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        if self.archive is None:
            with open(self.opened, "a") as opened:
                opened.write(f"{os.getpid()}\n")
            self.archive = zipfile.ZipFile(self.path)
        with self.archive.open(f"{index}.npy") as file:
            image = np.frombuffer(io.BytesIO(file.read()).getvalue(), dtype=np.float32).reshape(3, 32, 32)
        return {"pixel_values": torch.tensor(image), "labels": self.labels[index]}


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
def test_an_archive_is_opened_in_workers_only(tmp_path):
    data = Zipped(tmp_path)
    trainer, callback, batches = run(
        tmp_path, moving(), train_dataset=data, num_train_epochs=3, dataloader_num_workers=4
    )
    assert trainer.state.global_step == 18
    assert len(callback.history) == 2
    assert sum(len(batch["labels"]) for batch in batches) == 24
    opened = data.opened.read_text().split()
    # Four workers for the score images, and four for each epoch.
    assert len(opened) == 4 * 4
    assert str(os.getpid()) not in opened
    assert data.archive is None


def prepared(pixels):
    return pixels.float() / 127.5 - 1


class Bytes(Images):
    def __init__(self, prepare):
        super().__init__()
        self.prepare = prepare
        pixels = (self.pixel_values.clamp(-2, 2) * 63.75 + 127.5).to(torch.uint8)
        self.pixel_values = prepared(pixels) if prepare else pixels


class Prepares(Recording):
    """Leaves it to the device to make numbers of bytes."""

    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        if inputs["pixel_values"].dtype == torch.uint8:
            inputs["pixel_values"] = prepared(inputs["pixel_values"])
        return inputs


def test_inputs_are_prepared_as_for_training(tmp_path):
    def train(prepare):
        return run(
            tmp_path, moving(score_images=10), look=lambda relocator: relocator.measure(),
            train_dataset=Bytes(prepare), trainer_class=Prepares, num_train_epochs=2,
        )  # fmt: skip

    (_, first, of_bytes), (_, second, of_numbers) = train(prepare=False), train(prepare=True)
    torch.testing.assert_close(of_bytes[0].score, of_numbers[0].score, rtol=0, atol=1e-9)
    torch.testing.assert_close(of_bytes[0].stderr, of_numbers[0].stderr, rtol=0, atol=1e-9)
    assert of_bytes[1] == pytest.approx(of_numbers[1], abs=1e-9)
    assert first.history == second.history != []


class OfSizes(Images):
    """Every third image is larger than the others."""

    sizes = (48, 32, 32)

    def __getitem__(self, index):
        return super().__getitem__(index) | {"pixel_values": tiny.images(1, index, self.sizes[index % 3])[0]}


class BySize(torch.utils.data.Sampler):
    """Batches of images of one size, in an order that it draws with a generator of its own."""

    def __init__(self, data, batch_size):
        self.data, self.batch_size, self.random = data, batch_size, random.Random(7)

    def __len__(self):
        return len(self.data) // self.batch_size

    def __iter__(self):
        batches = []
        for size in set(self.data.sizes):
            indices = [index for index in range(len(self.data)) if self.data.sizes[index % 3] == size]
            self.random.shuffle(indices)
            batches += [indices[i : i + self.batch_size] for i in range(0, len(indices), self.batch_size)]
        self.random.shuffle(batches)
        yield from batches


def collate_sizes_flag_first(items):
    batch = collate_sizes(items)
    return {"interpolate_pos_encoding": batch.pop("interpolate_pos_encoding"), **batch}


@pytest.mark.parametrize("collate", [collate_sizes, collate_sizes_flag_first])
@pytest.mark.parametrize("prepare", [True, False])
def test_a_batch_sampler_by_size(tmp_path, prepare, collate):
    class Sized(Recording):
        def get_train_dataloader(self):
            sampler = BySize(self.train_dataset, 4)
            loader = torch.utils.data.DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=collate)
            return self.accelerator.prepare(loader) if prepare else loader

    def train(**settings):
        return run(tmp_path, trainer_class=Sized, train_dataset=OfSizes(), num_train_epochs=3, **settings)

    with_callback, _, batches = train(config=NEVER)
    without, _, _ = train(callback=False)
    assert_same_training(with_callback, without)
    assert {batch["pixel_values"].shape[-1] for batch in with_callback.seen} == {32, 48}
    assert_same_batches(batches, with_callback.seen[:6])
    moved, callback, _ = train(config=moving())
    assert_same_batches(moved.seen, without.seen)
    assert len(callback.history) == 2


def test_a_sampler_that_cannot_be_copied(tmp_path):
    class Locked(torch.utils.data.SequentialSampler):
        def __deepcopy__(self, memo):
            raise TypeError("cannot pickle a lock")

    class Own(Recording):
        def _get_train_sampler(self, train_dataset=None):
            return Locked(self.train_dataset)

    trainer, _ = make_trainer(tmp_path, trainer_class=Own)
    with pytest.raises(ValueError, match=r"`score_images=32`.* but that fails: TypeError: cannot pickle a lock"):
        trainer.train()
    assert trainer.seen == []


class Stream(torch.utils.data.IterableDataset):
    """Images in an order that is drawn anew each time, from Python's global generator."""

    def __iter__(self):
        data, order = Images(), list(range(24))
        random.shuffle(order)
        worker = torch.utils.data.get_worker_info()
        mine = order if worker is None else order[worker.id :: worker.num_workers]
        yield from (data[index] for index in mine)


def hugging_face_stream():
    data = Images()
    columns = {"pixel_values": data.pixel_values.tolist(), "labels": data.labels.tolist()}
    stream = datasets.Dataset.from_dict(columns).to_iterable_dataset(num_shards=2)
    return stream.shuffle(seed=3, buffer_size=8)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [Stream, hugging_face_stream])
def test_a_stream(tmp_path, make, workers):
    def train(**settings):
        return run(tmp_path, train_dataset=make(), max_steps=18, dataloader_num_workers=workers, **settings)

    with_callback, _, batches = train(config=NEVER)
    without, _, _ = train(callback=False)
    assert_same_training(with_callback, without)
    assert sum(len(batch["labels"]) for batch in batches) == 24
    moved, callback, _ = train(config=moving(relocate_every=6, score_images=10))
    assert_same_batches(moved.seen, without.seen)
    assert [record.epoch for record in callback.history] == [1, 2]
    assert all(record.reward is not None for record in callback.history)


def test_a_stream_that_is_split_over_processes_is_read_whole():
    class Numbers(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from torch.arange(12)

    for process in range(2):
        shard = IterableDatasetShard(Numbers(), batch_size=3, num_processes=2, process_index=process)
        loader = torch.utils.data.DataLoader(shard, batch_size=3)
        # This process trains on every second batch only.
        assert next(iter(loader)).tolist() == [[0, 1, 2], [3, 4, 5]][process]
        assert [batch.tolist() for batch in first_batches(loader, 9)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_ready_made_batches(tmp_path):
    data = Images()
    ready = [{"pixel_values": data.pixel_values[i : i + 4], "labels": data.labels[i : i + 4]} for i in range(0, 24, 4)]

    class Ready(Recording):
        def get_train_dataloader(self):
            return self.accelerator.prepare(torch.utils.data.DataLoader(ready, batch_size=None, shuffle=True))

    def train(**settings):
        return run(tmp_path, trainer_class=Ready, num_train_epochs=3, **settings)

    with_callback, _, batches = train(config=RelocationConfig(warmup_epochs=99, score_images=10))
    without, _, _ = train(callback=False)
    assert_same_training(with_callback, without)
    assert [len(batch["labels"]) for batch in batches] == [4, 4, 2]
    assert_same_batches(batches[:2], without.seen[:2])
    assert len(train(config=moving())[1].history) == 2


# ---- memory ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stored(model):
    """Counts the bytes that are kept for the backward pass: each storage once, the model's own not."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        yield lambda: sum(
            {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in kept) if s.data_ptr() not in own}.values()
        )


# Reentrant checkpointing of a stage whose input needs no gradient. What is trained inside has its gradients.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize("dropout", [0.1, 0.0])
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["none", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("family", ["vit", "swin"])
def test_scoring_stores_no_more_than_a_step_of_training(family, checkpointing, dropout):
    def loss_and_bytes(model, batch):
        with stored(model) as count:
            loss = model(**batch).loss
            measured.append(count())
        return loss

    batch = tiny.inputs(family) | dict(labels=tiny.labels())
    measured = []
    model = tiny.prompted(tiny.make(family), prompt_dropout=dropout).train()
    loss_and_bytes(model, batch)
    if checkpointing is not None:
        backbone = next(m for m in model.modules() if isinstance(m, transformers.PreTrainedModel))
        backbone.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        loss_and_bytes(model, batch)
    relocator = Relocator(model, score_batches=[batch], compute_loss=loss_and_bytes)
    scores, _ = relocator.measure()
    *plain, training, scoring = [0, *measured]
    assert scores.score.isfinite().all()
    assert scoring <= training
    if checkpointing is not None:
        # And checkpointing is at work.
        assert training < 0.7 * plain[-1]
    # The same numbers as without.
    expected = Relocator(tiny.prompted(tiny.make(family)), score_batches=[batch]).measure()[0]
    torch.testing.assert_close(scores.score, expected.score, rtol=0, atol=1e-6)
    assert all(module.training for module in model.base_model.bank.modules())


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # the newest transformers' name is another
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_in_the_trainer_changes_no_score(tmp_path, reentrant):
    settings = dict(config=moving(), num_train_epochs=3, per_device_train_batch_size=2)
    _, plain, _ = run(tmp_path, **settings)
    _, checkpointed, _ = run(
        tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant}, **settings
    )
    assert len(plain.history) == 2
    for one, other in zip(checkpointed.history, plain.history, strict=True):
        assert (one.prompt, one.from_block, one.block) == (other.prompt, other.from_block, other.block)
        assert one.idleness == pytest.approx(other.idleness, abs=1e-6)
        assert one.reward == pytest.approx(other.reward, abs=1e-6)


# ---- what cannot work -----------------------------------------------------------------------------------------------


class Once(torch.utils.data.IterableDataset):
    """Can be read once: it is its own iterator."""

    def __init__(self):
        self.items = iter(Images())

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.items)


def test_data_that_can_be_read_once(tmp_path):
    trainer, _ = make_trainer(tmp_path, trainer_class=Recording, train_dataset=Once(), max_steps=6)
    with pytest.raises(ValueError, match=r"`score_images=32`.*before training, but a Once can be read only once"):
        trainer.train()
    assert trainer.seen == []
    assert trainer.state.global_step == 0
    # Nothing of it has been read.
    assert len(list(trainer.train_dataset.items)) == 24


def test_a_loss_that_fails_in_eval_mode(tmp_path):
    class TrainsOnly(Recording):
        def compute_loss(self, model, inputs, **kwargs):
            if not model.training:
                raise KeyError("targets")
            return super().compute_loss(model, inputs, **kwargs)

    trainer, _ = make_trainer(tmp_path, trainer_class=TrainsOnly)
    message = (
        r"`score_images=32`\)\. They are scored by the Trainer's `compute_loss` .* that fails: KeyError: 'targets'"
    )
    with pytest.raises(ValueError, match=message) as failed:
        trainer.train()
    assert isinstance(failed.value.__cause__, KeyError)
    assert trainer.seen == []
    assert trainer.model.training
    assert trainer.model.base_model.bank.gates is None


def test_memory_that_is_short_is_left_to_the_trainer(tmp_path):
    """With `auto_find_batch_size` it tries again with a smaller batch, which is that of the scores too."""

    class Short(Recording):
        def compute_loss(self, model, inputs, **kwargs):
            if len(inputs["labels"]) > 2:
                raise RuntimeError("CUDA out of memory.")
            return super().compute_loss(model, inputs, **kwargs)

    trainer, callback, batches = run(
        tmp_path, moving(), trainer_class=Short, per_device_train_batch_size=3, auto_find_batch_size=True
    )
    largest = max(len(batch["labels"]) for batch in trainer.seen)
    assert largest <= 2
    assert {len(batch["labels"]) for batch in batches} == {largest}
    assert len(callback.history) == 3


@pytest.mark.parametrize(
    ("settings", "relocation", "warned"),
    [
        (dict(num_train_epochs=1), {}, True),
        (dict(num_train_epochs=2), {}, True),
        (dict(num_train_epochs=3), {}, False),
        (dict(num_train_epochs=8), {}, False),
        (dict(num_train_epochs=2), dict(settle=0.0), False),
        (dict(num_train_epochs=1), dict(relocate_every=2), False),
        (dict(num_train_epochs=1), dict(relocate_every=3), True),
        (dict(max_steps=12), {}, True),
        (dict(max_steps=7), dict(settle=0.3), True),
        (dict(max_steps=9), dict(settle=0.3), False),
        (dict(max_steps=5, gradient_accumulation_steps=2), dict(settle=0.5), True),
        (dict(num_train_epochs=8), dict(warmup_epochs=4), True),
    ],
)
def test_a_training_in_which_nothing_will_move_is_warned_of_once(tmp_path, caplog, settings, relocation, warned):
    # With a score that always finds one, so that the history says whether something could move.
    config = moving(**(dict(settle=0.5, score_images=4) | relocation))
    _, callback, _ = run(tmp_path, config, **settings)
    assert caplog.text.count("No prompt will move") == warned
    assert (callback.history == []) == warned


def test_an_epoch_of_unknown_length_is_warned_of(tmp_path, caplog):
    settings = dict(train_dataset=Stream(), max_steps=3)
    _, callback, _ = run(tmp_path, moving(), **settings)
    assert caplog.text.count("the length of an epoch is not known. Set `relocate_every` to a number of steps") == 1
    assert callback.history == []
    caplog.clear()
    run(tmp_path, moving(relocate_every=1), **settings)
    assert "is not known" not in caplog.text


def test_two_callbacks_are_refused(tmp_path):
    trainer, _ = make_trainer(tmp_path, trainer_class=Recording, callbacks=[RelocationTrainerCallback()])
    with pytest.raises(ValueError, match="A Trainer may have only one RelocationTrainerCallback, got 2"):
        trainer.train()
    assert trainer.seen == []
