"""Items of other projects' own test suites, written anew: `python -m tests.outside` runs them and
counts by source.

Each module takes its kinds of case and its sizes from one project (SOURCE), asks an entry point of
lpkit that a user has, and compares with something independent: PyTorch, transformers, gfloat,
torchao, or float64. No number is stored, and no code or text is theirs. What a room's own tests
hold beside the same libraries (optimizers, attention, losses, casts of MX and NVFP4) is not here.

Only these tests catch: a layer, loss, cast or tokenizer that is right at the kit's own sizes and
wrong at those that another project has found worth a test.
"""

from typing import NamedTuple


class Source(NamedTuple):
    project: str
    files: str
    version: str        # of the files that were read: a commit, or a release
    licence: str


SOURCES = ({
    "test_cs336_basics": Source("stanford-cs336/assignment1-basics",
                  "tests/test_{nn_utils,optimizer,tokenizer,train_bpe}.py",
                               "25a8a49f6460", "MIT"),
    "test_gfloat": Source("graphcore-research/gfloat",
                         "test/test_{round,block}.py", "b142762de8d0", "MIT"),
    "test_torchao": Source("pytorch/ao", "test/float8/test_base.py",
                          "36027d82d1ad", "BSD-3-Clause"),
    "test_microxcaling": Source("microsoft/microxcaling",
                              "mx/tests/test_{quantize_mx,quantize_elemwise,corners_mx,formats}.py",
                               "7bc41952de39", "MIT"),
    "test_liger": Source("linkedin/Liger-Kernel",
                        "test/transformers/test_{rms_norm,layer_norm,rope,swiglu}.py",
                        "ead96b618e5c", "BSD-2-Clause"),
    "test_transformers": Source("huggingface/transformers", "its classes, as an oracle", "5.23.0",
                               "Apache-2.0"),
})

# Tests of what the kit does otherwise, and why.
DIFFERENT = {
    "test_nothing_is_refused": "an empty tensor has no block to cast: the original returns it, the "
                              "kit refuses it in a sentence",
    "test_a_head_of_an_odd_size_has_no_pairs": "the original turns half of 41 numbers; the kit "
                                              "refuses an odd head in a sentence",
    "test_a_cosine_schedule_with_a_warm_up": "iteration 0 is at a rate of 0 there; the kit's first "
                                            "update is at 1 / warmup_steps of the peak",
    "test_a_text_is_encoded_as_by_hand": "a text that spells <|endoftext|> holds the marker there; "
                                        "in the kit it is 13 characters",
    "test_each_merge_is_of_a_most_frequent_pair": "of pairs as frequent, the original joins the "
                                                 "greatest one; the kit's library has another "
                                                 "order",
    "test_dynamic_casts_to_float8": "torchao multiplies by a scale and the kit divides by one: "
                                   "values beside a midpoint may round to the other side",
}
