"""The picture of a training: every step's loss, and the mean of the last ones."""

from __future__ import annotations

from longitude.viz.files import write_spec
from longitude.viz.lab import training_spec


def test_each_step_stands_beside_the_mean_of_the_last():
    spec = training_spec([4.0, 2.0, 0.0], 2, "a run")
    (rows,) = spec["datasets"].values()
    assert [(r["step"], r["loss"], r["mean"]) for r in rows] == [
        (1, 4.0, 4.0),
        (2, 2.0, 3.0),
        (3, 0.0, 1.0),
    ]


def test_it_is_drawn(tmp_path):
    title, path = "<a> run & more", tmp_path / "training.png"
    write_spec(training_spec([3.0, 2.5, 2.7], 20, title), title, path)
    assert (tmp_path / "training.png").read_bytes()[:4] == b"\x89PNG"
