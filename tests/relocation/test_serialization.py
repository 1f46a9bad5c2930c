import json

import torch

from provpt_peft.relocation.serialization import from_json, to_json


def test_round_trip_is_exact():
    state = {
        "weights": torch.randn(3, 4),
        "half": torch.randn(2).bfloat16(),
        "steps": torch.tensor(7),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "doubles": torch.tensor([1 / 3], dtype=torch.float64),
        "nested": {0: {"exp_avg": torch.zeros(0)}, 1: [1.5, None, "text", True]},
        "third": 1 / 3,
    }
    restored = from_json(json.loads(json.dumps(to_json(state))))
    assert restored["nested"][1] == state["nested"][1]
    assert restored["third"] == state["third"]
    assert list(restored["nested"]) == [0, 1]
    for name in ("weights", "half", "steps", "bytes", "doubles"):
        assert torch.equal(restored[name], state[name])
        assert restored[name].dtype == state[name].dtype


def test_without_tensors():
    assert from_json(to_json({"a": [1, {}]})) == {"a": [1, {}]}
