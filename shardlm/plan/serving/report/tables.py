"""The tables and figures of a serving answer, made from its plain data (data.py). text.py and html.py show the same
ones."""

from typing import Any

from shardlm.plan.report.figures import figure, gib, milliseconds
from shardlm.plan.report.sentences import Fact
from shardlm.plan.report.tables import Column, Table

Data = dict[str, Any]
GUESS = "estimated"


def headline(answer: Data) -> list[str]:
    """The model on its hardware, and what is asked of it, in a line each."""
    engine, plan = answer["engine"], answer["plans"][0]
    replicas = "1 replica" if plan["replicas"] == 1 else f"{plan['replicas']:,} replicas"
    told = requests(answer["asked"], answer["requests"], engine["enable_prefix_caching"])
    images = answer["images"]
    lines = [
        f"{answer['model']} on {plan['num_gpus']:,} x {answer['cluster']['gpu']}: {replicas} of "
        f"{plan['gpus_per_replica']:,} ({plan['mesh_text']})",
        f"weights {engine['weights']}, keys and values {engine['kv_cache_dtype']}, max_model_len "
        f"{engine['max_model_len']:,}, {told}",
    ]
    if room := engine["adapters"]["count"]:
        lines.append(f"room for {room} adapters of rank {engine['adapters']['rank']}, by which all rows are multiplied")
    if images:
        lines.append(_seeing(images))
    return [*lines, *filter(None, [_drafting(engine["drafts"])])]


def _seeing(images: Data) -> str:
    """What images each prompt has, and what its tokens are because of them."""
    size, count = f"{images['height']:,} x {images['width']:,} pixels (height x width)", images["per_prompt"]
    many = f"an image of {size}," if count == 1 else f"{count:,} images of {size}, each"
    padded = images["program_patches"] - images["patches"]
    program = f" in a program of {images['program_patches']:,}" if padded else ""
    return (
        f"{images['tokens']:,} of a prompt's tokens stand for {many} read as {images['patches']:,} "
        f"patches{program} by the encoder, whole on each GPU"
    )


def requests(asked: Data, found: Data, caching: bool) -> str:
    """What they are like, of data.py's `asked` and `requests`, where equal beginnings are computed once or not."""
    prompts, replies = (_lengths(found[f"{name}_tokens"]) for name in ("prompt", "output"))
    listed = f"{found['listed']:,} requests of {asked['file']}: " if found["listed"] else ""
    shared = f", the first {asked['shared_prefix']:,} the same in all," if asked["shared_prefix"] else ","
    if listed and found["shared_tokens"]:
        shared = f", of which {found['shared_tokens']:,.0f} in pages that others have too,"
    cached = " and no prefix cache," if asked["shared_prefix"] and not caching else ""
    return f"{listed}prompts of {prompts} tokens{shared}{cached} replies of {replies}"


def _lengths(tokens: Data) -> str:
    if tokens["least"] == tokens["most"]:
        return f"{tokens['most']:,}"
    return f"{tokens['least']:,} to {tokens['most']:,} (on average {tokens['mean']:,.0f})"


def _drafting(drafts: Data | None) -> str:
    if drafts is None:
        return ""
    who = {"ngram": "looked up in the text", "mtp": "by modules for further tokens"}.get(drafts["method"])
    return (
        f"{drafts['num_speculative_tokens']} tokens drafted for each step {who or 'by ' + drafts['model']}, "
        f"{drafts['acceptance_rate']:.0%} of them accepted: a step brings a reply {drafts['tokens_a_step']:.3g} tokens"
    )


