"""Fit sklearn-contrib-bde to a table, for benchmarks/tables.py, in its own environment.

    python bde_tables.py GIVEN.npz FOUND.npz

GIVEN has x, y, new and targets; FOUND gets the means and the ends of 90% intervals of
the new rows, and the NLL of their targets by the mixture of all samples.  Settings
equal those in the README of bde, but there are 1,000 steps of warm-up in place of
5,000, and 200 samples in place of 2,000.
"""

import os
import sys

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={os.cpu_count()}"
os.environ["TQDM_DISABLE"] = "1"  # no bars

import numpy as np
from bde import BdeRegressor
from bde.loss import GaussianNLL

SETTINGS = dict(
    hidden_layers=[16, 16],
    n_members=8,
    seed=0,
    epochs=200,
    validation_split=0.15,
    lr=1e-3,
    weight_decay=1e-4,
    warmup_steps=1000,
    n_samples=200,
    n_thinning=2,
    patience=10,
)


def main(given, found):
    with np.load(given) as file:
        x, y, new, targets = (file[key] for key in ("x", "y", "new", "targets"))
    x_mean, x_scale, y_mean, y_scale = x.mean(0), x.std(0) + 1e-8, y.mean(), y.std()
    x, new = ((rows - x_mean) / x_scale for rows in (x, new))
    model = BdeRegressor(loss=GaussianNLL(), **SETTINGS)
    model.fit(x=x, y=(y - y_mean) / y_scale)
    mean, ends = map(np.asarray, model.predict(new, credible_intervals=[0.05, 0.95]))
    raw = np.float64(model.predict(new, raw=True)).reshape(-1, len(new), 2)
    deviation = np.logaddexp(raw[..., 1], 0) + 1e-6  # bde's softplus
    errors = ((targets - y_mean) / y_scale - raw[..., 0]) / deviation
    logs = -(errors**2) / 2 - np.log(deviation * y_scale * np.sqrt(2 * np.pi))
    nll = np.log(len(raw)) - np.logaddexp.reduce(logs, axis=0).mean()
    ends = ends.reshape(2, -1).T * y_scale + y_mean
    np.savez(found, means=mean.ravel() * y_scale + y_mean, ends=ends, nll=nll)


if __name__ == "__main__":
    main(*sys.argv[1:])
