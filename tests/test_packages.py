"""An installed copy has every package: pyproject.toml lists them by hand."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
NOT_SHIPPED = {"tests", "benchmarks"}


def test_every_folder_of_code_is_a_listed_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = {"ostinato"}
    for init in ROOT.glob("*/**/__init__.py"):
        folders = init.parent.relative_to(ROOT).parts
        if folders[0] not in NOT_SHIPPED and not folders[0].startswith(".") and folders[0] != "build":
            found.add(".".join(["ostinato", *folders]))
    assert sorted(project["tool"]["setuptools"]["packages"]) == sorted(found)


def test_every_source_that_is_no_python_is_shipped():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = setuptools["package-data"]
    missing = set()
    for package in setuptools["packages"]:
        folder = ROOT.joinpath(*package.split(".")[1:])
        files = {path for path in folder.iterdir() if path.is_file()} if folder != ROOT else set()
        shipped = {path for pattern in patterns.get(package, []) for path in folder.glob(pattern)}
        missing |= {path.name for path in files - shipped if path.suffix not in (".py", ".pyc")}
    assert missing == set()
