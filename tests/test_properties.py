"""Random sequences of what a user can do to a model and its relocator, with the invariants checked after each.

The smallest ViT there is, three blocks of width 16 and five tokens, so that a step of a sequence takes milliseconds.
"""

import copy
import json
import math
import random
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest
import tiny
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from training import decoded, every_prompt_idle

from provpt_peft import ProVPTConfig, RelocationConfig, Relocator


NUM_BLOCKS = 3
NAMES = ("one", "two", "three")
IMAGES = tiny.images(4, size=16)
LABELS = tiny.labels(4)
SCORE_BATCHES = [dict(pixel_values=tiny.images(2, seed, size=16), labels=tiny.labels(2, seed)) for seed in (7, 8)]
# By name and, as users hand one in, as a function.
SCORES = {
    "activity": "activity",
    "fisher": "fisher",
    "taylor": "taylor",
    "exact": "exact",
    "every prompt idle": every_prompt_idle,
}
BASE = tiny.make(
    "vit", hidden_size=16, num_hidden_layers=NUM_BLOCKS, num_attention_heads=2, image_size=16, intermediate_size=16
)
with torch.no_grad():
    BASE_LOGITS = BASE(pixel_values=IMAGES).logits

BREAKAGES = {
    "block too high": lambda prompts, blocks: (prompts, torch.full((len(blocks),), NUM_BLOCKS + 1)),
    "block below 0": lambda prompts, blocks: (prompts, torch.full((len(blocks),), -1)),
    "blocks not whole": lambda prompts, blocks: (prompts, torch.ones(len(blocks))),
    "blocks that stand nowhere": lambda prompts, blocks: (prompts, torch.zeros_like(blocks)),
    "a block less": lambda prompts, blocks: (prompts, blocks[:, 1:].contiguous()),
    "blocks missing": lambda prompts, blocks: (prompts, None),
    "a block too few": lambda prompts, blocks: (prompts, blocks[1:].clone()),
    "prompts missing": lambda prompts, blocks: (None, blocks),
    "a prompt too many": lambda prompts, blocks: (torch.cat([prompts, prompts[:1]]), blocks),
    "prompts too narrow": lambda prompts, blocks: (prompts[:, 1:].contiguous(), blocks),
    "prompts not floating point": lambda prompts, blocks: (prompts.long(), blocks),
}


