from __future__ import annotations

import math

import numpy as np

from relax_tune.ir.core.erf import erf


def test_erf_equals_libm_in_double_precision() -> None:
    x = np.concatenate([np.linspace(-7, 7, 2001), [0.0, -0.0, np.inf, -np.inf, 1e-300, 0.46875, 4.0]])
    np.testing.assert_allclose(erf(x), [math.erf(v) for v in x], rtol=0, atol=1e-15)
    assert np.isnan(erf(np.array([np.nan]))).all()