def plans(answer: Data) -> Table:
    """The best meshes, each replica at the most that it sustains."""
    rows = []
    for plan in answer["plans"]:
        found = plan["estimated"]
        most = found["at_most"]
        rates = (
            figure(most["requests_per_second"]),
            figure(found["tokens_per_second_per_gpu"]),
            milliseconds(most["itl_seconds"]),
        )
        who = (str(plan["rank"]), plan["replica_text"], str(plan["gpus_per_replica"]), f"{plan['replicas']:,}")
        rows.append((*who, *rates, gib(found["memory"]["total_bytes"]), most["limit"], plan["status"]))
    columns = [Column("#"), Column("mesh of a replica", words=True), Column("GPUs"), Column("replicas")]
    columns += [Column(title, GUESS) for title in ("requests/s", "tokens/s a GPU", "ms between tokens", "GiB")]
    columns += [Column("limited by", words=True), Column("figures", words=True)]
    left, refused = answer["plans_left_out"], answer["refused"]
    said = ["Requests and tokens of replies at the most that a replica sustains."]
    said += [f"{left:,} slower ones are left out."] if left else []
    do = "does" if len(refused) == 1 else "do"
    said += [
        f"{len(refused):,} more {do} not do, for instance {one['mesh_text']}: {one['why']}." for one in refused[:1]
    ]
    rate = answer["asked"]["request_rate"]
    by = f"GPUs for {rate:g} requests/s" if rate else "tokens of replies"
    return Table("plans", f"The best meshes by {by}", tuple(columns), tuple(rows), note=" ".join(said))


def facts(answer: Data) -> list[Fact]:
    """What the first plan comes to; a replica is at the rate asked for, or at the headroom of its most. Means are those
    of the scheduler on random arrivals, as in `times`; the fluid's first token comes a sixth sooner at the headroom."""
    plan, asked = answer["plans"][0], answer["asked"]
    found = plan["estimated"]
    most, usual, times = found["at_most"], found["at_rate"], answer["times_of_requests"]
    shown = [
        ("requests/s of a replica, at most", figure(most["requests_per_second"])),
        ("requests/s of a replica, planned", figure(usual["requests_per_second"])),
        ("requests/s of all", figure(usual["requests_per_second"] * plan["replicas"])),
        ("first token, mean", seconds(times["ttft_seconds"]["mean"])),
        ("first token of an idle replica", seconds(found["prefill_seconds"])),
        ("between tokens, mean", seconds(times["tpot_seconds"].get("mean", usual["itl_seconds"]))),
        ("requests running in a replica", f"{usual['requests_running']:.0f}"),
        ("its time for prompts", f"{usual['share_of_time_for_prompts']:.0%}"),
        ("requests at once, none preempted", f"{found['max_concurrency']:,}"),
        ("tokens held by a replica", f"{found['tokens_held']:,}"),
    ]
    if images := answer["images"]:
        shown.insert(5, ("of it, the encoder for each image", seconds(images["encoder_seconds"])))
    if asked["request_rate"]:
        other = f" (asked about {asked['num_gpus']:,})" if plan["num_gpus"] != asked["num_gpus"] else ""
        shown.append((f"GPUs for {asked['request_rate']:g} requests/s", f"{plan['num_gpus']:,}{other}"))
    return [Fact(what, said, GUESS) for what, said in shown]


def limit(answer: Data) -> str:
    """What keeps a replica from more, and how much of its most is planned with."""
    most, share = answer["plans"][0]["estimated"]["at_most"], answer["asked"]["attainment"]
    if share:
        return f"{most['limit']}; a replica is planned with as many requests as leave {share:.4g} of them in time"
    return f"{most['limit']}; each replica is planned with no more than {answer['headroom']:.0%} of what it sustains"