class Session:
    """A model with one to three adapters, a relocator and an optimizer for one of them."""

    def __init__(self, folder, counters, count, other, dropout, idleness, seed):
        torch.manual_seed(0)
        self.folder = folder
        self.counters = counters
        self.saved = {}
        self.relocation = RelocationConfig(seed=seed, idleness=SCORES[idleness])
        self.loss_factor = 1.0
        self.model = get_peft_model(copy.deepcopy(BASE), self._config(count, dropout), adapter_name="one").eval()
        self.tuner = self.model.base_model
        self.budgets = {"one": len(self.tuner.prompts("one"))}
        self._watch_active_adapter()
        self.before = self._tensors()
        self.add(other)

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _config(self, count, dropout=0.0):
        return ProVPTConfig(num_prompts=count, prompt_dropout=dropout, modules_to_save=["classifier"])

    def _watch_active_adapter(self):
        """A relocator and an optimizer for the adapter that is active."""
        self.watched = self.model.active_adapter
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.parameter = self.tuner.prompts(self.watched)
        assert any(p is self.parameter for p in trainable)
        self.optimizer = torch.optim.AdamW(trainable, lr=0.05)
        self.relocator = Relocator(self.model, self.relocation, self.optimizer, SCORE_BATCHES, self._compute_loss)

    def _compute_loss(self, model, batch):
        return model(**batch).loss * self.loss_factor

    def _relocator_state(self):
        return decoded(self.relocator.state_dict())

    def _relocate(self):
        """None where there is nothing to measure: all prompts are in no block."""
        measures = not self.relocator._tried or self.relocator.epoch >= self.relocation.warmup_epochs
        if measures and self.relocation.idleness != "exact" and not any(self.tuner.prompt_distribution(self.watched)):
            with pytest.raises(ValueError, match="Scores need a loss that depends on the prompts"):
                self.relocator.relocate(progress=0)
            return None
        return self.relocator.relocate(progress=0)

    def _adapters(self):
        return list(self.tuner.bank.provpt_prompts)

    def _pick(self, choice):
        return self._adapters()[choice % len(self._adapters())]

    def _tensors(self):
        """Copies of the tensors of each adapter, its head included."""
        state = self.model.state_dict()
        return {
            name: {key: tensor.clone() for key, tensor in state.items() if name in key.split(".")}
            for name in self._adapters()
        }

    def _done(self, *changed):
        """End of an operation: all tensors but those of the named adapters have to be what they were."""
        after = self._tensors()
        for name, tensors in after.items():
            if name in changed:
                continue
            assert tensors.keys() == self.before[name].keys()
            for key, tensor in tensors.items():
                assert torch.equal(tensor, self.before[name][key]), f"{key} changed"
        self.before = after

    def _train_step(self, pixel_values):
        self.model.train()
        loss = self.model(pixel_values=pixel_values, labels=LABELS).loss
        loss.backward()
        self.model.eval()
        return loss

    def _save(self, name):
        folder = self.folder / str(len(list(self.folder.iterdir())))
        self.model.save_pretrained(folder, selected_adapters=[name])
        return folder / name

    # ---- moves ------------------------------------------------------------------------------------------------------

    def move(self, which, prompt, block):
        name = self._pick(which)
        expected = self.tuner.prompt_blocks(name)
        prompt %= len(expected)
        expected[prompt] = block
        vectors = self.tuner.prompts(name).detach().clone()
        self.tuner.move_prompt(prompt, block, name)
        assert torch.equal(self.tuner.prompt_blocks(name), expected)
        assert torch.equal(self.tuner.prompts(name), vectors)
        self._done(name)

    def move_badly(self, which, beyond, prompt_is_bad, negative):
        name = self._pick(which)
        limit = len(self.tuner.prompts(name)) if prompt_is_bad else NUM_BLOCKS + 1
        bad = -1 - beyond if negative else limit + beyond
        with pytest.raises((IndexError, ValueError), match="must be in 0"):
            self.tuner.move_prompt(*((bad, 1) if prompt_is_bad else (0, bad)), name)
        self._done()

    # ---- adapters ---------------------------------------------------------------------------------------------------

    def switch(self, which, train):
        self.model.set_adapter(self._pick(which))
        self._done()
        if train:
            self.train(steps=1, seed=0)

    def add(self, count):
        if len(self._adapters()) == len(NAMES):
            return
        name = next(name for name in NAMES if name not in self._adapters())
        self.model.add_adapter(name, self._config(count))
        self.budgets[name] = sum(count) if isinstance(count, list) else count * NUM_BLOCKS
        self._done(name)

    def delete(self, which):
        if len(self._adapters()) == 1:
            return
        name = self._pick(which)
        if name == self.watched == self.model.active_adapter and any(self.tuner.prompt_distribution(name)):
            self.relocator.finish()
            self._done()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Adapter .* was active which is now deleted", UserWarning)
            self.model.delete_adapter(name)
        del self.budgets[name]
        assert name not in self._adapters()
        if name == self.watched:
            self.model.set_adapter(self._adapters()[0])
            self._watch_active_adapter()
        self._done()

    def disable(self, raises, nested):
        with torch.no_grad():
            prompted = self.model(pixel_values=IMAGES).logits
            try:
                with self.model.disable_adapter():
                    if nested:
                        with self.model.disable_adapter():
                            assert torch.equal(self.model(pixel_values=IMAGES).logits, BASE_LOGITS)
                    assert torch.equal(self.model(pixel_values=IMAGES).logits, BASE_LOGITS)
                    if raises:
                        raise KeyError("inside")
            except KeyError:
                assert raises
            assert torch.equal(self.model(pixel_values=IMAGES).logits, prompted)
        self._done()

    # ---- saving and loading -----------------------------------------------------------------------------------------

    def save(self, which):
        name = self._pick(which)
        folder = self._save(name)
        # The tensors without the adapter's name, as in the file.
        self.saved[folder] = self.before[name]
        self._done()

    def load(self, which, file):
        """Onto an adapter that exists: taken if it has as many prompts, refused otherwise."""
        if not self.saved:
            return
        name = self._pick(which)
        folder = list(self.saved)[file % len(self.saved)]
        saved = {key.removesuffix(f".{folder.name}"): tensor for key, tensor in self.saved[folder].items()}
        if len(saved["base_model.bank.provpt_prompt_blocks"]) != self.budgets[name]:
            with pytest.raises(ValueError, match="must be floating point of shape"):
                self.model.load_adapter(folder, name, is_trainable=True)
            self._done()
            return
        self.model.load_adapter(folder, name, is_trainable=True)
        assert torch.equal(self.tuner.prompts(name), saved["base_model.bank.provpt_prompts"])
        assert torch.equal(self.tuner.prompt_blocks(name), saved["base_model.bank.provpt_prompt_blocks"].argmax(dim=1))
        self._done(name)

    def load_broken(self, which, breakage):
        name = self._pick(which)
        folder = self._save(name)
        tensors = load_file(folder / "adapter_model.safetensors")
        keys = ("base_model.bank.provpt_prompts", "base_model.bank.provpt_prompt_blocks")
        broken = dict(zip(keys, BREAKAGES[breakage](*(tensors[key] for key in keys)), strict=True))
        kept = {key: tensor for key, tensor in (tensors | broken).items() if tensor is not None}
        # Other values everywhere, so that a tensor that is taken in would be seen.
        save_file(
            kept | {key: kept[key] + 1 for key in kept if "classifier" in key}, folder / "adapter_model.safetensors"
        )
        with pytest.raises(ValueError, match=r"must be|are missing"):
            self.model.load_adapter(folder, name, is_trainable=True)
        self._done()

    # ---- training ---------------------------------------------------------------------------------------------------

    def train(self, steps, seed):
        """With another adapter active than the one that the relocator was made for, nothing of that one changes."""
        active = self.model.active_adapter
        before = self._relocator_state()
        for step in range(steps):
            self._train_step(tiny.images(4, 10 * seed + step, size=16))
            if active == self.watched:
                self.optimizer.step()
            self.model.zero_grad()
        assert self._relocator_state() == before
        if active != self.watched:
            self.counters["steps of another adapter"] += steps
        self._done(active if active == self.watched else None)

    def relocate_not_finite(self):
        """A loss that is not a number when scores are measured: nothing moves, and nothing is learned."""
        if self.model.active_adapter != self.watched:
            return
        blocks, history = self.tuner.prompt_blocks(self.watched), len(self.relocator.history)
        measures = self.relocator.epoch >= self.relocation.warmup_epochs
        self.loss_factor = math.nan
        moves = self._relocate()
        self.loss_factor = 1.0
        if moves is None:
            return
        assert moves == []
        assert torch.equal(self.tuner.prompt_blocks(self.watched), blocks)
        notes = [record.note for record in self.relocator.history[history:]]
        assert len(notes) == measures
        assert all("not finite" in note for note in notes)
        self._done()

    def relocate(self, seeds):
        """As at the start of an epoch, after an epoch with some steps. Another adapter's scores are refused."""
        for seed in seeds:
            self.train(steps=1, seed=seed)
        before = self.tuner.prompt_blocks(self.watched)
        if self.model.active_adapter != self.watched:
            with pytest.raises(ValueError, match="Scores are those of the enabled adapter, which must be"):
                self.relocator.measure()
            self._done()
            return
        parameters = {name: p.grad for name, p in self.model.named_parameters()}
        moves = self._relocate()
        if moves is None:
            return
        assert {name: p.grad for name, p in self.model.named_parameters()} == parameters
        self.counters["relocations"] += len(moves)
        changed = (self.tuner.prompt_blocks(self.watched) != before).nonzero()[:, 0].tolist()
        assert changed == [move.prompt for move in moves if move.block != move.from_block]
        assert self.relocator.history[len(self.relocator.history) - len(moves) :] == moves
        for move in moves:
            assert before[move.prompt] == move.from_block > 0
            assert self.tuner.prompt_blocks(self.watched)[move.prompt] == move.block > 0
        self._done(self.watched)

    def relocator_round_trip(self):
        state = json.loads(json.dumps(self.relocator.state_dict()))
        active = self.model.active_adapter
        self.model.set_adapter(self.watched)
        self.relocator = Relocator(self.model, self.relocation, self.optimizer, SCORE_BATCHES, self._compute_loss)
        self.relocator.load_state_dict(state)
        self.model.set_adapter(active)
        assert self._relocator_state() == decoded(state)
        self._done()

    # ---- what holds after each --------------------------------------------------------------------------------------

    def check(self):
        self._check_prompts_and_blocks()
        active = self.model.active_adapter
        assert self.tuner.active_adapters == [active]
        assert self.tuner.bank.enabled_adapter == active
        for name in self._adapters():
            assert self.tuner.prompts(name).requires_grad == (name == active)
        with torch.no_grad(), self.model.disable_adapter():
            assert torch.equal(self.model(pixel_values=IMAGES).logits, BASE_LOGITS)
        assert self.tuner.prompts(self.watched) is self.parameter
        assert sum(p is self.parameter for group in self.optimizer.param_groups for p in group["params"]) == 1
        assert self.relocator.adapter_name == self.watched
        json.dumps(self.relocator.state_dict())

    def _check_prompts_and_blocks(self):
        bank = self.tuner.bank
        assert set(self._adapters()) == set(bank.provpt_prompt_blocks) == set(self.budgets) == set(bank._rows)
        for name, budget in self.budgets.items():
            buffer, blocks = bank.provpt_prompt_blocks[name], bank.blocks(name)
            assert bank.provpt_prompts[name].shape == (budget, 16)
            assert buffer.shape == (budget, 1 + NUM_BLOCKS)
            assert torch.equal(buffer, torch.eye(1 + NUM_BLOCKS)[blocks])
            for block in range(NUM_BLOCKS + 1):
                rows = bank.rows(name, block)
                assert ([] if rows is None else rows.tolist()) == (blocks == block).nonzero()[:, 0].tolist()
            distribution = [int((blocks == block).sum()) for block in range(1, NUM_BLOCKS + 1)]
            assert self.tuner.prompt_distribution(name) == distribution


