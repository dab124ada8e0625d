"""The dashboard in deploy/ asks for what the server tells."""

import json
import pathlib
import re

from shardlm.serve.api.metrics import Metrics
from shardlm.serve.outputs import Stats

DASHBOARD = pathlib.Path(__file__).parents[3] / "deploy" / "grafana.json"


def test_every_panel_asks_for_a_metric_that_there_is():
    told = Metrics("tiny").text(Stats(0, 0, 0.0, 0, 0, 0, 0, 0))
    names = {re.match(r"[\w:]+", line)[0] for line in told.splitlines() if not line.startswith("#")}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = [re.findall(r"vllm:\w+", target["expr"]) for panel in panels for target in panel["targets"]]
    assert len(panels) == 9 and all(asked)
    assert {name for each in asked for name in each} <= names
