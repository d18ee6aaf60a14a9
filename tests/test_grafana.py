"""The dashboard asks for metrics that exist."""

import json
import re
from pathlib import Path

import ostinato
from ostinato.runtime.http.body_room import BodyRoom
from ostinato.runtime.http.http_connection import Connections
from ostinato.runtime.http.metrics import ServerMetrics
from ostinato.runtime.messages import EngineStats

DASHBOARD = Path(ostinato.__file__).parent / "docs" / "grafana.json"


def test_every_metric_of_the_dashboard_is_shown_by_the_server_and_labels_are_its_own():
    metrics = ServerMetrics(EngineStats, lambda: 0.0)
    metrics.watch(Connections(), BodyRoom(1))
    shown = set()
    for family in metrics.registry.collect():
        shown |= {family.name, f"{family.name}_total", f"{family.name}_bucket"}
    text = DASHBOARD.read_text()
    asked = set(re.findall(r"ostinato_\w+", text)) - {"ostinato_"}
    assert len(asked) > 20
    assert asked - shown == set()


def test_panels_have_their_own_places_and_ids():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 15
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