# ---- sequences ------------------------------------------------------------------------------------------------------


def count(chance):
    """Prompts of an adapter: as many in each block, or a list."""
    counts = [chance.randint(0, 3) for _ in range(NUM_BLOCKS)]
    return counts if any(counts) and chance.random() < 0.5 else chance.randint(1, 3)


def anything(chance):
    """Picks one of those that exist at the time, whatever their number."""
    return chance.randrange(1000)


def boolean(chance):
    return chance.random() < 0.5


# How often each is drawn, in relation to the others, and with which arguments.
OPERATIONS = {
    "train": (2, dict(steps=lambda chance: chance.randint(1, 2), seed=lambda chance: chance.randint(0, 3))),
    "relocate_not_finite": (1, {}),
    "relocate": (2, dict(seeds=lambda chance: [chance.randint(0, 3) for _ in range(chance.randint(0, 2))])),
    "relocator_round_trip": (1, {}),
    "move": (1, dict(which=anything, prompt=anything, block=lambda chance: chance.randint(0, NUM_BLOCKS))),
    "move_badly": (
        1,
        dict(which=anything, beyond=lambda chance: chance.randint(0, 3), prompt_is_bad=boolean, negative=boolean),
    ),
    "switch": (1, dict(which=anything, train=boolean)),
    "add": (1, dict(count=count)),
    "delete": (1, dict(which=anything)),
    "disable": (1, dict(raises=boolean, nested=boolean)),
    "save": (1, dict(which=anything)),
    "load": (1, dict(which=anything, file=anything)),
    "load_broken": (1, dict(which=anything, breakage=lambda chance: chance.choice(sorted(BREAKAGES)))),
}


