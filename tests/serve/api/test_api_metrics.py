"""Metrics of a server as Prometheus reads them."""

import time

import pytest
from client import Client
from fake_llm import FakeLLM
from prometheus_client.parser import text_string_to_metric_families

from shardlm.serve.api.metrics import Metrics
from shardlm.serve.outputs import SpeculationStats, Stats


def test_metrics_as_prometheus_reads_them():
    client, started = Client(FakeLLM(delay=0.002, model_name='a "b" \\ c\n')), time.perf_counter()
    client.post("/v1/completions", {"prompt": ["the lazy dog", "the"], "n": 2, "max_tokens": 3, "unknown": 1})
    client.post("/v1/completions", {"prompt": "a", "max_tokens": 100, "stream": True})
    taken = 3 * (time.perf_counter() - started)  # at most, of three prompts
    response = client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = {}
    for family in text_string_to_metric_families(response.text):
        assert family.documentation
        for sample in family.samples:
            assert sample.labels["model_name"] == 'a "b" \\ c\n'
            found[sample.name, sample.labels.get("finished_reason") or sample.labels.get("le")] = sample.value

    def value(name, label=None):
        return found[f"vllm:{name}", label]

    assert value("prompt_tokens_total") == 5 and value("generation_tokens_total") == 16
    assert value("prefix_cache_queries_total") == 40 and value("prefix_cache_hits_total") == 10
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total")
    assert [value(name) for name in gauges] == [0] * 4
    assert [value("request_success_total", reason) for reason in ("length", "stop", "abort")] == [4, 1, 0]
    counts = {"time_to_first_token_seconds": 3, "inter_token_latency_seconds": 7, "time_per_output_token_seconds": 7}
    counts |= {"e2e_request_latency_seconds": 3, "request_time_per_output_token_seconds": 3}
    counts |= {"request_prompt_tokens": 3, "request_generation_tokens": 3, "request_max_num_generation_tokens": 3}
    counts |= {f"request_{phase}_time_seconds": 3 for phase in ("queue", "prefill", "decode", "inference")}
    counts |= {"request_params_n": 3, "request_params_max_tokens": 3}
    for name, count in counts.items():
        assert value(f"{name}_count") == count == value(f"{name}_bucket", "+Inf")
        buckets = [number for (key, _), number in found.items() if key == f"vllm:{name}_bucket"]
        assert buckets == sorted(buckets)
    assert value("request_generation_tokens_sum") == 16 and value("request_generation_tokens_bucket", "5.0") == 1
    assert value("request_max_num_generation_tokens_sum") == 10 and value("request_params_n_sum") == 5
    assert value("request_params_max_tokens_sum") == 106
    read, written = value("request_prefill_time_seconds_sum"), value("request_decode_time_seconds_sum")
    assert 3 * 0.002 <= read < taken and written >= 7 * 0.002
    assert read + written == pytest.approx(value("request_inference_time_seconds_sum"))
    assert 3 * 0.002 <= value("time_to_first_token_seconds_sum") < taken
    assert 7 * 0.002 <= value("inter_token_latency_seconds_sum") < value("e2e_request_latency_seconds_sum")
    assert found["shardlm:ignored_fields_total", None] == 1 and value("cache_config_info") == 1
    assert 'engine="0",block_size="16",num_gpu_blocks="64"} 1' in response.text


def test_metrics_of_drafts():
    stats = Stats(0, 0, 0.0, 0, 0, 0, 0, 0, SpeculationStats(4, 9, (3, 2, 0)))
    families = {family.name: family for family in text_string_to_metric_families(Metrics("tiny").text(stats))}
    each = [
        families[f"vllm:spec_decode_num_{name}"].samples[0].value
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    ]
    places = families["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
    assert each == [4, 9, 5] and [(one.labels["position"], one.value) for one in places] == [
        ("0", 3),
        ("1", 2),
        ("2", 0),
    ]
