"""Pages that name files, versions and settings stay true."""

import json
import re
from pathlib import Path

import pytest

import ostinato
from ostinato.runtime.config import KVConfig
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


def test_the_page_about_memory_has_the_defaults_of_its_settings():
    rows = re.findall(r"^\| `kv\.(\w+)` \| (\S+) \|", (ROOT / "docs/memory.md").read_text(), re.M)
    defaults = {name: field.default for name, field in KVConfig.model_fields.items()}
    assert {name: json.loads(default) for name, default in rows} == {name: defaults[name] for name, _ in rows}
    assert defaults.keys() - dict(rows).keys() == {"prefix_cache"}, "which is no matter of memory"


def recorded(name):
    """The header of a record, and its values by metric."""
    record = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    return record["header"], {row["metric"]: row["value"] for row in record["rows"]}


def test_what_memory_costs_on_a_gpu_is_what_the_record_says():
    text = (ROOT / "docs/memory.md").read_text()
    header, values = recorded("gpu_kv_memory")
    assert f"commit {header['commit']}" in text, "docs/memory.md is of an older record"
    calls = ("create", "map", "set_access", "zero", "unmap", "release")
    for size, mib in (("2 MiB", 2), ("32 MiB", 32), ("256 MiB", 256), ("2 GiB", 2048)):
        cells = [f"{values[f'vmm_{call}_us_{mib}mib']:.0f} us" for call in calls]
        assert f"| {size} | {' | '.join(cells)} |" in text
    assert f"the slowest step of a growth {values['kv_grow_2gib_worst_step_ms']:.2f} ms" in text
    assert f"| {values['kv_grow_gib_per_s']:.0f} GiB/s |" in text


def test_what_memory_costs_on_a_cpu_is_what_the_record_says():
    text = (ROOT / "docs/memory.md").read_text()
    _, values = recorded("kv_memory")
    for mib in (4, 16, 64):
        touch = values[f"kv_first_touch_ms_per_mib_step_{mib}mib"]
        row = rf"^\| {mib} MiB \| {values[f'kv_grow_{mib}mib_ms']:.2g} ms \| .*\| {touch:.2g} ms/MiB \|"
        assert re.search(row, text, re.M), row


def ratios(name: str) -> dict[str, float]:
    rows = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["rows"]
    return {row["metric"]: row["ratio"] for row in rows}


def test_the_readme_and_the_changelog_claim_what_the_records_say():
    readme, changes = (ROOT / "README.md").read_text(), (ROOT / "CHANGELOG.md").read_text()
    header, gpu = recorded("gpu_engine_llama_8b")
    steps = [gpu[f"decode_ms_b{batch}_bf16"] for batch in (1, 8, 32, 128, 256)]
    start = f"{gpu['start_to_first_token_s_8b']:.1f} s"
    assert (
        f"at commit {header['commit']}, {steps[0]:.1f}, {steps[2]:.1f} and {steps[4]:.1f} ms per decode step "
        f"at batch 1, 32 and 256, and {start} from the start"
    ) in readme
    assert (
        f"{', '.join(f'{step:.3g}' for step in steps)} ms per step at batch 1, 8, 32, 128, 256; "
        + f"{gpu['offline_tok_s_bf16']:,.0f} output".replace(",", " ")
    ) in changes
    assert (
        f"tokens {gpu['prefill_ms_4096_bf16']:.0f} ms; captures {gpu['capture_s_8b']:.1f} s and "
        f"{gpu['capture_mib_8b']:.0f} MiB; start to first token {start}"
    ) in changes

    _, cpu = recorded("cpu_decode")
    times = ratios("cpu_decode")
    by_type = {dtype: times[f"cpu_decode_tok_s_b1_{dtype}"] for dtype in ("bfloat16", "float32")}
    assert f"at {by_type['bfloat16']:.1f} times the speed" in readme
    assert (
        f"({cpu['cpu_decode_tok_s_b1_bfloat16']:.0f} tokens/s at batch 1, "
        f"{cpu['cpu_decode_tok_s_b8_bfloat16']:.0f} at batch 8; float32 {by_type['float32']:.1f} times)"
    ) in readme
    assert f"512 tokens at {times['cpu_prefill_512_tok_s_bfloat16']:.1f} times" in readme

    _, demo = recorded("demo_start")
    assert f"The demo model compiles in {demo['demo_compile_s']:.0f} s" in changes
    assert f"a fresh process {demo['demo_load_to_first_token_s']:.1f} s" in changes


def test_a_step_of_the_small_model_takes_on_a_gpu_what_the_record_says():
    _, gpu = recorded("gpu_engine_smollm2_135m")
    told = f"take {gpu['smol_decode_ms_b1']:.2f} ms on an H200 at batch 1"
    assert told in (ROOT / "docs/graphs.md").read_text()


def test_pages_name_only_settings_that_exist():
    known = {path for path, _ in settings()}
    sections = "|".join(sorted({path.split(".")[0] for path in known if "." in path}))
    named = re.compile(rf"(?:--|`)((?:{sections})\.[a-z_-]+(?:\.[a-z_-]+)*)")
    found = {name.replace("-", "_") for page in PAGES for name in named.findall(page.read_text())}
    assert len(found) > 10
    assert found - known == set()
