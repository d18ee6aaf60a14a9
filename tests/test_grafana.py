"""The dashboard asks for metrics that exist, and docs/api.md lists them."""

import json
import re
from pathlib import Path

from prometheus_client import Metric

import ostinato
from ostinato.runtime.http.body_room import BodyRoom
from ostinato.runtime.http.http_connection import Connections
from ostinato.runtime.http.metrics import ServerMetrics
from ostinato.runtime.messages import EngineStats

DASHBOARD = Path(ostinato.__file__).parent / "docs" / "grafana.json"


def families() -> list[Metric]:
    metrics = ServerMetrics(EngineStats, lambda: 0.0)
    metrics.watch(Connections(), BodyRoom(1))
    return list(metrics.registry.collect())


def test_every_metric_of_the_dashboard_is_shown_by_the_server():
    shown = set()
    for family in families():
        shown |= {family.name, f"{family.name}_total", f"{family.name}_bucket"}
    text = DASHBOARD.read_text()
    asked = set(re.findall(r"ostinato_\w+", text)) - {"ostinato_"}
    assert len(asked) > 20
    assert asked - shown == set()


def test_the_page_about_metrics_lists_all_that_there_are_each_with_its_kind():
    page = DASHBOARD.with_name("api.md").read_text()
    section = page.split("\n## Metrics\n")[1].split("\n## ")[0]
    listed: dict[str, set[str]] = {}
    for row in re.findall(r"^\| (.*?) \|", section, re.M):
        if row in ("Gauge", "Counter", "Histogram"):
            kind = listed.setdefault(row.lower(), set())
        else:
            kind |= {f"ostinato_{name}" for name in re.findall(r"`([a-z_]+?)(?:_total)?(?:\{.*?\})?`", row)}
    shown: dict[str, set[str]] = {}
    for family in families():
        shown.setdefault(family.type, set()).add(family.name)
    assert listed == shown


def test_panels_have_their_own_places_and_ids():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 15
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