def draw(seed, length):
    """A start and a sequence of operations. Hypothesis draws the two numbers only: its own choice of operations tends
    to repeat a few, so that what takes several in the right order hardly ever comes about."""
    chance = random.Random(seed)
    start = dict(
        count=count(chance),
        other=count(chance),
        dropout=chance.choice([0.0, 0.5]),
        idleness=chance.choice(list(SCORES)),
        seed=chance.randint(0, 3),
    )
    weights = [weight for weight, _ in OPERATIONS.values()]
    names = chance.choices(list(OPERATIONS), weights, k=30)[:length]
    return start, [(name, {key: value(chance) for key, value in OPERATIONS[name][1].items()}) for name in names]


def run(sequences):
    counters = Counter()

    @settings(
        max_examples=sequences,
        # The same sequences in every run, no data base of earlier failures, and no time limit for a sequence.
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(seed=st.integers(0, 2**32 - 1), length=st.integers(1, 30))
    def sequence(seed, length):
        start, operations = draw(seed, length)
        note(f"start: {start}")
        counters["sequences"] += 1
        with tempfile.TemporaryDirectory() as folder:
            session = Session(Path(folder), counters, **start)
            session.check()
            for name, arguments in operations:
                note(f"{name}: {arguments}")
                getattr(session, name)(**arguments)
                session.check()
                counters["operations"] += 1
                counters[name] += 1

    start = time.perf_counter()
    sequence()
    print(f"{time.perf_counter() - start:.0f} s,", ", ".join(f"{number} {name}" for name, number in counters.items()))
    assert counters["sequences"] >= sequences
    assert counters["operations"] >= 10 * sequences
    # What the sequences are for did happen in them.
    assert counters["relocations"] >= sequences / 2
    assert counters["steps of another adapter"] >= sequences / 4
    assert min(counters[name] for name in OPERATIONS) >= sequences / 4
    assert min(counters.values()) >= sequences / 4


def test_invariants_hold_in_random_sequences():
    run(50)


def test_prompts_that_are_in_no_block_are_not_pruned(tmp_path):
    session = Session(tmp_path, Counter(), count=1, other=1, dropout=0.0, idleness="every prompt idle", seed=0)
    for seed in range(4):
        for prompt in range(3):
            session.move(0, prompt, prompt + 1)
        session.train(steps=1, seed=seed)
        for prompt in range(3):
            session.move(0, prompt, 0)
        with pytest.raises(ValueError, match="Scores need a loss that depends on the prompts"):
            session.relocator.measure()
        session.move(0, 2, 3)
        session.relocate(seeds=[])
        assert session.tuner.prompt_blocks("one").tolist()[:2] == [0, 0]
        session.check()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_invariants_hold_in_many_random_sequences():
    run(1000)
