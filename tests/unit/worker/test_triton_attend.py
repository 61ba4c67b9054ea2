"""What the Triton kernels refuse before any is launched."""

import pytest
import torch

from tests.support.paged_batch import PagedBatch, make_batch

pytest.importorskip("triton")

from worker.kernels import triton_attend


@pytest.fixture
def batch() -> PagedBatch:
    return make_batch([(20, 1), (0, 5)], kv_dtype=torch.float8_e4m3fn)


def test_float8_at_odd_addresses_is_refused_by_name(batch: PagedBatch) -> None:
    shape, wanted = batch.k_pool.shape, "wanted an even one: float8 is read in pairs"
    spaced = torch.zeros(*shape[:3], shape[3] + 1).to(batch.k_pool.dtype)[..., :-1]
    shifted = torch.zeros(batch.v_pool.numel() + 1).to(batch.v_pool.dtype)[1:].view(shape)

    with pytest.raises(ValueError, match=f"k_pool has stride 65 on axis 2, {wanted}"):
        triton_attend.attend(**(batch.arguments | {"k_pool": spaced}))
    with pytest.raises(ValueError, match=f"v_pool begins at element 1, {wanted}"):
        triton_attend.attend(**(batch.arguments | {"v_pool": shifted}))
