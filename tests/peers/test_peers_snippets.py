"""The snippets of other libraries in docs/coming-from run as they stand, each in a fresh namespace."""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
PAGES = Path(__file__).parents[2] / "docs" / "coming-from"

# What each page's snippets take for granted: imports, data and a network.
_BASE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(60, 64), torch.randint(10, (60,))
train_loader = val_loader = new_loader = DataLoader(TensorDataset(x, y), batch_size=20)
model = nn.Sequential(nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10))
inputs = torch.linspace(-2, 2, 40)[:, None]
curve_loader = DataLoader(TensorDataset(inputs, inputs.sin()), batch_size=20)
net = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))
"""
PRELUDES = {
    "laplace-torch": """
from laplace import Laplace, marglik_training
from laplace.utils import LargestMagnitudeSubnetMask

la = Laplace(model, "classification")
la.fit(train_loader)
""",
    "bayesian-torch": """
from bayesian_torch.layers import LinearReparameterization
from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

bnn_parameters = {
    "prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -3.0,
    "type": "Reparameterization", "moped_enable": False, "moped_delta": 0.5,
}
x_train, y_train, x_test, batch_size, num_monte_carlo = x, y, x[:9], 60, 3
pretrained = nn.Sequential(nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10))
for each in (model, net):
    dnn_to_bnn(each, bnn_parameters)
criterion, optimizer, ce_loss = nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters()), torch.tensor(2.3)
output = torch.stack([model(x_test).softmax(-1) for _ in range(3)]).detach()
fresh_model, hidden = pretrained, torch.randn(5, 20)
""",
    "torch-uncertainty": """
from lightning import LightningDataModule
from torch_uncertainty import TUTrainer
from torch_uncertainty.losses import ELBOLoss
from torch_uncertainty.methods import SWAG, CheckpointCollector, batch_ensemble, deep_ensembles, mc_dropout
from torch_uncertainty.models.classification import bayesian_lenet
from torch_uncertainty.post_processing import ConformalClsTHR, LaplaceApprox, TemperatureScaler
from torch_uncertainty.routines import ClassificationRoutine
from torch_uncertainty.transforms import RepeatTarget


class Data(LightningDataModule):
    eval_ood = eval_shift = False
    train_dataloader = val_dataloader = lambda self: train_loader

    def test_dataloader(self):
        return [train_loader] * (2 if self.eval_ood else 1)

    def get_test_set(self):
        return train_loader.dataset

    get_train_set = get_test_set


dm, dropout_model = Data(), nn.Sequential(nn.Linear(64, 20), nn.Dropout(0.2), nn.Linear(20, 10))
trainer = TUTrainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
loss = nn.CrossEntropyLoss()
""",
    "mapie": """
import numpy as np
from mapie.calibration import TopLabelCalibrator
from mapie.classification import SplitConformalClassifier
from mapie.metrics.classification import classification_coverage_score
from mapie.metrics.regression import regression_coverage_score, regression_mean_width_score
from mapie.regression import ConformalizedQuantileRegressor, SplitConformalRegressor, TimeSeriesRegressor
from mapie.risk_control import BinaryClassificationController
from sklearn.linear_model import LinearRegression, LogisticRegression, QuantileRegressor

rows = np.random.default_rng(0).normal(size=(600, 4))
(X_train, X_conformalize, X_test), values = np.split(rows[:, :3], 3), rows @ [1, 2, 3, 1]
y_train, y_conformalize, y_test = np.split(values, 3)
X_new, y_new, X_calibrate = X_test, y_test, X_conformalize
l_train, l_conformalize, l_test = np.split((values > 0).astype(int) + (values > 2), 3)
l_calibrate = l_conformalize
two_train, two_calibrate = l_train > 0, l_conformalize > 0
estimator = LinearRegression().fit(X_train, y_train)
clf, two = LogisticRegression().fit(X_train, l_train), LogisticRegression().fit(X_train, two_train)
mapie = SplitConformalRegressor(estimator, confidence_level=0.9, prefit=True)
intervals = mapie.conformalize(X_conformalize, y_conformalize).predict_interval(X_test)[1]
sets = SplitConformalClassifier(clf, confidence_level=0.9, prefit=True).conformalize(
    X_conformalize, l_conformalize).predict_set(X_test)[1]
""",
}


def snippets(page: str) -> list[tuple[str, str]]:
    """Return the title and the code of each snippet of another library."""
    parts = re.split(r"^## ", (PAGES / f"{page}.md").read_text(), flags=re.MULTILINE)[1:]
    return [(part.partition("\n")[0], code) for part in parts for code in re.findall(r"(?ms)^```py\n(.*?)^```$", part)]


@pytest.mark.parametrize("page", PRELUDES)
def test_their_snippets_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = {"laplace-torch": "laplace"}.get(page, page.replace("-", "_"))
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{page} is not installed")
    monkeypatch.chdir(tmp_path)
    found = snippets(page)
    assert len(found) >= 10
    for title, code in found:
        names = {"__name__": "snippet"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # theirs
            exec(_BASE + PRELUDES[page], names)
            try:
                exec(compile(code, title, "exec"), names)
            except Exception as error:
                raise AssertionError(f"{page}, {title}: {error!r}") from error
