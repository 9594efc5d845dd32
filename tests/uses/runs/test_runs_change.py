"""Runs that learn from more rows, become smaller, are explained and examined."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dubito.errors import InputError
from run_cases import TOWNS, houses, run_of

from dubito import Laplace, data, runs
from dubito.uses.runs.run import calibrated
from dubito.uses.runs.table_fit import share_held_out

pytestmark = pytest.mark.slow


def dataset_of(target: str = "price") -> data.DataSet:
    """Return the table of `run_of`, with the same parts."""
    table, other = houses(), "cheap" if target == "price" else "price"
    generator = torch.Generator().manual_seed(0)
    return data.load_table(table, target, test=share_held_out(len(table["size"])), generator=generator, ignore=[other])


class TestUpdate:
    @pytest.mark.parametrize("target", ["price", "cheap"])
    def test_new_rows_are_learnt_and_calibrated_on(self, target: str) -> None:
        run, rows = run_of(target), houses(40, seed=3)
        new = runs.update(run, rows, progress=False)
        assert new.posterior.num_data == run.posterior.num_data + 32
        assert new.calibration.num_rows == run.calibration.num_rows + 8
        assert new.settings["updates"] == [{"rows": 32, "held_out": 8}]
        assert new.evaluate(houses(200, seed=4)).scores.scores["nll"] < run.scores.scores["nll"] + 0.5

    @pytest.mark.filterwarnings("ignore:After the update")
    def test_few_rows_are_all_learnt(self) -> None:
        new = runs.update(run_of(), houses(4, seed=3), progress=False)
        assert new.posterior.num_data == run_of().posterior.num_data + 4
        assert new.calibration.num_rows == run_of().calibration.num_rows

    def test_the_range_grows(self) -> None:
        rows = houses(20, seed=3)
        rows["size"][0], rows["price"][0] = 260.0, 260.0 + TOWNS[rows["town"][0]]
        tally = data.Tally()
        new = runs.update(run_of(), rows, progress=False)
        new.predict({"size": [259.0], "town": ["Ulm"]}, tally=tally)
        assert not tally.outside

    def test_rows_that_do_harm_are_questioned(self) -> None:
        rows = houses(40, seed=3)
        rows["price"] = [5000.0 - 10 * price for price in rows["price"]]
        with pytest.warns(UserWarning, match="the old held-out rows are predicted worse"):
            runs.update(run_of(), rows, progress=False)

    def test_what_cannot_be_updated(self) -> None:
        rows = houses(20)
        rows["cheap"][3] = "perhaps"
        with pytest.raises(InputError, match="unknown class 'perhaps'"):
            runs.update(run_of("cheap"), rows, progress=False)


class TestCompress:
    @pytest.mark.parametrize("structure", ["units", "weights"])
    def test_a_smaller_run_predicts_from_its_folder(self, tmp_path: Path, structure: str) -> None:
        run, dataset = run_of(), dataset_of()
        assert dataset.encoder == run.encoder
        small, made = runs.compressed(run, dataset, 0.2, structure=structure, progress=False)
        report = made.report(dataset.test, target_scale=dataset.target_scale, seconds=0.01)
        assert report.nonzeros < report.parameters[0]
        assert report.scores["before"]["rmse"] == pytest.approx(run.scores.scores["rmse"], rel=0.05)  # original units
        small.save(tmp_path / "small")
        again = runs.load(tmp_path / "small")
        new = houses(10, seed=1)
        assert (again.predict(new)["prediction"] == small.predict(new)["prediction"]).all()
        assert (small.predict(new)["epistemic"] > 0).all()
        assert small.predict({"size": [100.0], "town": ["Rom"]})["unfamiliar"][0] == 1
        if structure == "units":
            assert again.posterior.model[1].out_features < 8
        else:
            assert int((again.posterior.model[1].weight == 0).sum()) > 0

    @pytest.mark.parametrize("method", ["map()", "ensemble(members=2)", "laplace(weights=last_layer())"])
    def test_a_posterior_without_weight_variances(self, method: str) -> None:
        """The network is given a Laplace posterior first, and this is said."""
        with pytest.warns(UserWarning, match="does not say which weights can be dropped"):
            small, made = runs.compressed(run_of("price", method), dataset_of(), 0.2, progress=False)
        assert made.model[1].out_features < 8
        assert (small.predict(houses(5, seed=1))["epistemic"] > 0).all()

    def test_the_budget_holds_on_the_rows_it_is_judged_on(self) -> None:
        run, dataset = run_of("cheap"), dataset_of("cheap")
        _, made = runs.compressed(run, dataset, 0.01, progress=False)
        inputs, targets = (torch.cat(pair) for pair in zip(dataset.train, dataset.validation, strict=True))
        before, after = (float((net(inputs).argmax(1) == targets).float().mean()) for net in (made.dense, made.model))
        assert after >= before - 0.01 - 1e-6
        with pytest.raises(InputError, match="`at_most` must be a number of at least 0 and below 1"):
            runs.compressed(run, dataset, 1.0)


class TestExplain:
    @pytest.mark.parametrize("target", ["price", "cheap"])
    def test_the_parts_sum_to_the_difference(self, target: str) -> None:
        run = run_of(target)
        found = runs.explain(run, {"size": [120.0, 900.0], "town": ["Rom", "Ulm"]}, 2, num_orders=9)
        own, usual = found.prediction["epistemic"][0], found.usual[0]
        assert sum(cause.epistemic for cause in found.causes) == pytest.approx(own - usual, rel=1e-4)
        total = found.prediction["epistemic"][0] + found.prediction["aleatoric"][0]
        assert sum(cause.total for cause in found.causes) == pytest.approx(total - found.usual[1], rel=1e-4)
        assert {cause.column for cause in found.causes} == {"size", "town"}

    def test_the_odd_column_comes_first(self) -> None:
        for row, column, remark in ((1, "town", "no training row had it"), (2, "size", "outside of the range of the")):
            found = runs.explain(run_of(), {"size": [120.0, 900.0], "town": ["Rom", "Ulm"]}, row)
            assert found.causes[0].column == column
            assert found.causes[0].remark.startswith(remark)
        assert "size" in str(found)
        assert json.loads(json.dumps(found.to_json()))["causes"][0]["column"] == "size"
        with pytest.raises(InputError, match="has 2 rows, counted from 1; there is no row 3"):
            runs.explain(run_of(), {"size": [1, 2], "town": ["Ulm"] * 2}, 3)

    def test_a_column_that_changes_nothing_has_no_part(self) -> None:
        """Of a posterior that does not look at the town, the town explains nothing."""
        run = run_of("price", "map()")
        posterior = run.posterior.posterior
        with torch.no_grad():
            span = run.encoder.spans()["town"]
            kept = posterior.model[1].weight[:, span].clone()
            posterior.model[1].weight[:, span] = 0
            try:
                found = runs.explain(run, {"size": [900.0], "town": ["Rom"]}, 1)
            finally:
                posterior.model[1].weight[:, span] = kept
        parts = {cause.column: cause.epistemic for cause in found.causes}
        assert abs(parts["town"]) < 1e-6 * abs(parts["size"])


class TestExamine:
    def test_a_good_run(self) -> None:
        levels = [finding.level for finding in runs.examine(run_of())]
        assert levels.count("ok") >= 3
        assert "problem" not in levels

    def test_what_is_wrong_is_said(self) -> None:
        run = run_of("price", "map()")
        texts = {finding.text: finding.level for finding in runs.examine(run)}
        assert any("a single point" in text for text in texts)
        other = replace(run, settings={**run.settings, "dubito": "0.0.1", "risk": 1e9})
        assert any("made by dubito 0.0.1" in finding.text for finding in runs.examine(other))
        scores = replace(run.scores, scores={**run.scores.scores, "rmse": 1.0})
        wrong = [f for f in runs.examine(replace(run, scores=scores)) if f.level == "problem"]
        assert "The rmse of the held-out rows is" in wrong[0].text

    def test_standard_deviations_that_are_off(self) -> None:
        run = run_of()
        wide = Laplace(structure="diag", prior_precision=1e-3).fit(
            run.posterior.model, dataset_of().train, likelihood="gaussian", progress=False
        )
        wide = wide.with_settings(wide.prior_precision, wide.likelihood.replace(noise=20.0))
        off = calibrated(wide, run.encoder, run.network, run.parts, run.settings)
        assert any("standard deviations are off" in finding.text for finding in runs.examine(off))
        found = off.predict(houses(50, seed=1))
        truth = np.array(houses(50, seed=1)["price"])
        assert ((found["lower"] <= truth) & (truth <= found["upper"])).mean() > 0.7  # the intervals are right anyway
