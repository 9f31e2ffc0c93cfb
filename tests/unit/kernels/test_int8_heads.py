"""int8 heads as the native kernels' twins have them: what quantizing loses, and where codes and scales lie in a page."""

from __future__ import annotations

import struct

import pytest
import torch

from paged_engine.kernels import reference

HEAD_DIMS = [7, 16, 48, 64, 80, 96, 128, 256]


@pytest.mark.parametrize("group_size", [1, 2, 16, 32, 64])
def test_hadamard_in_groups_is_the_matrix_by_its_definition(group_size: int) -> None:
    """Sylvester's: twice the size from [[H, H], [H, -H]]."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < group_size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    x = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0))
    expected = x.double().unflatten(-1, (-1, group_size)) @ matrix / group_size**0.5
    torch.testing.assert_close(reference.hadamard(x, group_size).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_head_comes_back_within_half_a_step(normal: torch.Generator, head_dim: int) -> None:
    """The transform keeps lengths, so that no head is further off than half a step in each of its elements."""
    heads = torch.randn(200, 3, head_dim, generator=normal)
    codes, scales = reference.quantize_heads(heads)
    assert (codes.dtype, codes.shape, scales.shape) == (torch.int8, heads.shape, heads.shape[:2])
    assert codes.abs().amax() == 127
    error = (reference.dequantize_heads(codes, scales) - heads).norm(dim=-1)
    assert (error <= 0.5001 * scales * head_dim**0.5).all()
    assert error.square().mean().sqrt() < 0.01 * head_dim**0.5


def test_a_large_element_costs_the_others_little(normal: torch.Generator) -> None:
    """Without the transform the step were 40 / 127, and the others' error 0.09."""
    heads = torch.randn(500, 64, generator=normal)
    heads[:, 11] = 40
    error = reference.dequantize_heads(*reference.quantize_heads(heads)) - heads
    assert error.square().mean().sqrt() < 0.025


def test_heads_of_nothing_or_of_nan(normal: torch.Generator) -> None:
    """Zeros stay zeros; NaN and infinity make their own head NaN, all of it, and no other."""
    heads = torch.randn(6, 2, 128, generator=normal)
    heads[0, 1], heads[1, 0] = 0, 1e-35
    heads[2, 0, 5], heads[3, 1, 127], heads[4, 1, 64] = torch.nan, torch.inf, -torch.inf
    codes, scales = reference.quantize_heads(heads)
    back = reference.dequantize_heads(codes, scales)
    assert not back[0, 1].any() and not back[1, 0].any()
    spoilt = ~heads.isfinite().all(-1)
    assert spoilt.sum() == 3
    assert not codes[spoilt].any() and not scales[spoilt].isfinite().any()
    assert back[spoilt].isnan().all()
    torch.testing.assert_close(back[~spoilt], heads[~spoilt], rtol=0, atol=0.1)


@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 16), (32, 48), (16, 96)])
def test_codes_and_scales_lie_in_panels(normal: torch.Generator, page_size: int, head_dim: int) -> None:
    """Read byte by byte, as the kernels' layout is described."""
    num_pages, num_kv_heads = 3, 2
    garbage = torch.full((num_pages, num_kv_heads, 2, page_size, head_dim + reference.SCALE_BYTES), -1)
    cache = garbage.to(torch.int8)
    slots = torch.randperm(num_pages * page_size, generator=normal)[: 2 * page_size]
    key, value = torch.randn(2, len(slots), num_kv_heads, head_dim, generator=normal)
    reference.write_pages(cache, key, value, slots)
    for half, heads in enumerate((key, value)):
        codes, scales = reference.quantize_heads(heads)
        dequantized = reference.dequantize_heads(codes, scales)
        read = reference.read_pages(cache)[half]
        for token, slot in enumerate(slots.tolist()):
            page, offset = divmod(slot, page_size)
            assert torch.equal(read[page, offset], dequantized[token])
            for head in range(num_kv_heads):
                block = cache[page, head, half].numpy().tobytes()
                (scale,) = struct.unpack_from("<f", block, page_size * head_dim + 4 * offset)
                assert scale == scales[token, head]
                for dim in range(head_dim):
                    panel, column = divmod(offset, 16)
                    place = ((panel * (head_dim // 4) + dim // 4) * 16 + column) * 4 + dim % 4
                    code = block[place] - 128
                    if half:
                        place = (offset // 2 * head_dim + dim) * 2 + offset % 2
                        code = (block[place] + 128) % 256 - 128
                    assert code == codes[token, head, dim]
    written = torch.zeros(num_pages * page_size, dtype=torch.bool).index_fill(0, slots, True)
    for read in reference.read_pages(cache):
        unwritten = read.flatten(0, 1)[~written]
        assert len(unwritten) and unwritten.isnan().all(), (
            "a slot that was not written is as it was: NaN by its scale"
        )
