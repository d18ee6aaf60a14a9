"""The table of reported cases names tests that exist."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent


def test_every_case_has_a_row_and_every_test_of_it_exists():
    rows = re.findall(r"^\| (B\d\d) \| .+? \| (.+) \|$", (FOLDER / "README.md").read_text(), re.M)
    assert [name for name, _ in rows] == [f"B{number:02}" for number in range(1, 73, 2)]
    for name, tests in rows:
        source = ""
        for word in re.findall(r"`([\w/.]+)`", tests):
            if word.endswith(".py"):
                source = (FOLDER / word).read_text()
            elif word.startswith("test_"):
                assert f"def {word}(" in source, (name, word)
