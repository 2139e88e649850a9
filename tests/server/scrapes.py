"""``GET /metrics`` as a program reads it: by the parser of Prometheus's client."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families


def scrape(http: httpx.Client) -> dict[str, float]:
    """Every sample by its name, with the value of its label behind a colon if it has one."""
    reply = http.get("/metrics").raise_for_status()
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(reply.text):
        assert family.documentation
        assert family.type in ("counter", "gauge")
        for sample in family.samples:
            assert sample.name == family.name + ("_total" if family.type == "counter" else "")
            name = ":".join((sample.name, *sample.labels.values()))
            assert name not in samples
            samples[name] = sample.value
    return samples
