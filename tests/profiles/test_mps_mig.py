"""The shipped MPS -> MIG predictor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.mig import geometry
from cotenant.profiles.mig.mps_mig import DUMMY, MpsMigModel, by_kind, weighted_median
from cotenant.profiles.mig.workloads import measured_geometry, speeds_of, workloads

A100 = geometry("A100-40GB", double_memory=False)


@pytest.fixture(scope="module")
def model() -> MpsMigModel:
    return MpsMigModel.load()


def test_card_of_errors(model: MpsMigModel) -> None:
    """What the file says of itself: measured by mix and by workload, never by row."""
    card = model.card
    assert card["by_mix"]["mae"] < 0.016
    assert card["by_mix"]["folds"] == 5
    assert card["by_mix"]["columns"] == card["trained_on"]["columns"]
    # the error of a ridge regression with 12 features on the same groups
    assert 0 < card["by_workload"]["mae_median"] < 0.0402
    assert set(card["by_mix_mae_by_jobs"]) == {str(k) for k in range(1, 8)}
    assert "boringlee24" in card["source"]


def test_size_of_the_shipped_file() -> None:
    from importlib.resources import files

    size = len(files("cotenant.profiles").joinpath("data", "mps-mig-a100-40gb.npz").read_bytes())
    assert size < 3e6


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.permutations(range(7)))
def test_the_order_of_columns_does_not_matter(seed: int, order: list[int]) -> None:
    model = MpsMigModel.load()
    mps = np.random.default_rng(seed).uniform(0.2, 1.0, (3, 3, 7))
    straight, permuted = model.posterior(mps), model.posterior(mps[:, :, order])
    assert np.allclose(straight[:, order], permuted, atol=1e-5)


def test_units_do_not_matter(model: MpsMigModel) -> None:
    mps = np.random.default_rng(1).uniform(0.2, 1.0, (4, 3, 7))
    seconds = mps * np.array([0.01, 2.0, 5.0, 0.3, 1.0, 7.0, 0.002])
    assert np.allclose(model.posterior(mps), model.posterior(seconds), atol=1e-5)


def test_outputs_are_latencies_of_the_right_shape(model: MpsMigModel) -> None:
    mps = np.random.default_rng(2).uniform(0.2, 1.0, (5, 3, 7))
    out = model.predict(mps)
    assert out.shape == (5, 3, 7)
    assert ((out > 0) & (out <= 1)).all()
    assert model.predict(mps[0]).shape == (1, 3, 7)
    speeds = model.predict_speeds(mps, A100)
    assert speeds.shape == (5, 7, 5)
    assert (speeds[..., 0] == 1).all()
    assert ((speeds > 0) & (speeds < 1.2)).all()
    assert model.predict_speeds(mps, geometry("H100-80GB")).shape == (5, 7, 6)


def test_weighted_median_by_hand() -> None:
    table = np.array([[1.0, np.nan], [2.0, 5.0], [4.0, 3.0]])
    out = weighted_median(np.array([[0.2, 0.4, 0.4], [0.6, 0.1, 0.3]]), table)
    # In the second column the masses are 0.4 (of 3.0) and 0.4 (of 5.0), so half is reached at 3.0.
    assert out[0].tolist() == [2.0, 3.0]
    assert out[1].tolist() == [1.0, 3.0]


def test_speeds_from_latencies_by_hand() -> None:
    row = np.array([0.6, 0.8, 1.0, 0.4, 0.2])
    assert by_kind(row, A100).tolist() == pytest.approx([1.0, 0.75, 0.6, 0.4, 0.2])
    assert by_kind(row, geometry("H100-80GB")).tolist() == pytest.approx([1.0, 0.75, 0.6, 0.4, 0.2, 0.2])


def test_on_its_training_data_it_does_better_than_on_unseen_mixes(model: MpsMigModel, shared: Path) -> None:
    """The forward pass here is the one it was trained with: a slip in it would show as a large error."""
    with np.load(shared / "reference/miso/predictor.npz", allow_pickle=True) as data:
        x, y = data["X"][::40].astype(float), data["Y"][::40].astype(float)
    result = model.evaluate(x, y)
    assert result["mae"] < model.card["by_mix"]["mae"]
    truth = y.transpose(0, 2, 1)
    real = np.abs(truth - DUMMY).max(-1) > 5e-4
    assert result["n_columns"] == int(real.sum())
    gap = np.abs(model.predict(x).transpose(0, 2, 1) - truth)[real]
    assert result["mae"] == pytest.approx(float(gap.mean()))
    assert result["mae_by_slice"]["3g"] == pytest.approx(float(gap[:, 2].mean()))


def test_small_slices_regression_is_that_of_the_table(model: MpsMigModel) -> None:
    """Least squares of 2g and 1g on 4g and 3g over the workloads that fit, computed here apart."""
    latency = np.array([w.latency_s for w in workloads().values()])
    speed = speeds_of(latency)
    for t, kind in enumerate((3, 4)):
        ok = speed[:, kind] > 0
        design = np.column_stack([np.ones(ok.sum()), speed[ok, 1], speed[ok, 2]])
        expected = np.clip(design @ np.linalg.lstsq(design, speed[ok, kind], rcond=None)[0], 0, speed[ok, 2])
        got = model.small_slices(speed[ok, 1], speed[ok, 2])[:, t]
        assert np.allclose(got, expected, atol=1e-6)
    assert np.allclose(model.small_slices(np.array([0.0]), np.array([0.0])), 0.0)


def test_draws_are_predictions_for_that_workload(model: MpsMigModel) -> None:
    rng = np.random.default_rng(0)
    truth = speeds_of(np.array([workloads()["transformer_train32"].latency_s]))[0]
    drawn = np.array([model.draw(rng, "transformer_train32", 3, truth, A100) for _ in range(60)])
    assert np.abs(drawn.mean(0) - truth).max() < 0.06
    assert (drawn[:, 0] == 1).all()
    other = np.array([model.draw(rng, "my_model", 3, truth, A100) for _ in range(200)])
    assert np.abs(other.mean(0) - truth).max() < 0.1
    assert other[:, 1].std() > 0
    again = model.draw(np.random.default_rng(5), "gnn_train128", 7, truth, A100)
    assert (again == model.draw(np.random.default_rng(5), "gnn_train128", 7, truth, A100)).all()


def test_table_of_workloads(shared: Path) -> None:
    import json

    reference = json.loads((shared / "reference/miso/profiles.json").read_text())
    assert set(workloads()) == set(reference["workloads"])
    geo = measured_geometry()
    for name, entry in reference["workloads"].items():
        work = workloads()[name]
        assert work.launch_s == reference["recover_s"][entry["family"]]
        for kind, value in zip(geo.kinds, work.latency_s, strict=True):
            expected = entry["mig_latency_s"].get(geo.profiles[kind].name)
            assert np.isnan(value) if not expected else value == pytest.approx(expected, rel=1e-5)
