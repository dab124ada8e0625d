"""The links between the GPUs and network adapters of this host, as NVIDIA's driver tells them. No jax.

Read from `nvidia-smi topo -m` and `nvidia-smi nvlink -s`, and not through NVML's Python package: nvidia-smi comes with
every driver, so that nothing need be installed, it names the network adapters, which NVML does not, and its text can be
tested on outputs recorded elsewhere. GPUs are numbered as there, by bus, whatever CUDA_VISIBLE_DEVICES shows to jax.
"""

import dataclasses
import re
import subprocess
from collections.abc import Callable, Mapping
from types import MappingProxyType

# From near to far, as the legend of `nvidia-smi topo -m` has them.
PATHS: Mapping[str, str] = MappingProxyType(
    {
        "NV": "bonded NVLinks",
        "PIX": "one PCIe switch",
        "PXB": "several PCIe switches",
        "PHB": "the PCIe host bridge of a processor",
        "NODE": "several host bridges of a NUMA node",
        "SYS": "between processors",
    }
)
_PATH = re.compile(r"(NV)(\d+)|(PIX|PXB|PHB|NODE|SYS)")
_UNDERLINED = re.compile(r"\x1b\[[0-9;]*m")  # newer drivers underline the head of the table
_CELLS = re.compile(r"\t| {2,}")


@dataclasses.dataclass(frozen=True)
class Link:
    """The way between two devices: a key of PATHS, and how many NVLinks are bonded (0 for the other paths)."""

    path: str
    nvlinks: int = 0

    def __str__(self) -> str:
        return f"{self.path}{self.nvlinks or ''}"


@dataclasses.dataclass(frozen=True)
class Links:
    """All links of a host.

    devices  "GPU0", ..., then the network adapters by the system's names ("mlx5_0")
    pairs    (device, device) -> Link, in both orders, without those that the driver does not tell
    cpus     GPU -> processors near to it, as "0-55,112-167"; without those that the driver does not tell
    numa     GPU -> NUMA nodes near to it, as "0" or "0-3"
    nvlinks  GPU -> bytes/s in one direction of each link that is up
    """

    devices: tuple[str, ...]
    pairs: Mapping[tuple[str, str], Link]
    cpus: Mapping[str, str]
    numa: Mapping[str, str]
    nvlinks: Mapping[str, tuple[float, ...]]

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(name for name in self.devices if _is_gpu(name))

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(name for name in self.devices if not _is_gpu(name))

    @property
    def nvlink_bytes_per_second(self) -> float | None:
        """In one direction, of the GPU that has the least; None where the driver tells of no NVLink."""
        rates = [sum(self.nvlinks.get(gpu, ())) for gpu in self.gpus]
        return min(rates) or None if rates else None

    @property
    def nvlink_domain(self) -> int:
        """How many GPUs of this host reach each other over NVLink, of the largest such set; 1 without NVLink."""
        sets = [{gpu} | {b for b in self.gpus if self._joined(gpu, b)} for gpu in self.gpus]
        return max(map(len, sets), default=1)

    def nearest_adapters(self, gpu: str) -> tuple[str, ...]:
        """The network adapters with the shortest path to a GPU, if there are any."""
        near = {name: list(PATHS).index(self.pairs[gpu, name].path) for name in self.adapters}
        return tuple(name for name, distance in near.items() if distance == min(near.values()))

    def _joined(self, a: str, b: str) -> bool:
        return self.pairs.get((a, b), Link("SYS")).path == "NV"


def read_links(ask: Callable[..., str] | None = None) -> tuple[Links | None, str]:
    """The links of this host, and "" or, where they are not known, why in one line. Never raises for a machine without
    GPU, driver or nvidia-smi. `ask(*arguments)` is nvidia-smi's output."""
    ask = ask or _nvidia_smi
    try:
        table, rates = ask("topo", "-m"), ask("nvlink", "-s")
    except FileNotFoundError:
        return None, "links are not known: this host has no nvidia-smi, which comes with NVIDIA's driver"
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stdout", None) or str(error)).strip().splitlines()
        return None, f"links are not known: nvidia-smi failed: {said[0] if said else type(error).__name__}"
    links = parse_links(table, rates)
    if links is None:
        return None, "links are not known: nvidia-smi topo -m printed no table of GPUs that could be read"
    return links, ""


def parse_links(table: str, rates: str = "") -> Links | None:
    """The links from the output of `nvidia-smi topo -m` and of `nvidia-smi nvlink -s`; None where the former has no
    table of GPUs, or one in which a path is none of PATHS."""
    lines = [_UNDERLINED.sub("", line).rstrip() for line in table.splitlines()]
    rows = [[cell.strip() for cell in _CELLS.split(line)] for line in lines]
    head = next((row for row in rows if len(row) > 1 and row[1] == "GPU0"), None)
    if head is None:
        return None
    names = head[1 : head.index("CPU Affinity")] if "CPU Affinity" in head else head[1:]
    legend = dict(re.findall(r"^\s*(NIC\d+): (\S+)", "\n".join(lines), re.MULTILINE))
    pairs, cpus, numa = {}, {}, {}
    for row in rows:
        if row[0] not in names:
            continue
        for other, cell in zip(names, row[1:], strict=False):
            path = _PATH.fullmatch(cell)
            if path is None and cell != "X":
                return None
            if path:
                link = Link(path[1] or path[3], int(path[2] or 0))
                a, b = legend.get(row[0], row[0]), legend.get(other, other)
                pairs[a, b] = pairs[b, a] = link
        if _is_gpu(row[0]):
            for found, cell in zip((cpus, numa), row[len(names) + 1 :], strict=False):
                if cell not in ("", "N/A"):
                    found[row[0]] = cell
    return Links(tuple(legend.get(name, name) for name in names), pairs, cpus, numa, _parse_rates(rates))


def _parse_rates(text: str) -> dict[str, tuple[float, ...]]:
    found: dict[str, list[float]] = {}
    gpu = ""
    for line in text.splitlines():
        if head := re.match(r"GPU (\d+):", line):
            gpu = f"GPU{head[1]}"
            found[gpu] = []
        elif gpu and (rate := re.match(r"\s*Link \d+: ([\d.]+) GB/s", line)):  # else "<inactive>"
            found[gpu].append(float(rate[1]) * 1e9)
    return {gpu: tuple(rates) for gpu, rates in found.items() if rates}


def _is_gpu(name: str) -> bool:
    return re.fullmatch(r"GPU\d+", name) is not None


def _nvidia_smi(*arguments: str) -> str:
    command = ["nvidia-smi", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
