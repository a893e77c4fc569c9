"""The how-to: its program runs as pasted."""

import re
from pathlib import Path

from programs import printed

PAGE = Path(__file__).parents[1] / "docs" / "how_to.md"


def test_a_flax_model_is_sharded_as_pasted():
    [example] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    text = printed(example)
    assert "'up/kernel': P('fsdp', 'tp')" in text.replace("PartitionSpec(", "P(")
    first, *_, last = map(float, re.findall(r"^\d+\.\d{3}$", text, re.M))
    assert last < first
    assert "8 devices (fsdp=2, tp=4)" in text
