"""Pages that name files, versions and settings stay true."""

import re
from pathlib import Path

import pytest

import ostinato
from ostinato.tools.flags import settings

ROOT = Path(ostinato.__file__).parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_tour_is_short_and_has_eight_steps_each():
    lines = (ROOT / "docs/tour.md").read_text().splitlines()
    assert len(lines) <= 60
    assert [line[:2] for line in lines if re.match(r"\d\.", line)] == [f"{i}." for i in range(1, 9)] * 2


def test_the_changelog_is_of_this_version():
    first = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    project = re.search(r'^version = "(.+?)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert first[1] == project[1] == ostinato.__version__


def test_pages_name_only_settings_that_exist():
    known = {path for path, _ in settings()}
    sections = "|".join(sorted({path.split(".")[0] for path in known if "." in path}))
    named = re.compile(rf"(?:--|`)((?:{sections})\.[a-z_-]+(?:\.[a-z_-]+)*)")
    found = {name.replace("-", "_") for page in PAGES for name in named.findall(page.read_text())}
    assert len(found) > 10
    assert found - known == set()
