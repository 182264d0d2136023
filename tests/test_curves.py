"""The picture of a run: what a reader sees on its axes."""

import numpy as np
import pytest
from tiny_networks import config_of

from diffcse_jax.run_folder.records import MetricsWriter, Record, write_baseline
from diffcse_jax.training.curves import curves, draw_curves

METRIC = "halves_retrieval"


def run_of(workdir, losses):
    config = config_of({"eval": {"metric": METRIC}})
    write_baseline(workdir, Record(0, "avg", {METRIC: 60.0}, METRIC, "text"))
    writer = MetricsWriter(workdir, resumed_at=0)
    writer.write(0, {f"start/{METRIC}": 60.0, f"dev/{METRIC}": 60.0, "dev/recall": 55.0, "dev/uniformity": -2.0})
    for step, loss in enumerate(losses, 1):
        writer.write(step, {"loss": loss, "loss_contrast": loss})
    writer.write(len(losses), {f"dev/{METRIC}": 65.0, "dev/recall": 70.0, "dev/uniformity": -2.5})
    return config


@pytest.mark.parametrize(
    ("losses", "scale"), [(np.linspace(2.6, 2.2, 20), "linear"), (np.geomspace(2, 0.02, 6), "log")]
)
def test_axes_have_numbers_and_whole_steps_and_the_chosen_metric_its_own_panel(losses, scale, tmp_path):
    figure = curves(tmp_path, run_of(tmp_path, losses.tolist()))
    figure.draw_without_rendering()
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert list(panels) == [
        "loss",
        f"{METRIC} (chooses the checkpoint)",
        "other dev scores",
        "uniformity of the embeddings",
    ]
    assert panels["loss"].get_yscale() == scale
    for axes in figure.axes:
        low, high = axes.get_ylim()
        texts = [label.get_text() for label in axes.get_yticklabels() if low <= label.get_position()[1] <= high]
        assert sum(map(bool, texts)) >= 2
        assert all(step == int(step) for step in axes.get_xticks())
        assert axes.get_legend().get_window_extent().y1 < axes.get_window_extent().y0  # below the curves
    lines = panels[f"{METRIC} (chooses the checkpoint)"].lines
    assert [line.get_label() for line in lines] == [METRIC, "starting checkpoint"]
    assert set(lines[1].get_ydata()) == {60.0}


def test_a_run_without_rows_has_a_picture(tmp_path):
    assert draw_curves(tmp_path, config_of()).stat().st_size > 1000
