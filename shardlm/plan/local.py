"""The machine at hand as the planner's cluster: from a measured profile (network/profile.py), or measured now. A GPU
keeps its memory, links and generation from hardware.py; a host's virtual CPU devices are described by the profile
alone."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from shardlm.errors import ShardlmError
from shardlm.hardware import Gpu, Peak
from shardlm.hardware_file import SHIPPED, Hardware
from shardlm.mesh import AXES, MeshSpec
from shardlm.network import layout, report, survey
from shardlm.network.collectives import KINDS, parse_sizes
from shardlm.network.links import read_links
from shardlm.network.profile import Profile
from shardlm.plan.cluster import Cluster
from shardlm.plan.measured import AGAIN, CPU, largest_rate, memory_rate


@dataclasses.dataclass(frozen=True)
class CpuDevice(Gpu):
    """One of a host's virtual CPU devices, as far as a plan asks a GPU."""

    generation: Literal["cpu"]


def cluster_of_profile(
    profile: Profile, num_gpus: int = 0, gpus_per_host: int = 0, known: Hardware = SHIPPED
) -> Cluster:
    """So many devices as the profile's, on hosts as its; 0 for what was measured.

    Raises ShardlmError for a GPU without figures, and for a number of devices that does not fill hosts.
    """
    count, measured = num_gpus or profile.devices, profile.devices // profile.hosts
    if profile.device_kind == CPU:
        host = gpus_per_host or (count if profile.hosts == 1 else min(measured, count))
        return dataclasses.replace(Cluster.of(_cpu(profile, host), count, host), measured=profile)
    gpu = next((gpu for gpu in known.gpus.values() if profile.device_kind in gpu.device_kinds), None)
    if gpu is None:
        raise ShardlmError(
            f"the profile is of {profile.device_kind!r}, of which neither memory nor links are known (known: "
            f"{', '.join(known.gpus)}); describe it in a hardware file, with that name among its device_kinds"
        )
    host = gpus_per_host or (min(measured, count) if measured > 1 else 0)
    return dataclasses.replace(Cluster.of(gpu, count, host), measured=profile)


def _cpu(profile: Profile, per_host: int) -> Gpu:
    """Rates of `peak` are those measured: of large products, of a device while `per_host` of them work."""
    if profile.memory_bytes is None or not profile.matmuls or not profile.memory:
        raise ShardlmError(f"the profile has no matmuls, memory or memory_bytes of its CPU devices; {AGAIN}")
    more = profile.devices / profile.hosts / per_host
    fast = max(rate.flops_per_second for rate in profile.matmuls) * more
    fp32 = largest_rate(profile, "fp32") * more
    return CpuDevice(
        name=CPU,
        generation="cpu",
        device_kinds=(CPU,),
        peak=Peak(fp32=fp32, tf32=fp32, bf16=fast, fp16=fast),
        hbm_bytes=int(profile.memory_bytes * more),
        hbm_bytes_per_second=memory_rate(profile) * more,
        nvlink_bytes_per_second=0,
        nvlink_domain=1,
        pcie_bytes_per_second=max((rate.bytes_per_second for rate in profile.collectives), default=0.0),
        nic_bytes_per_second=None,
        watts=0,
        datasheet=f"measured on {profile.date}",
        memory_source="measured",
    )


def provenance(cluster: Cluster) -> list[str]:
    """Sentences on where a cluster's rates are from, the profile's machine and date first, and on what of the plan it
    has not measured; none for a cluster by the table of GPUs."""
    profile = cluster.measured
    if profile is None:
        return []
    hosts = "1 host" if profile.hosts == 1 else f"{profile.hosts} hosts"
    said = [
        f"rates as measured on {profile.devices} x {profile.device_kind} of {hosts} on {profile.date} (jax "
        f"{profile.jax}); what a plan makes of them is estimated"
    ]
    if cluster.num_gpus == 1:
        return said
    sizes = {rate.group_size for rate in profile.collectives}
    if not sizes:
        return [*said, "not measured, and by formulas in the plan: collectives"]
    if cluster.num_gpus > max(sizes):
        said.append(
            f"the plan is for {cluster.num_gpus} devices and collectives were measured among {max(sizes)}: larger "
            "groups are extrapolated"
        )
    return said + ([] if cluster.is_cpu else _by_formulas(cluster, profile))


def _by_formulas(cluster: Cluster, profile: Profile) -> list[str]:
    """What kinds of collectives a profile of GPUs has not, which links.py then stands for; of CPU devices nothing
    does."""
    said = []
    rated = {(rate.kind, rate.domains > 1) for rate in profile.collectives if rate.group_size > 1}
    places = [(False, "inside a host", cluster.island > 1), (True, "between hosts", cluster.num_gpus > cluster.island)]
    for outside, where, used in places:
        missing = [kind for kind in KINDS if (kind, outside) not in rated]
        if used and missing:
            what = "collectives" if len(missing) == len(KINDS) else ", ".join(missing)
            said.append(f"not measured {where}, and by formulas in the plan: {what}")
    return said


def measure_here(say: Callable[[str], Any], **sizes: Any) -> Profile:
    """The profile of the devices of this process, and of its job's: collectives in groups of growing size, then
    products and memory, of `sizes` where machine_profile's own are not wanted. `say` is told what is done and each
    figure. All processes of a job call this."""
    spec, over = spread(jax.device_count())
    mesh = spec.build()
    laid, (links, _) = layout.layout_of(mesh), read_links()
    say(f"measuring {len(laid.places)} x {laid.places[0].kind} on {len(laid.hosts)} host(s): collectives")
    rows = []
    for row in survey.survey(mesh, laid, links, over=over, kinds=KINDS, sizes=parse_sizes([], jax.default_backend())):
        say(report.format_row(row))
        rows.append(row)
    rates, missing = survey.rates(rows, laid)
    for sentence in missing:
        say(sentence)
    say("measuring products and memory")
    return survey.machine_profile(mesh, laid, links, rates, lambda rate: say(report.format_rate(rate)), **sizes)


def spread(count: int) -> tuple[MeshSpec, list[tuple[str, ...]]]:
    """A mesh whose innermost axes together are groups of growing size, and these axes: of 8 devices 2, 4 and 8."""
    factors = _primes(count)
    while len(factors) > len(AXES):
        factors = [factors[0] * factors[1], *factors[2:]]
    axes = AXES[len(AXES) - len(factors) :]
    spec = MeshSpec(**dict(zip(axes, factors, strict=True)))
    return spec, [tuple(axes[i:]) for i in reversed(range(len(axes)))]


def _primes(n: int) -> list[int]:
    """Factors of n, the largest first."""
    found: list[int] = []
    divisor = 2
    while n > 1:
        while n % divisor == 0:
            found.insert(0, divisor)
            n //= divisor
        divisor += 1
    return found


def check_machine(profile: Profile, devices: Sequence[jax.Device]) -> None:
    """Raises ShardlmError for a profile of other devices than these."""
    if profile.device_kind != devices[0].device_kind:
        raise ShardlmError(
            f"the profile is of {profile.device_kind!r} and the devices here are {devices[0].device_kind!r}; give the "
            "profile of this machine: python -m launch.topology --profile=FILE"
        )
