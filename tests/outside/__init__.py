"""Items of other projects' own test suites, written anew: `python -m tests.outside` runs them and counts by source.

Each module takes its kinds of case and its sizes from one project (SOURCE), asks an entry point of lpkit that a user has, and compares
with something independent: PyTorch, transformers, gfloat, torchao, or float64. No number is stored, and no code or text is theirs.
"""

from typing import NamedTuple

import pytest


class Source(NamedTuple):
    project: str
    files: str
    version: str        # of the files that were read: a commit, or a release
    licence: str


SOURCES = {
    "test_cs336_basics": Source("stanford-cs336/assignment1-basics", "tests/test_{model,nn_utils,optimizer,data,serialization,tokenizer,train_bpe}.py",
                                "25a8a49f6460", "MIT"),
    "test_cs336_systems": Source("stanford-cs336/assignment2-systems", "tests/test_{attention,ddp,sharded_optimizer}.py", "9d95f3b5dc4a", "MIT"),
    "test_gfloat": Source("graphcore-research/gfloat", "test/test_{decode,encode,round,block,finfo}.py", "b142762de8d0", "MIT"),
    "test_torchao": Source("pytorch/ao", "test/float8/test_base.py, test/prototype/mx_formats/", "36027d82d1ad", "BSD-3-Clause"),
    "test_microxcaling": Source("microsoft/microxcaling", "mx/tests/test_{quantize_mx,quantize_elemwise,corners_mx,formats}.py",
                                "7bc41952de39", "MIT"),
    "test_liger": Source("linkedin/Liger-Kernel", "test/transformers/test_{cross_entropy,fused_linear_cross_entropy,rms_norm,layer_norm,rope,swiglu}.py",
                         "ead96b618e5c", "BSD-2-Clause"),
    "test_transformers": Source("huggingface/transformers", "its classes, as an oracle", "5.23.0", "Apache-2.0"),
    "test_optimizers": Source("pytorch/pytorch", "torch.optim, as an oracle; each rule's own paper", "2.13.0", "BSD-3-Clause"),
}

_SUMS = "PyTorch's own layer norm adds up the gradient of the gain in bf16 on a CPU; the kit's is that one until a kernel is chosen"

# Items whose answer differs, and why. Each is expected to fail, and a pass is an error.
DIFFERENT = {
    "layernorm (5, 123, 123) torch.bfloat16": _SUMS, "layernorm (8, 9, 7, 64) torch.bfloat16": _SUMS,
    "layernorm without a bias (5, 123, 123) torch.bfloat16": _SUMS,
}


def different(name: str) -> list[pytest.MarkDecorator]:
    """The marks of an item by its name."""
    return [pytest.mark.xfail(reason=DIFFERENT[name], strict=True)] if name in DIFFERENT else []