def memory(answer: Data) -> Table:
    """GiB of one GPU, as the engine allocates it."""
    plan, engine = answer["plans"][0], answer["engine"]
    held = plan["estimated"]["memory"]
    groups = plan["estimated"]["groups_of_layers"]
    windows = f", {groups['with_window']} of {groups['all']} groups of layers with a window"
    parts = {"layers that draft": "draft_weight_bytes", "the encoder of images": "encoder_weight_bytes"}
    own = {what: nbytes for what, name in parts.items() if (nbytes := plan["estimated"][name])}
    notes = {
        "weights": ", ".join(f"{gib(nbytes)} of {what}" for what, nbytes in own.items()),
        "pages": f"{plan['estimated']['num_pages']:,} of {engine['block_size']} tokens"
        + (windows if groups["with_window"] else ""),
        "memories": f"of {engine['max_num_seqs']:,} requests (max_num_seqs) in layers of linear attention, and "
        f"{plan['estimated']['num_snapshots']:,} copies by which prefixes are cached",
        "slots": f"{engine['max_num_seqs']:,} requests (max_num_seqs)",
        "temporaries": "of the program that needs most",
        "total": f"of {gib(plan['estimated']['memory_limit_bytes'])} GiB that jax may take",
    }
    names = {"pages": "KV cache (pages)", "total": "all"}
    kinds = {key.removesuffix("_bytes"): n for key, n in held.items() if n or key != "memories_bytes"}
    rows = [(names.get(kind, kind), gib(nbytes), notes.get(kind, "")) for kind, nbytes in kinds.items()]
    columns = (Column("kind", words=True), Column("GiB", GUESS), Column("", words=True))
    return Table("memory", "Memory of a GPU, the first plan", columns, tuple(rows), sums=1)


def decode(answer: Data) -> Table:
    """Decoding of a replica by requests at once, against reading all that must be read at the memory's full rate."""
    rows = []
    for step in answer["plans"][0]["estimated"]["decode"]:
        parts = sorted(step["seconds_by_part"].items(), key=lambda part: -part[1])[:3]
        what = ", ".join(f"{name} {share / step['seconds']:.0%}" for name, share in parts)
        rates = (figure(step[key]) for key in ("tokens_per_second", "bandwidth_bound_tokens_per_second"))
        share = f"{step['share_of_bandwidth_bound']:.0%}"
        rows.append((str(step["batch"]), milliseconds(step["seconds"]), *rates, share, what))
    titles = ("ms between tokens", "tokens/s", "bandwidth bound", "of the bound")
    columns = [
        Column("requests at once"),
        *(Column(title, GUESS) for title in titles),
        Column("most of it", words=True),
    ]
    drafts = answer["engine"]["drafts"]
    shared = "A token has its share of a step, in which drafts are made and verified. " if drafts else ""
    note = "Bandwidth bound: tokens/s if each step only read its weights, keys and values, at the memory's full rate."
    note = f"{shared}{note}{_fused(answer['plans'][0]['estimated']['decode_with_fused_products'])}"
    return Table("decode", "Decoding of a replica", tuple(columns), tuple(rows), note=note)


def _fused(steps: list[Data]) -> str:
    """What decoding may be quicker by, in a sentence; "" where it is not."""
    if not steps:
        return ""
    rates = [f"{figure(step['tokens_per_second'])} at {step['batch']:,}" for step in steps]
    return (
        " With projections as fused kernels, which the engine has where it finds them quicker on its GPU "
        f"(fused_products), up to {', '.join(rates)} tokens/s: their kernels are counted, none was measured there, and "
        "no other figure is with them."
    )


def times(answer: Data) -> Table:
    """Of requests that come at random to a replica of the first plan, as clients see them."""
    found, asked = answer["times_of_requests"], answer["asked"]
    names = {
        "ttft": "to the first token (TTFT)",
        "tpot": "for each further token (TPOT)",
        "itl": "between events of a stream (ITL)",
        "e2e": "to the end of the reply",
    }
    kinds = ("mean", "p50", "p90", "p99")
    rows = []
    for name, what in names.items():
        seen = found[f"{name}_seconds"]
        rows.append((what, *(milliseconds(seen[kind]) if seen else "-" for kind in kinds)))
    columns = (Column("ms", words=True), *(Column(kind, GUESS) for kind in kinds))
    limits = {"the first token within": asked["ttft_seconds"], "a further one every": asked["itl_seconds"]}
    wanted = " and ".join(f"{what} {seconds(limit)}" for what, limit in limits.items() if limit)
    said = [
        f"The engine's own scheduler with {found['requests']:,} requests that come at random, "
        f"{figure(found['requests_per_second'])} a second, and the estimated times of its programs. A stream gets the "
        "tokens of a program at once. launch.bench serve reports the same of a server that runs."
    ]
    said += [f"{found['within_limits']:.1%} have {wanted}."] if wanted else []
    if answer["images"]:
        said += ["Images are none another's; fetching and preparing them on the host is not counted."]
    said += _cached(found["cached_share"], answer["requests"])
    said += [f"{found['preemptions']:,} preemptions."] if found["preemptions"] else []
    return Table("times", "Times of requests, a replica of the first plan", columns, tuple(rows), note=" ".join(said))


