"""Captures collect garbage first. What torch's compiler brings along is none, and looking at it takes half a test."""

import gc

import pytest
import torch._dynamo  # with all that it imports


@pytest.fixture(scope="module", autouse=True)
def what_is_there_is_no_garbage():
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
