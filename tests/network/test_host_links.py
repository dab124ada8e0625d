"""What the driver says of links, on outputs recorded on real machines."""

import subprocess

import pytest
from recorded import A100, A100_ONE_DOWN, A100_RATES, H100, LEGEND, NO_AFFINITY, PCIE, WORKSTATION

from shardlm.network.links import Link, Links, parse_links, read_links


def test_eight_gpus_on_nvlink_with_their_adapters():
    links = parse_links(H100 + LEGEND + "\nNIC Legend:\n\n" + "".join(f"  NIC{i}: mlx5_{i}\n" for i in range(10)))
    assert links.gpus == tuple(f"GPU{i}" for i in range(8)) and links.adapters == tuple(f"mlx5_{i}" for i in range(10))
    assert {links.pairs[a, b] for a in links.gpus for b in links.gpus if a != b} == {Link("NV", 18)}
    assert str(links.pairs["GPU0", "GPU7"]) == "NV18" and str(links.pairs["mlx5_0", "GPU0"]) == "PIX"
    assert [links.nearest_adapters(gpu) for gpu in ("GPU2", "GPU3")] == [("mlx5_2",), ("mlx5_5",)]
    assert links.cpus["GPU4"] == "56-111,168-223" and links.numa == {f"GPU{i}": str(i // 4) for i in range(8)}
    assert links.nvlink_domain == 8 and links.nvlink_bytes_per_second is None  # it was not asked for


def test_a_dgx_a100():
    links = parse_links(A100 + LEGEND, A100_RATES + A100_ONE_DOWN.replace("GPU 0", "GPU 1"))
    assert links.pairs["GPU0", "GPU1"] == Link("NV", 12) and links.nvlink_domain == 8
    assert links.nearest_adapters("GPU4") == ("mlx5_6", "mlx5_7") and links.numa["GPU4"] == "7"
    assert sum(links.nvlinks["GPU0"]) == 300e9 and len(links.nvlinks["GPU1"]) == 11
    assert parse_links(PCIE, A100_RATES).nvlink_bytes_per_second is None  # of the GPU that has the least: none


def test_cards_without_nvlink():
    links = parse_links(PCIE + LEGEND)
    assert links.nvlink_domain == 1 and links.nvlink_bytes_per_second is None
    assert links.nearest_adapters("GPU6") == ("NIC0", "NIC1") and str(links.pairs["GPU6", "NIC0"]) == "PHB"
    assert links.pairs["NIC0", "NIC1"] == Link("PIX")
    desk = parse_links(WORKSTATION + LEGEND)
    assert [str(desk.pairs["GPU1", name]) for name in desk.gpus if name != "GPU1"] == ["SYS", "PHB", "NODE", "NODE"]
    assert desk.cpus["GPU0"] == "8-15,24-31" and desk.numa["GPU0"] == "1" and desk.adapters == ()
    assert desk.nearest_adapters("GPU0") == ()


def test_what_the_driver_leaves_out_and_how_it_marks_the_head():
    links = parse_links(NO_AFFINITY)
    assert links.cpus == {} == links.numa and links.nvlink_domain == 2
    head, rest = PCIE.split("\n", 1)
    assert parse_links(f"\t\x1b[4m{head.lstrip()}\x1b[0m\n{rest}") == parse_links(PCIE)


@pytest.mark.parametrize("text", ["", "No devices were found\n", PCIE.replace("PHB", "QPX"), "\tGPU1\n"])
def test_what_is_no_table_gives_none(text):
    assert parse_links(text) is None


def test_a_host_without_driver_says_so_in_a_line():
    def missing(*arguments):
        raise FileNotFoundError("nvidia-smi")

    def failing(*arguments):
        said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\nMore."
        raise subprocess.CalledProcessError(9, "nvidia-smi", output=said)

    assert read_links(missing) == (
        None,
        "links are not known: this host has no nvidia-smi, which comes with NVIDIA's driver",
    )
    links, why = read_links(failing)
    assert links is None and why.endswith("couldn't communicate with the NVIDIA driver.") and "\n" not in why
    assert read_links(lambda *arguments: "nothing")[1].endswith("no table of GPUs that could be read")
    links, why = read_links(lambda command, _: A100 if command == "topo" else A100_RATES)
    assert isinstance(links, Links) and why == ""
