"""Hardware advice for a training target as text, with its reasons, and as plain data. All figures are estimates."""

import textwrap
from typing import Any

from shardlm.hardware import GIB
from shardlm.plan.advice import Advice, Offer
from shardlm.plan.columns import columns, dollars, large, percent, rounded, three_digits
from shardlm.plan.ladder import MOST_GPUS, Point
from shardlm.plan.search import settings
from shardlm.plan.shares import described, limited_by, shares
from shardlm.plan.target import DAY

WIDTH = 120
HEAD = ("cluster", "GPU", "GPUs", "days", "dollars", "$/GPU-hour", "MWh", "tokens/s", "a GPU", "MFU", "batch", "")


def to_text(advice: Advice) -> str:
    """The offers as a table, then the reasons of each."""
    target = advice.target
    asked = (
        f"{large(target.tokens)} tokens in {large(target.days)} days: {three_digits(target.tokens_per_second)} tokens/s"
    )
    blocks = [f"{asked}. All figures are estimated."]
    if advice.offers:
        blocks.append(columns(HEAD, [_line(offer) for offer in advice.offers], left=(0, 1, 11)))
    for i, offer in enumerate(advice.offers, 1):
        text = " ".join(reasons(advice, offer))
        blocks.append(textwrap.fill(f"{i}. {offer.kind.name}: {text}", WIDTH, subsequent_indent="   "))
    for kind, why in advice.nothing:
        text = f"{kind.name}: nothing fits or runs on up to {MOST_GPUS:,} {kind.gpu}: {' '.join(why.split())}"
        blocks.append(textwrap.fill(text, WIDTH, subsequent_indent="   "))
    blocks.append(f"{advice.considered:,} configurations in {three_digits(advice.seconds)} s.")
    return "\n\n".join(blocks)


def _line(offer: Offer) -> list[str]:
    plan, price = offer.point.plan, offer.budget.dollars_per_gpu_hour
    return [
        offer.kind.name,
        offer.kind.gpu,
        f"{offer.point.num_gpus:,}",
        three_digits(offer.days),
        dollars(offer.dollars) if price else "-",
        rounded(price, 2) if price else "-",
        three_digits(offer.megawatt_hours),
        three_digits(offer.point.rate),
        three_digits(offer.point.rate / offer.point.num_gpus),
        percent(plan.mfu, 1),
        f"{offer.point.global_batch:,}",
        "" if offer.reached else "too dear" if offer.in_time else "too slow",
    ]


def reasons(advice: Advice, offer: Offer) -> list[str]:
    """Sentences: what it takes, why not fewer GPUs, why this batch, why not more GPUs, what stands in the way."""
    said = [_least(offer), _chosen(offer), *_batch(advice, offer)]
    return [*said, *(_fewer(offer) if offer.in_time else _too_slow(advice, offer)), *_more(offer), *_money(offer)]


def _least(offer: Offer) -> str:
    return f"The target takes the peak rate of {three_digits(offer.least_gpus)} {offer.kind.gpu}."


def _chosen(offer: Offer) -> str:
    point, plan = offer.point, offer.point.plan
    hosts = point.num_gpus // plan.cluster.gpus_per_host
    what = "do it in" if offer.in_time else "are the fastest of those tried, and take"
    return (
        f"{point.num_gpus:,} in {hosts:,} host{'s' * (hosts > 1)} {what} {three_digits(offer.days)} days: "
        f"{described(plan)}; {_parts(point)}; {plan.memory.total / GIB:.1f} of {plan.gpu.hbm_bytes / GIB:.1f} GiB."
    )


def _parts(point: Point) -> str:
    """What takes 1% of a step or more."""
    found = [f"{name} {share:.0%}" for name, share in shares(point.plan).items() if share >= 0.01]
    return f"of a step {', '.join(found)}"


def _batch(advice: Advice, offer: Offer) -> list[str]:
    train, rows = advice.config.train, offer.point.global_batch
    if rows == train.global_batch:
        return [f"The global batch stays {rows:,} rows of {train.seq_len:,} tokens."]
    kept = [one for one in offer.tried if one.global_batch == train.global_batch and one.plan]
    best = max(kept, key=lambda one: one.rate, default=None)
    at_most = "runs on none of the GPUs tried"
    if best:
        at_most = (
            f"does {three_digits(best.rate)} tokens/s at most, on {best.num_gpus:,} of the GPUs tried ({_parts(best)})"
        )
    return [
        f"The configuration's global batch of {train.global_batch:,} rows {at_most}; this is with {rows:,} rows of "
        f"{train.seq_len:,} tokens ({large(rows * train.seq_len)}), {rows / offer.point.num_gpus:.3g} for "
        "each GPU, which changes what is learned from each token: set the learning rate for it."
    ]


