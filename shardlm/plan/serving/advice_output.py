"""Hardware advice for a serving target as text, with its reasons, and as plain data. All figures are estimates."""

import textwrap
from typing import Any

from shardlm.hardware import GIB
from shardlm.plan.columns import columns, percent, rounded, three_digits
from shardlm.plan.serving.advice import MOST_HOSTS, ServingAdvice, ServingOffer
from shardlm.plan.serving.case import ServingCase
from shardlm.plan.serving.load import HEADROOM
from shardlm.plan.serving.report.tables import requests
from shardlm.plan.serving.search import ServingPlan, mesh_text
from shardlm.plan.target import ServingTarget

WIDTH = 120
HEAD = (
    "cluster",
    "GPU",
    "GPUs",
    "replicas",
    "each",
    "$/hour",
    "$/M replied",
    "$/M all",
    "first token s",
    "next s",
    "mesh",
)


def to_text(advice: ServingAdvice) -> str:
    """The offers as a table, then the reasons of each."""
    blocks = []
    if advice.offers:
        case = advice.offers[0].plan.case
        asked = f"{case.request_rate:g} requests/s"
        if not case.file:
            asked += f" of {case.prompt_len:,} tokens in and {case.output_len:,} out"
        kept = f" {wanted(case)} for {case.attainment:.4g} of them." if case.attainment else ""
        blocks = [f"{asked} of {case.model.name}.{_uneven(case)}{kept} All figures are estimated."]
        head = (*HEAD[:-1], "in time", HEAD[-1]) if case.attainment else HEAD
        blocks.append(columns(head, [_line(offer) for offer in advice.offers], left=(0, 1, len(head) - 1)))
    for i, offer in enumerate(advice.offers, 1):
        text = f"{i}. {offer.kind.name}: {' '.join(reasons(offer))}"
        blocks.append(textwrap.fill(text, WIDTH, subsequent_indent="   "))
    for kind, why in advice.nothing:
        text = f"{kind.name}: no replica within {MOST_HOSTS} hosts: {' '.join(why.split())}"
        blocks.append(textwrap.fill(text, WIDTH, subsequent_indent="   "))
    blocks.append(f"In {three_digits(advice.seconds)} s.")
    return "\n\n".join(blocks)


def _uneven(case: ServingCase) -> str:
    """What requests are like where not all are of the target's lengths and new."""
    if not (case.range_ratio or case.shared_prefix or case.file):
        return ""
    asked = {"shared_prefix": case.shared_prefix, "file": case.file}
    said = requests(asked, case.mix.told(), case.engine.enable_prefix_caching)
    return f" {said[0].upper()}{said[1:]}."


def wanted(case: ServingCase) -> str:
    """The latencies asked for."""
    token = "a further one every" if case.ttft_seconds else "a further token every"
    limits = {"the first token within": case.ttft_seconds, token: case.itl_seconds}
    said = " and ".join(f"{what} {three_digits(limit)} s" for what, limit in limits.items() if limit)
    return said[0].upper() + said[1:]


def _line(offer: ServingOffer) -> list[str]:
    plan, priced, times = offer.plan, offer.dollars_per_gpu_hour, offer.times
    replied, both = _prices(offer)
    first, further = plan.usual.ttft_seconds, plan.usual.itl_seconds
    if times:
        first, further = times["ttft_seconds"]["mean"], times["tpot_seconds"].get("mean", 0.0)
    return [
        offer.kind.name,
        offer.kind.gpu,
        f"{offer.num_gpus:,}",
        f"{plan.replicas:,}",
        str(plan.gpus_per_replica),
        rounded(offer.dollars_per_hour, 2) if priced else "-",
        rounded(replied, 3) if priced else "-",
        rounded(both, 3) if priced else "-",
        three_digits(first),
        three_digits(further),
        *([f"{times['within_limits']:.1%}"] if times else []),
        mesh_text(plan.case.engine),
    ]


def _prices(offer: ServingOffer) -> tuple[float, float]:
    """Dollars of a million tokens: of replies, and of prompts and replies."""
    case = offer.plan.case
    return offer.dollars_per_million(case.output_len), offer.dollars_per_million(case.prompt_len + case.output_len)


