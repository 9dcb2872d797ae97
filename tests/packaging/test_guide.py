import re
from pathlib import Path
from textwrap import indent

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain-torch-backend"


def test_the_guide_shows_the_code_that_is_there() -> None:
    source = "\n".join(one.read_text("utf-8") for one in sorted((EXAMPLE / "src").rglob("*.py")))
    blocks = re.findall(r"```python\n(.*?)```", (EXAMPLE / "README.md").read_text("utf-8"), re.DOTALL)
    assert len(blocks) >= 7
    for block in blocks:
        assert block in source or indent(block, "    ") in source, block
