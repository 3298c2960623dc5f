"""Cases from the test suites of other projects, written again for lpkit: `python -m tests.outside`
runs them and counts them by project.

Each module takes its kinds of cases and sizes from one project (SOURCE), calls public functions of
lpkit, and compares the results with an independent computation: PyTorch, transformers, gfloat,
torchao, or float64. No numbers, code or text of these projects are stored. Comparisons with the
same libraries that other folders of tests have (optimizers, attention, losses, casts of MX and
NVFP4) are not repeated here.

Only these tests catch: a layer, loss, cast or tokenizer that is correct at the kit's own sizes,
and wrong at sizes for which another project has a test.
"""

from typing import NamedTuple


class Source(NamedTuple):
    project: str
    files: str
    version: str     # version of the files that were read: a commit, or a release
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

# Tests in which the kit deliberately differs from the other project, and why.
DIFFERENT = {
    "test_nothing_is_refused": "an empty tensor has no block to cast: the original returns it, the "
                              "kit raises an error",
    "test_a_head_of_an_odd_size_has_no_pairs": "the original rotates half of 41 numbers; the kit "
                                              "raises an error for an odd head",
    "test_a_cosine_schedule_with_a_warm_up": "the original's iteration 0 has rate 0; the kit's "
                                            "first update has 1 / warmup_steps of the peak",
    "test_a_text_is_encoded_as_by_hand": "in the original, a text <|endoftext|> contains the end "
                                        "marker; in the kit it is 13 characters",
    "test_each_merge_is_of_a_most_frequent_pair": "among equally frequent pairs, the original "
                                                 "merges the greatest pair; the kit's library "
                                                 "has another order",
    "test_dynamic_casts_to_float8": "torchao multiplies by a scale and the kit divides by a scale: "
                                   "values next to a midpoint may round to the other side",
}
