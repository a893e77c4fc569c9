"""The page of pipelines: its program runs as pasted, and prints what the page shows."""

import re
from pathlib import Path

from programs import printed

import jaxpar.pipeline

PAGE = (Path(jaxpar.pipeline.__file__).parent / "README.md").read_text()


def test_the_program_prints_what_the_page_shows():
    [(program, shown)] = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert printed(program).replace("PartitionSpec(", "P(") == shown
