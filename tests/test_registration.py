import copy
import importlib
import json
import pickle
import subprocess
import sys

import pytest
import tiny
from peft import PeftConfig, PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING

import provpt_peft
from provpt_peft import ProVPTConfig, ProVPTModel, registration


def test_the_method_is_a_member_of_the_enum():
    member = PeftType("PROVPT")
    assert member is PeftType.PROVPT is PeftType["PROVPT"]
    assert member in list(PeftType)
    assert list(PeftType).count("PROVPT") == 1
    assert isinstance(ProVPTConfig().peft_type, PeftType)
    assert pickle.loads(pickle.dumps(member)) is member
    assert copy.deepcopy(member) is member


def test_importing_again_changes_nothing():
    before = list(PeftType), dict(PEFT_TYPE_TO_CONFIG_MAPPING), dict(PEFT_TYPE_TO_TUNER_MAPPING)
    importlib.reload(provpt_peft)
    importlib.reload(registration)
    registration.register(ProVPTConfig, ProVPTModel)
    assert (list(PeftType), dict(PEFT_TYPE_TO_CONFIG_MAPPING), dict(PEFT_TYPE_TO_TUNER_MAPPING)) == before


def test_a_foreign_method_of_the_same_name_is_refused(monkeypatch):
    monkeypatch.setitem(PEFT_TYPE_TO_TUNER_MAPPING, PeftType.PROVPT, PEFT_TYPE_TO_TUNER_MAPPING[PeftType.LORA])
    with pytest.raises(RuntimeError, match=r"already has one of that name .from peft.tuners.lora.model"):
        registration.register(ProVPTConfig, ProVPTModel)


def test_pickled_config_loads_where_nothing_was_imported(tmp_path):
    path = tmp_path / "config.pickle"
    path.write_bytes(pickle.dumps(ProVPTConfig(num_prompts=4)))
    code = f"import pickle; c = pickle.load(open({str(path)!r}, 'rb')); print(c.num_prompts, repr(c.peft_type))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "4 <PeftType.PROVPT: 'PROVPT'>"


def test_config_is_found_by_peft_and_survives_unknown_keys(tmp_path):
    ProVPTConfig(num_prompts=[1, 2]).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    saved = json.loads(path.read_text())
    assert saved["provpt_version"] == provpt_peft.__version__
    path.write_text(json.dumps(saved | {"from_the_future": 1}))
    with pytest.warns(UserWarning, match="from_the_future"):
        config = PeftConfig.from_pretrained(tmp_path)
    assert isinstance(config, ProVPTConfig)
    assert config.num_prompts == [1, 2]


def test_get_peft_model_makes_our_tuner():
    model = get_peft_model(tiny.make("vit"), ProVPTConfig())
    assert type(model.base_model) is ProVPTModel
    assert model.get_model_status().adapter_model_type == "ProVPTModel"
