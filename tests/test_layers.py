"""CONTRIBUTING's picture of the layers is the contract that `make quality` checks."""

import re
from pathlib import Path


ROOT = Path(__file__).parents[1]


def test_the_picture_is_the_contract():
    (picture,) = re.findall(r"```layers\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    contract = re.search(
        r'containers = \["provpt_peft"\]\n.*?layers = \[\n(.*?)\]', (ROOT / "pyproject.toml").read_text(), re.DOTALL
    )
    assert picture.split("\n")[:-1] == re.findall(r'"(.*?)"', contract[1])
