"""The files of the web page and the route that it asks: headers, keys, what is out of reach."""

import json
import logging
import re
import tomllib
from pathlib import Path

import pytest
from yarl import URL

import ostinato
from ostinato.runtime.config import EngineConfig, GpuConfig
from ostinato.runtime.http.page_handler import FOLDER, page_paths
from tests.support.fake_engine import say
from tests.support.serving import serving

SCRIPTS = sorted(FOLDER.glob("*.js"))
MANIFEST = {
    "source": "toy-1", "created": "2026-01-02T03:04:05+00:00", "ostinato": "0.1.0", "torch": "2.13.0",
    "transformers": "5.24.0", "target": {"device": "cpu", "machine": "x86_64"}, "weights_bytes": 1 << 20,
    "facts": {
        "architecture": "ToyForCausalLM", "dtype": "float32", "hidden_size": 64, "vocab_size": 410,
        "attention": [{"heads": 4, "kv_heads": 2, "head_size": 16, "window": 0}],
    },
    "compile_seconds": {"trace": 1.5},
    "passes": [
        {"name": "silu_mul", "matched": 1, "expected": 2, "refused": {"gate differs": 1}, "milliseconds": 2.0}
    ],
    "proof": {"max_error": 1e-5, "budget": 1e-4, "argmax_equal": True},
}  # fmt: skip


async def test_each_file_comes_with_its_type_and_a_policy_that_allows_only_its_own_scripts():
    types = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    async with serving(say([10])) as served:
        for path in sorted(page_paths()):
            async with served.http.get(served.url + path) as response:
                assert response.status == 200
                end = path.rpartition(".")[2] if path != "/" else "html"
                assert response.content_type == types[end]
                policy = response.headers["Content-Security-Policy"].split("; ")
                assert "default-src 'none'" in policy
                assert "script-src 'self'" in policy
                assert "require-trusted-types-for 'script'" in policy
                assert "unsafe" not in response.headers["Content-Security-Policy"]
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                assert response.headers["Cache-Control"] == "no-cache"
                name = path.rpartition("/")[2] or "index.html"
                assert await response.read() == (FOLDER / name).read_bytes()


async def test_a_browser_that_has_the_file_gets_304_without_it():
    async with serving(say([10])) as served:
        async with served.http.get(served.url + "/page/app.js") as response:
            tag = response.headers["ETag"]
        async with served.http.get(served.url + "/", headers={"If-None-Match": tag}) as response:
            assert response.status == 200
        for known in (tag, f'"other", W/{tag}', "*"):
            async with served.http.get(
                served.url + "/page/app.js", headers={"If-None-Match": known}
            ) as response:
                assert (response.status, await response.read()) == (304, b"")
                assert response.headers["ETag"] == tag
                assert "Content-Security-Policy" in response.headers
        async with served.http.head(served.url + "/") as response:
            assert response.status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/page", "/page/", "/page/nothing.js", "/page/../server.py", "/page/%2e%2e/server.py",
        "/page/..%2fserver.py", "/page/%2e%2e%2fserver.py", "/page/..%5cserver.py", "/page/index.html%00",
        "/page//etc/passwd", "/page/%2fetc%2fpasswd", "/page/./app.js/..", "//page/app.js", "/index.html",
    ],
)  # fmt: skip
async def test_nothing_but_the_files_of_the_page_can_be_asked_for(path):
    async with (
        serving(say([10])) as served,
        served.http.get(URL(served.url + path, encoded=True)) as response,
    ):
        assert response.status in (400, 404)
        assert "error" in await response.json()


async def test_the_page_needs_no_key_and_what_it_asks_does():
    async with serving(say([10]), api_key="secret") as served:
        for path in page_paths():
            async with served.http.get(served.url + path) as response:
                assert response.status == 200
                assert "secret" not in await response.text()
        status, answer = await served.get("/status")
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert (await served.get("/page/nothing.js"))[0] == 401
        assert (await served.get("/status", Authorization="Bearer secret"))[0] == 200
        assert (await served.post("/status", {}, Authorization="Bearer secret"))[0] == 405


async def test_status_is_the_engines_numbers_and_the_artifacts_facts(tmp_path: Path):
    files = {"files": {"weights.safetensors": {"bytes": 1, "digest": "d"}}, "options": {"passes.off": []}}
    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST | files))
    async with serving(say([10]), served_name="org/m") as served:
        served.engine.info = served.engine.info.model_copy(update={"artifact": str(tmp_path)})
        served.state.engine_config = EngineConfig(gpu=GpuConfig(graph_tokens=256))
        _, status = await served.get("/status")
        assert status["engine"] == served.engine.stats.model_dump(mode="json")
        assert (status["model"], status["version"]) == ("org/m", ostinato.__version__)
        assert status["info"] == {
            "max_model_len": 64, "block_tokens": 16, "vocab_size": 410, "dtype": "float32",
            "load_seconds": 0.0, "graph_tokens": 256,
        }  # fmt: skip
        assert status["compiled"] == MANIFEST
        assert str(tmp_path) not in json.dumps(status)
        served.engine.dead = "gone"
        code, answer = await served.get("/status")
        assert (code, answer["error"]["code"]) == (503, "engine_dead")


@pytest.mark.parametrize("text", [None, "{", '{"source": 5}'])
async def test_a_manifest_that_cannot_be_read_costs_one_warning_and_no_status(tmp_path: Path, text, caplog):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    async with serving(say([10])) as served:
        served.engine.info = served.engine.info.model_copy(update={"artifact": str(tmp_path)})
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert (await served.get("/status"))[1]["compiled"] is None
    assert sum("/status leaves" in record.getMessage() for record in caplog.records) == 1


def test_the_pages_files_find_each_other_and_no_other_host():
    page = (FOLDER / "index.html").read_text()
    linked = re.findall(r'(?:src|href)="([^"#]+)"', page)
    assert {f"/{name}" for name in linked} < page_paths()
    for script in SCRIPTS:
        text = script.read_text()
        for name in re.findall(r'from "([^"]+)"', text):
            assert (FOLDER / name).is_file(), f"{script.name} imports {name}"
    everything = "".join(path.read_text() for path in FOLDER.iterdir())
    assert set(re.findall(r"\w+://[^\s\"']+", everything)) == {"http://www.w3.org/2000/svg"}
    assert " style=" not in page  # the policy would refuse it
    ids = set(re.findall(r'id="([^"]+)"', page))
    scripts = "".join(script.read_text() for script in SCRIPTS)
    assert set(re.findall(r'byId\("([^"]+)"\)', scripts)) <= ids
    assert set(re.findall(r'(?:for|aria-labelledby|aria-describedby)="([^"]+)"', page)) <= ids


def test_the_scripts_are_small_and_make_no_markup_from_text():
    assert sum(len(script.read_text().splitlines()) for script in SCRIPTS) < 600
    for script in SCRIPTS:
        found = re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|localStorage|sessionStorage"
            r"|document\.cookie",
            script.read_text(),
        )
        assert found is None, f"{script.name}: {found}"


def test_an_installed_copy_has_the_page():
    project = tomllib.loads((Path(ostinato.__file__).parent / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["ostinato.runtime.http"] == ["page/*"]
    assert all(path.is_file() for path in FOLDER.iterdir()), "the pattern does not look into folders"
