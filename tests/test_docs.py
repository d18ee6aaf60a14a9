"""Pages that name files, versions and settings stay true."""

import re
from pathlib import Path

import pytest

import ostinato
from ostinato.tools.flags import settings

ROOT = Path(ostinato.__file__).parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)


def anchors(page: Path) -> set[str]:
    """Of all headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_and_headings_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", prose(page))
    assert [link for link, _ in links if not (page.parent / link).exists()] == []
    there = {(link, name): (page.parent / link) if link else page for link, name in links if name}
    assert [key for key, file in there.items() if key[1] not in anchors(file)] == []


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