def _fewer(offer: Offer) -> list[str]:
    """The largest smaller number that was tried and fits; by construction it is too slow."""
    fewer = [one for one in offer.tried if one.num_gpus < offer.point.num_gpus and one.plan]
    if not fewer:
        return []
    most = max(one.num_gpus for one in fewer)
    best = max((one for one in fewer if one.num_gpus == most), key=lambda one: one.rate)
    return [f"{most:,} GPUs would take {three_digits(_days(offer, best))} days."]


def _more(offer: Offer) -> list[str]:
    twice = offer.beyond
    if not twice:
        return []
    cost = twice.num_gpus * _days(offer, twice) / (offer.point.num_gpus * offer.days) - 1
    return [
        f"Twice as many, {twice.num_gpus:,}, with the same batch would take {three_digits(_days(offer, twice))} days, "
        f"{cost:+.0%} GPU-hours ({_parts(twice)})."
    ]


def _too_slow(advice: Advice, offer: Offer) -> list[str]:
    """What stops it."""
    point, length = offer.point, advice.config.train.seq_len
    share = point.rate / offer.target.tokens_per_second
    said = [f"That is {percent(share)} of the rate; most of a step is {limited_by(point.plan)}."]
    fewer = [one for one in offer.tried if one.num_gpus < point.num_gpus and one.plan]
    if fewer:
        before = max(fewer, key=lambda one: one.rate)
        times, faster = point.num_gpus / before.num_gpus, point.rate / before.rate
        said.append(
            f"{before.num_gpus:,} GPUs do {three_digits(before.rate)} tokens/s, and {times:g} times as many "
            f"{faster:.2f} times that."
        )
    if point.global_batch <= point.num_gpus:
        said.append(
            f"A global batch of {point.global_batch:,} rows ({large(point.global_batch * length)} tokens) leaves each "
            f"GPU {point.global_batch / point.num_gpus:.3g} of a row; a larger one may do "
            "(--max_batch_tokens), or more days."
        )
    else:
        said.append(f"More than {MOST_GPUS:,} GPUs are not looked at; more days would do.")
    return said


def _money(offer: Offer) -> list[str]:
    price = offer.budget.dollars_per_gpu_hour
    if not price:
        return [f"No price of a {offer.kind.gpu} is known; give --dollars_per_gpu_hour."]
    said = f"A GPU-hour is ${rounded(price, 2)} ({offer.budget.price_source})"
    if not offer.max_dollars or offer.dollars <= offer.max_dollars:
        return [f"{said}."]
    enough = price * offer.max_dollars / offer.dollars
    return [f"{said}: more than the ${dollars(offer.max_dollars)} allowed, which ${rounded(enough, 2)} would meet."]


def _days(offer: Offer, point: Point) -> float:
    return offer.target.tokens / point.rate / DAY


def to_json(advice: Advice) -> dict[str, Any]:
    target = advice.target
    return {
        "target": {"tokens": target.tokens, "days": target.days, "tokens_per_second": target.tokens_per_second},
        "offers": [_offer(advice, offer) for offer in advice.offers],
        "nothing": [{"cluster": kind.name, "gpu": kind.gpu, "why": why} for kind, why in advice.nothing],
        "considered": advice.considered,
        "seconds": round(advice.seconds, 1),
    }


def _offer(advice: Advice, offer: Offer) -> dict[str, Any]:
    plan, price = offer.point.plan, offer.budget.dollars_per_gpu_hour
    return {
        "cluster": offer.kind.name,
        "gpu": offer.kind.gpu,
        "reached": offer.reached,
        "in_time": offer.in_time,
        "status": "estimated",
        "num_gpus": offer.point.num_gpus,
        "least_gpus": offer.least_gpus,
        "global_batch": offer.point.global_batch,
        "settings": settings(plan.config),
        "tokens_per_second": offer.point.rate,
        "mfu": plan.mfu,
        "hbm_bytes": plan.memory.total,
        "days": offer.days,
        "dollars_per_gpu_hour": price or None,
        "price_source": offer.budget.price_source or None,
        "dollars": offer.dollars if price else None,
        "megawatt_hours": offer.megawatt_hours,
        "shares": shares(plan),
        "tried": [
            {"num_gpus": one.num_gpus, "global_batch": one.global_batch, "tokens_per_second": one.rate, "why": one.why}
            for one in offer.tried
        ],
        "reasons": reasons(advice, offer),
    }
