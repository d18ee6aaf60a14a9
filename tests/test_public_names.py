"""The package root: what it exports, and that importing it costs nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

import ostinato

ROOT = Path(ostinato.__file__).parent


def test_every_public_name_is_there_and_no_other():
    for name in ostinato.__all__:
        assert getattr(ostinato, name).__name__ == name
        assert name in dir(ostinato)
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = ostinato.Llm


def test_public_names_are_those_that_the_python_page_documents():
    headings = [
        line[3:] for line in (ROOT / "docs/python.md").read_text().splitlines() if line.startswith("## ")
    ]
    documented = {name.strip(" `") for heading in headings for name in heading.split(",")}
    assert documented == set(ostinato.__all__)


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import sys, ostinato; print([m for m in ('torch', 'numpy', 'pydantic', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
