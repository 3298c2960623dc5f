"""What only a GPU can show: its own products against the emulation, recipe by recipe."""

import copy

import pytest
import torch

import lessons.rows.optimizers  # noqa: F401  ten rules more
from lessons.rows import adapters as adapters
from lpkit.config import Config
from lpkit.nn.attention import plain, sdpa
from lpkit.precision.backends import BACKENDS
from lpkit.techniques.adapters import AdapterRow
from lpkit.techniques.blocks import MODEL_CHANGES
from lpkit.techniques.optimizers import OPTIMIZERS
from lpkit.techniques.recipes import RECIPES
from lpkit.training.build import initial_model
from lpkit.training.loop import Arriving
from lpkit.training.training import RandomTokens, Training

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(),
    reason="needs an NVIDIA GPU")]
LOW = [name for name, recipe in RECIPES.items() if recipe.products]


def both(layer: torch.nn.Module, x: torch.Tensor, d_out: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(leaf)
    return [y.detach(), *torch.autograd.grad(y, (leaf, layer.weight), d_out.to(y.dtype))]


@pytest.mark.parametrize("name", LOW)
def test_tensor_cores_give_the_emulated_numbers(name):
    """The operands are the same bits; what differs is the order of the sum, the precision of
    Hopper's FP8 accumulator (about 14 bits, DeepSeek-V3, section 3.3.2) and one rounding to bf16:
    together under 1% of the norm."""
    recipe, device = RECIPES[name], torch.device("cuda")
    if problem := BACKENDS["scaled_mm"].why_not(name, recipe, device):
        pytest.skip(problem)
    torch.manual_seed(0)
    linear = torch.nn.Linear(512, 768, bias=False, device=device)
    x, d_out = torch.randn(1024, 512, device=device), torch.randn(1024, 768, device=device)
    native, emulated = (both(BACKENDS[backend].wrap(copy.deepcopy(linear), recipe, name="layer",
        seed=0), x, d_out)
                        for backend in ("scaled_mm", "emulated"))
    for what, got, want in zip(("y", "dx", "dw"), native, emulated, strict=True):
        assert (got.float() - want.float()).norm() / want.float().norm() < 0.01, what


def test_a_gpu_step_is_the_cpu_step():
    """float32 without TF32: rounding in another order, amplified by one backward pass."""
    config = Config().replace({"model.layers": 2, "model.width": 128, "model.context": 64})
    tokens = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(0))
    grads = []
    for device in ("cpu", "cuda"):
        model = initial_model(config, "sdpa").to(device)
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1].to(device)).flatten(0, 1),
                                                 tokens[:, 1:].to(device).flatten())
        loss.backward()
        grads.append([loss.cpu(), *(p.grad.cpu() for p in model.parameters())])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"system.compile": "blocks"}, {"system.compile": "model"},
    {"grad_accum_steps": 2},
                                     {"memory.cross_entropy": "chunked"}], ids=str)
def test_an_update_never_waits_for_the_gpu(corpus, monkeypatch, changes):
    """PyTorch raises where the host would wait: in making and moving the batch, in the update, and
    in sending its numbers back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    training = Training.build(Config().replace({
        "model.layers": 2, "model.context": 64, "data.source": str(corpus / "*.py"),
        "precision.recipe": "bf16", "system.device": "cuda",
        "system.compile": False, **changes}))
    training.update(0)      # the first touches, and compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        numbers = []
        for step in (1, 2, 3):
            done = training.update(step)
            numbers.append(Arriving({"loss": done.loss, "grad_norm": done.grad_norm},
                                    training.device))
            assert numbers[-1].sent[1].is_pinned()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    losses = [arriving.values()["loss"] for arriving in numbers]
    assert all(0 < loss < 10 for loss in losses) and numbers[1].at.elapsed_time(numbers[2].at) > 0


ROWS = {**{f"optimizer={name}": {"optimizer": name} for name in OPTIMIZERS},
        **{f"model.changes={name}": {"model.changes": [{"name": name}],
                                     "model.position": "rope" if hasattr(row.settings, "places")
                                     else "learned"}
           for name, row in MODEL_CHANGES.items() if isinstance(row, AdapterRow)
           and name != "quantised-base"}}


@pytest.mark.parametrize("row", ROWS)
def test_every_optimizer_and_adapter_trains_on_a_gpu_as_on_a_cpu(row):
    """Twelve updates in float32 without TF32, of the same weights on the same tokens: some of them
    by a graph. Signs and roots of small numbers amplify what sums in another order differ by, so
    losses are held to 0.2% at the rule's own learning rate of 1e-4."""
    config = Config().replace({"model.layers": 2, "model.width": 128, "model.heads": 4,
                               "model.context": 64, "model.vocab": 512,
                               "precision.recipe": "fp32", "system.kernels": "reference",
                               "system.attention": "sdpa", "system.compile": False,
                               "global_batch": 4, "steps": 12, "optimizer.lr": 1e-4, **ROWS[row]})
    tokens, losses, weights = RandomTokens(config.replace({"system.device": "cpu"}), "cpu"), {}, {}
    for device in ("cpu", "cuda"):
        run = Training.build(config.replace({"system.device": device}), data=tokens)
        losses[device] = [run.update(step).loss.item() for step in range(12)]
        weights[device] = [p.detach().cpu() for p in run.model.parameters() if p.requires_grad]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=2e-3)
    moved = max((a - b).abs().max().item() for a, b in zip(*weights.values(), strict=True))
    assert moved < 12 * 1e-4 * 10, "farther apart than all updates together move one number"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_attention_is_plain_attention(dtype):
    rng = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(2, heads, 300, 64, generator=rng, device="cuda", dtype=dtype)
               for heads in (8, 2, 2))
    want = plain(*(t.double() for t in (q, k, v)))
    assert (sdpa(q, k, v).double() - want).norm() / want.norm() < 2.0 ** -7     # 8 bits
