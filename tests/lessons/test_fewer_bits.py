"""The methods of lesson 29, compared with slower definitions in float64 and with PyTorch.

Only these tests catch: a compensation that is not the optimum, a rounding that is not PyTorch's, a
mask of another pattern, and wrong methods and masks that change a model.
"""

import pytest
import torch

from lessons import l29_fewer_bits as lesson
from lpkit.errors import ConfigError
from lpkit.training.training import Training


def drawn(rows: int = 12, columns: int = 64, tokens: int = 300, seed: int = 0):
    """Returns weights and correlated inputs."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=g) + torch.eye(columns)
    return (torch.randn(rows, columns, generator=g),
            torch.randn(tokens, columns, generator=g) @ mix)


def by_inverse(w, x, new_columns, block):
    """Optimal brain surgeon, column by column, with the inverse of the Hessian of those left."""
    H, w = lesson.hessian(x), w.double().clone()
    for j in range(w.shape[1]):
        inverse = torch.linalg.inv(H[j:, j:])
        if j % block == 0:      # the scores of a block are those of its first column's moment
            diagonals = [torch.linalg.inv(H[k:, k:])[0, 0] for k in range(j, j + block)]
            new = new_columns(w[:, j:j + block], torch.stack(diagonals))
        error = (w[:, j] - new(w[:, j], j % block)) / inverse[0, 0]
        w[:, j:] -= error[:, None] * inverse[0]
    return w


@pytest.mark.parametrize("bits, group", [(3, 16), (4, 64), (8, 32)])
def test_gptq_is_the_float64_definition(bits, group):
    w, x = drawn()
    largest = 2 ** (bits - 1) - 1

    def rounded(block, _):
        scale = block.abs().amax(1) / largest
        return lambda column, j: (column / scale).round().clamp(-largest, largest) * scale

    torch.testing.assert_close(lesson.gptq(w, x, bits, group).double(),
                               by_inverse(w, x, rounded, group), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zeros, of", [(2, 4), (8, 16), (32, 64)])
def test_sparsegpt_is_the_float64_definition(zeros, of):
    w, x = drawn(seed=1)

    def pruned(block, diagonals):
        keep = (block.square() / diagonals).argsort(1).argsort(1) >= zeros
        return lambda column, j: column * keep[:, j]

    got = lesson.sparsegpt(w, x, zeros, of)
    torch.testing.assert_close(got.double(), by_inverse(w, x, pruned, of), rtol=1e-5, atol=1e-6)
    assert ((got == 0).view(len(w), -1, of).sum(-1) == zeros).all()


def test_compensation_lowers_the_output_error():
    for seed in range(5):
        w, x = drawn(seed=seed)
        error = {name: lesson.output_error(w, by(w, x), x) for name, by in lesson.METHODS.items()}
        assert error["GPTQ int3"] < error["RTN int3"] and error["GPTQ int4"] < error["RTN int4"]
        for pattern in (lesson.HALF, lesson.TWO_OF_FOUR):
            got = lesson.sparsegpt(w, x, *pattern)
            assert (lesson.output_error(w, got, x)
                    < lesson.output_error(w, w.masked_fill(got == 0, 0), x) / 1.2)


def test_rounding_is_pytorchs():
    w, _ = drawn(columns=128)
    rows = w.reshape(-1, 64)
    scale = rows.abs().amax(1) / 7
    due = torch.fake_quantize_per_channel_affine(
        rows, scale, torch.zeros(len(rows), dtype=torch.int32), 0, -7, 7).view_as(w)
    torch.testing.assert_close(lesson.rtn(w, 4), due)


def test_pruners_make_the_zeros_that_they_name():
    w, x = drawn(columns=128)
    for name, by in lesson.METHODS.items():
        zeros = by(w, x) == 0
        if name.endswith("2:4"):
            assert (zeros.view(len(w), -1, 4).sum(-1) == 2).all(), name
        elif name.endswith("50%"):
            assert zeros.float().mean() == 0.5, name
    left = lesson.magnitude(w, x, *lesson.HALF)
    assert left[left != 0].abs().min() > w[left == 0].abs().max()
    by_norm = w.abs() * x.square().sum(0).sqrt()
    kept = lesson.wanda(w, x, *lesson.HALF) != 0
    assert all(by_norm[i][kept[i]].min() > by_norm[i][~kept[i]].max() for i in range(len(w)))


def test_a_scale_between_inputs_and_weights_repairs_an_outlier_and_changes_no_product():
    w, x = drawn()
    assert lesson.smoothed_error(w, x, 0.5, bits=30) < 1e-12
    x[:, 3] *= 64
    assert lesson.smoothed_error(w, x, 0.5) < lesson.smoothed_error(w, x, 0) / 2


def test_unknown_methods_and_masks_that_do_not_fit_change_nothing():
    with pytest.raises(ConfigError, match="did you mean 'RTN int3'"):
        lesson.method("RTN int33")
    model = Training.build(lesson.config(1)).model
    before = lesson.copied(model)
    fits = {"blocks.0.mlp.up": torch.zeros(512, 128, dtype=torch.bool)}
    with pytest.raises(ConfigError, match=r"the mask of blocks\.0\.attention\.out is \(3, 3\) and"):
        lesson.apply_masks(model, fits | {"blocks.0.attention.out": torch.ones(3, 3)})
    with pytest.raises(ConfigError, match=r"the mask 'head' has no Linear in this model"):
        lesson.apply_masks(model, fits | {"head": torch.ones(3, 3)})
    assert all(torch.equal(before[name], t) for name, t in lesson.copied(model).items())
    lesson.apply_masks(model, fits)
    assert (model.blocks[0].mlp.up.weight == 0).all()
