"""Hardware advice for a serving target as text, with its reasons, and as plain data. All figures are estimates."""

import textwrap
from typing import Any

from shardlm.hardware import GIB
from shardlm.plan.columns import columns, three_digits
from shardlm.plan.serving.advice import MOST_HOSTS, ServingAdvice, ServingOffer
from shardlm.plan.serving.load import HEADROOM
from shardlm.plan.serving.search import ServingPlan
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
        asked = f"{case.request_rate:g} requests/s of {case.prompt_len:,} tokens in and {case.output_len:,} out"
        blocks = [f"{asked} of {case.model.name}. All figures are estimated."]
        blocks.append(columns(HEAD, [_line(offer) for offer in advice.offers], left=(0, 1, 10)))
    for i, offer in enumerate(advice.offers, 1):
        text = f"{i}. {offer.kind.name}: {' '.join(reasons(offer))}"
        blocks.append(textwrap.fill(text, WIDTH, subsequent_indent="   "))
    for kind, why in advice.nothing:
        text = f"{kind.name}: no replica within {MOST_HOSTS} hosts: {' '.join(why.split())}"
        blocks.append(textwrap.fill(text, WIDTH, subsequent_indent="   "))
    blocks.append(f"In {advice.seconds:.0f} s.")
    return "\n\n".join(blocks)


def _line(offer: ServingOffer) -> list[str]:
    plan, priced = offer.plan, offer.dollars_per_gpu_hour
    replied, both = _prices(offer)
    return [
        offer.kind.name,
        offer.kind.gpu,
        f"{offer.num_gpus:,}",
        f"{plan.replicas:,}",
        str(plan.gpus_per_replica),
        f"{offer.dollars_per_hour:,.2f}" if priced else "-",
        f"{replied:.3f}" if priced else "-",
        f"{both:.3f}" if priced else "-",
        three_digits(plan.usual.ttft_seconds),
        three_digits(plan.usual.itl_seconds),
        mesh_text(plan),
    ]


def _prices(offer: ServingOffer) -> tuple[float, float]:
    """Dollars of a million tokens: of replies, and of prompts and replies."""
    case = offer.plan.case
    return offer.dollars_per_million(case.output_len), offer.dollars_per_million(case.prompt_len + case.output_len)


def mesh_text(plan: ServingPlan) -> str:
    """Of one replica, axes of size 1 left out."""
    mesh = plan.case.engine.mesh
    return " ".join(f"{a}={mesh.size(a)}" for a in ("tensor", "expert", "pipeline") if mesh.size(a) > 1) or "one GPU"


def reasons(offer: ServingOffer) -> list[str]:
    """Sentences: the replica, what limits it, how many, why not larger or smaller ones, the price."""
    plan, case = offer.plan, offer.plan.case
    fullest, most, usual = plan.memory.fullest, plan.most, plan.usual
    weights, pages = fullest.weights / GIB, fullest.pages / GIB
    said = [
        f"A replica on {mesh_text(plan)} holds {weights:.1f} GiB of weights and {pages:.1f} GiB of pages a GPU, for "
        f"{plan.at_once:,} such requests at once, and sustains {three_digits(most.rate)} requests/s at most, where "
        f"{most.limit} limits it.",
        f"At {HEADROOM:.0%} of that {case.request_rate:g} requests/s take {plan.replicas:,} of them, "
        f"{offer.num_gpus:,} GPUs; {usual.prompts:.0%} of their time goes to prompts, and "
        f"{three_digits(usual.running)} replies run in each.",
    ]
    for other in offer.others:
        said.append(f"Replicas of {other.gpus_per_replica} ({mesh_text(other)}) would take {other.num_gpus:,} GPUs.")
    if offer.dollars_per_gpu_hour:
        said.append(f"A GPU-hour is ${offer.dollars_per_gpu_hour:.2f} ({offer.price_source}).")
    else:
        said.append(f"No price of a {offer.kind.gpu} is known; give --dollars_per_gpu_hour.")
    return said


def to_json(advice: ServingAdvice, target: ServingTarget) -> dict[str, Any]:
    return {
        "target": {
            "requests_per_second": target.request_rate,
            "prompt_tokens": target.prompt_len,
            "reply_tokens": target.output_len,
        },
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
        "most_requests_per_second": plan.most.rate,
        "limited_by": plan.most.limit,
        "ttft_seconds": plan.usual.ttft_seconds,
        "itl_seconds": plan.usual.itl_seconds,
        "dollars_per_gpu_hour": price or None,
        "price_source": offer.price_source or None,
        "dollars_per_hour": offer.dollars_per_hour if price else None,
        "dollars_per_million_replied": replied if price else None,
        "dollars_per_million_tokens": both if price else None,
        "reasons": reasons(offer),
    }