def reasons(offer: ServingOffer) -> list[str]:
    """Sentences: the replica, what limits it, how many, why not larger or smaller ones, the price."""
    plan, case = offer.plan, offer.plan.case
    weights, pages = plan.memory.fullest.weights / GIB, plan.memory.fullest.pages / GIB
    said = [
        f"A replica on {mesh_text(case.engine)} holds {weights:.1f} GiB of weights and {pages:.1f} GiB of pages a "
        f"GPU, for {plan.at_once:,} such requests at once.",
        *(_in_time(offer) if offer.times else _by_means(offer)),
    ]
    if offer.dollars_per_gpu_hour:
        said.append(f"A GPU-hour is ${rounded(offer.dollars_per_gpu_hour, 2)} ({offer.price_source}).")
    else:
        said.append(f"No price of a {offer.kind.gpu} is known; give --dollars_per_gpu_hour.")
    return said


def _by_means(offer: ServingOffer) -> list[str]:
    plan, most, usual = offer.plan, offer.plan.most, offer.plan.usual
    said = [
        f"It sustains {three_digits(most.rate)} requests/s at most, where {most.limit} limits it.",
        f"At {HEADROOM:.0%} of that {plan.case.request_rate:g} requests/s take {plan.replicas:,} of them, "
        f"{offer.num_gpus:,} GPUs; {percent(usual.prompts)} of their time goes to prompts, and "
        f"{three_digits(usual.running)} replies run in each.",
    ]
    return said + [_other(other) for other in offer.others]


def _other(other: ServingPlan, at_most: str = "") -> str:
    mesh = mesh_text(other.case.engine)
    return f"Replicas of {other.gpus_per_replica} ({mesh}) would take {at_most}{other.num_gpus:,} GPUs."


def _in_time(offer: ServingOffer) -> list[str]:
    """By attainment."""
    plan, times = offer.plan, offer.times
    first, further = times["ttft_seconds"], times["tpot_seconds"]
    rest = (
        f", further ones every {three_digits(further['p50'])} and {three_digits(further['p99'])} s" if further else ""
    )
    said = [
        f"{plan.case.request_rate:g} requests/s take {plan.replicas:,} of them, {offer.num_gpus:,} GPUs: of "
        f"{times['requests']:,} requests that come at random to one, {three_digits(times['requests_per_second'])} a "
        f"second, {times['within_limits']:.1%} are in time, half of the first tokens within "
        f"{three_digits(first['p50'])} s and 99% within {three_digits(first['p99'])} s{rest}."
    ]
    for other in offer.others:
        said.append(_other(other, "" if other.gpus_per_replica in offer.counted else "at most "))
    return said


def to_json(advice: ServingAdvice, target: ServingTarget) -> dict[str, Any]:
    return {
        "target": {
            "requests_per_second": target.request_rate,
            "prompt_tokens": target.prompt_len or None,
            "reply_tokens": target.output_len or None,
        },
        "file": next((offer.plan.case.file for offer in advice.offers), None) or None,
        "requests": next((offer.plan.case.mix.told() for offer in advice.offers), None),
        "attainment": next((offer.plan.case.attainment for offer in advice.offers), None) or None,
        "offers": [_offer(offer) for offer in advice.offers],
        "nothing": [{"cluster": kind.name, "gpu": kind.gpu, "why": why} for kind, why in advice.nothing],
        "seconds": round(advice.seconds, 1),
    }


def _offer(offer: ServingOffer) -> dict[str, Any]:
    plan, price = offer.plan, offer.dollars_per_gpu_hour
    replied, both = _prices(offer)
    return {
        "cluster": offer.kind.name,
        "gpu": offer.kind.gpu,
        "status": "estimated",
        "num_gpus": offer.num_gpus,
        "replicas": plan.replicas,
        "gpus_per_replica": plan.gpus_per_replica,
        "mesh": {axis: plan.case.engine.mesh.size(axis) for axis in ("tensor", "expert", "pipeline")},
        "requests_per_second_each": plan.usual.rate,
        "most_requests_per_second": None if offer.times else plan.most.rate,  # not looked for by attainment
        "limited_by": plan.most.limit,
        "ttft_seconds": plan.usual.ttft_seconds,
        "itl_seconds": plan.usual.itl_seconds,
        "times_of_requests": offer.times,
        "dollars_per_gpu_hour": price or None,
        "price_source": offer.price_source or None,
        "dollars_per_hour": offer.dollars_per_hour if price else None,
        "dollars_per_million_replied": replied if price else None,
        "dollars_per_million_tokens": both if price else None,
        "others": [
            {
                "gpus_per_replica": other.gpus_per_replica,
                "mesh": mesh_text(other.case.engine),
                "replicas": other.replicas,
                "num_gpus": other.num_gpus,
                "at_most": bool(offer.times) and other.gpus_per_replica not in offer.counted,
            }
            for other in offer.others
        ],
        "reasons": reasons(offer),
    }
