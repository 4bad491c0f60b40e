"""Every tensor of a right call of every op, of every other extent and dtype that cannot be right."""

import pytest
import torch
from right_calls import moved, ops_calls

from .draw import Failure, Refused
from .wrong import ANY_DTYPE, FREE, WRONG_DTYPES, expect_error, of_extent

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def wrong_tensors(name, argument, value):
    for axis in set(range(value.dim())) - FREE.get((name, argument), set()):
        for extent in {0, *(value.shape[axis] + more for more in (-1, 1, 7))}:
            yield of_extent(value, axis, extent)
    for dtype in set(WRONG_DTYPES) - ANY_DTYPE.get((name, argument), set()):
        yield torch.zeros(value.shape, dtype=dtype, device=value.device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sorted(ops_calls()))
def test_a_tensor_of_another_extent_or_dtype_is_refused_by_name(name, device):
    torch.manual_seed(0)
    function, given = ops_calls()[name]
    given = {key: moved(value, device) for key, value in given.items()}
    accepted = []
    for argument, value in given.items():
        for wrong in wrong_tensors(name, argument, value) if isinstance(value, torch.Tensor) else ():
            try:
                if wrong is not None:
                    expect_error(name, function, {**given, argument: wrong}, argument)
            except Refused:  # no kernel there takes such an argument
                continue
            except Failure as error:
                accepted.append(f"{argument} {list(wrong.shape)} {wrong.dtype}: {error}")
    assert not accepted, "\n".join(accepted)
