"""Write the table of backbones into `backbones.md`, from the registry itself.

python docs/backbones_table.py
"""

from __future__ import annotations

from pathlib import Path

from provpt_peft.backbone.families import FAMILIES


PAGE = Path(__file__).parent / "backbones.md"
START, END = "<!-- backbones_table.py -->", "<!-- end -->"


def table() -> str:
    """A row for each family, in the registry's order. Entries for other names of the same parts are left out."""
    rows = ["| Family | Block | Attention | Windows | VPT-Shallow |", "| --- | --- | --- | --- | --- |"]
    families = {family.name: family for family in reversed(FAMILIES)}
    for family in reversed(families.values()):
        attention = "registry" if family.own_attention is None else "its own"
        windows, shallow = ("yes" if flag else "no" for flag in (family.windowed, family.extra_tokens))
        rows.append(f"| {family.name} | `{family.block}` | {attention} | {windows} | {shallow} |")
    return "\n".join(rows)


def main() -> None:
    """Replace what is between the marks."""
    text = PAGE.read_text()
    before, after = text.split(START)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{START}\n\n{table()}\n\n{END}{after}")


if __name__ == "__main__":
    main()
