"""The Grafana dashboard asks for metrics that exist, and for all of them."""

import json
import re
from pathlib import Path

from paged_engine.serving import metrics

DASHBOARD = Path(__file__).parents[2] / "engine_pkg" / "dashboards" / "paged_engine.json"


def test_every_metric_is_shown_and_exists() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    shown = {name.removesuffix("_bucket") for name in re.findall(r"llm_\w+", expressions)}
    published = set(re.findall(r'"(llm_\w+)"', Path(metrics.__file__).read_text()))
    assert shown == published


def test_panels_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(panels)
    assert len({panel["id"] for panel in panels}) == len(panels)
