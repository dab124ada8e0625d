"""The picture of measured bandwidths: its panels, and words at its axes."""

from matplotlib.figure import Figure

from shardlm.network import report

AXES = (("data",), ("fsdp",), ("tensor",), ("fsdp", "tensor"))


def test_each_axis_has_a_panel_and_sizes_and_rates_are_plain(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(report, "Figure", lambda **kwargs: made.append(Figure(**kwargs)) or made[0])
    sizes = {2**14: 2e8, 2**22: 3e9, 2**31: 2.1e10}
    rows = [report.Row("all-gather", axes, 4, n, 1e-3, 2 * b, b, None, None) for axes in AXES for n, b in sizes.items()]
    report.plot(rows, "8 x cpu", tmp_path / "bandwidth.png")
    assert (tmp_path / "bandwidth.png").read_bytes().startswith(b"\x89PNG")
    shown = [panel for panel in made[0].axes if panel.get_visible()]
    assert [panel.get_title() for panel in shown] == [f"{'+'.join(axes)}: groups of 4" for axes in AXES]
    assert [label.get_text() for label in shown[0].get_xticklabels()] == ["16 KiB", "4 MiB", "2 GiB"]
    said = [label.get_text() for label in shown[0].get_yticklabels(which="both")]
    assert {"1", "10"} < set(said) and not any("10^" in one for one in said)
    assert "measured" in shown[0].get_ylabel()