def _cached(share: float, requests: Data) -> list[str]:
    foreseen = requests["shared_tokens"] / requests["prompt_tokens"]["mean"]
    if not foreseen:
        return []
    return [
        f"Of the prompts' tokens {share:.0%} were in the prefix cache; all other estimates are with {foreseen:.0%}, "
        "which is all that another request may have brought."
    ]


def programs(answer: Data) -> Table | None:
    """The engine's programs; None where none was compiled."""
    plan = answer["plans"][0]
    if not plan["compiled"]:
        return None
    rows = [
        (
            one["what"],
            f"{one['rows']} x {one['tokens']}",
            str(one["stage"]),
            *(gib(one[f"{key}_bytes"]) for key in ("estimated", "arguments", "temporaries", "total")),
            f"{one['difference']:+.1%}",
        )
        for one in plan["compiled"]
    ]
    words = [Column(title, words=True) for title in ("program", "rows x tokens")]
    made = [Column(f"{title} GiB", "compiled") for title in ("arguments", "temporaries", "together")]
    columns = (*words, Column("stage"), Column("together GiB", GUESS), *made, Column("difference"))
    note = f"Compiled for {answer['cluster']['gpu']} in {figure(plan['compile_seconds'])} s."
    return Table("programs", "The engine's programs", columns, tuple(rows), note=note)


def sent(answer: Data) -> Table | None:
    """What a device sends in a step of each program; None where none was compiled."""
    plan = answer["plans"][0]
    if not plan["compiled"]:
        return None
    rows = [
        (f"{one['what']} {one['rows']} x {one['tokens']}", axes, kind, figure(nbytes / 2**20))
        for one in plan["compiled"]
        for axes, kinds in one["sent_bytes"].items()
        for kind, nbytes in kinds.items()
    ]
    titles = ("program", "axes", "collective")
    columns = (*(Column(title, words=True) for title in titles), Column("MiB", "compiled"))
    return Table("sent", "What a GPU sends in one step", columns, tuple(rows)) if rows else None


SHOWN = (times, memory, decode, programs, sent)  # of the first plan, where there is anything to show


def refusals(answer: Data) -> list[str]:
    """Plans whose programs do not fit or that have none, in a sentence each."""
    return [f"#{p['rank']} {p['replica_text']} was refused: {p['why']}" for p in answer["plans"] if p["why"]]


def words(answer: Data) -> list[str]:
    """What the words mean, as far as they are used."""
    said = ["estimated: by formulas; nothing was run."]
    if answer["doubt"]:
        said.append(f"In doubt: {answer['doubt']}.")
    if answer["unverified"]:
        said.insert(0, f"Nothing was verified: {answer['unverified']}")
    elif all(plan["status"] == "estimated" for plan in answer["plans"]):
        said.append("Nothing was compiled.")
    if any(plan["compiled"] for plan in answer["plans"]):
        said.append("compiled: read from the programs that XLA made for these GPUs. Nothing was run.")
    statuses = {plan["status"] for plan in answer["plans"]}
    if "verified" in statuses:
        said.append("verified: the engine's programs that need most were compiled, and fit.")
    if "refused" in statuses:
        said.append("refused: the programs do not fit, or there are none.")
    return said


def seconds(x: float | None) -> str:
    if x is None:
        return "without bound"
    return f"{figure(x)} s" if x >= 1 else f"{milliseconds(x)} ms"
