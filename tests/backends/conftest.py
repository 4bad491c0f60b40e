"""A stand-in for the package that backend flashinfer wraps."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.fixture
def flashinfer_stand_in(monkeypatch):
    """`attnops.compat.flashinfer`, which has FlashInfer's names and keywords, where the package would be."""
    from attnops.compat import flashinfer as stand_in

    stand_in.mla = importlib.import_module("attnops.compat.flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", stand_in)
    return stand_in
