"""Every test: fixed seed. Tests marked `gpu` run only when asked for with `-m gpu`."""

import pytest
import torch


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)
