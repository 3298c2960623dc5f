"""The tests that `make test` runs beside the notebooks: they prove in minutes that this machine
computes right. Each room of the package and each recipe is there, two ranks, and the browser once.
`make prove` runs all others.
"""

# By file: the names of tests, without `test_`.
MACHINE = {
    "claims/test_claim.py": "students_t_is_the_tables a_gain_that_is_there_is_seen",
    "commands/test_commands.py": "both_spellings_mean_the_same_wherever_they_stand",
    "datasets/test_datasets.py": "batches_are_those_of_a_naive_loop bpe_round_trip",
    "exchange/test_export.py": "transformers_has_the_same_logits",
    "execution/test_graphs.py": "an_update_that_runs_again_is_an_update",
    "gpu/test_gpu.py": "tensor_cores_give_the_emulated_numbers a_gpu_step_is_the_cpu_step "
                       "fused_attention_is_plain_attention",
    "hosting/test_browser.py": "a_guess_is_locked_revealed_scored_and_kept",
    "kernels/test_attention.py": "every_backend_computes_the_rule_or_names_its_field",
    "kernels/test_cast.py": "c_is_the_definition mx_is_torchaos nvfp4_is_torchaos",
    "kernels/test_rows.py": "gelu_and_its_gradient cross_entropy_in_place",
    "kernels/test_wide_product.py": "one_rounding_of_the_exact_sum",
    "lessons/judging/test_exercises.py": "what_counts_as_the_same",
    "lessons/rows/test_lesson_rows.py": "rows_of_a_lesson_are_read_without_torch_and_replace_no_"
                                        "row_of_the_kit",
    "measure/test_tracking.py": "rows_of_a_step_by_arithmetic the_peak_is_the_allocators",
    "memory/test_memory.py": "pieces_against_float64 what_is_moved_comes_back_bit_for_bit "
                             "8_bit_moments_train_as_float32_ones_do",
    "modules/test_modules.py":
    "a_converted_linear_is_the_kits_linear_bit_by_bit_over_micro_batches",
    "nn/test_model.py": "logits_equal_the_reference gradients_equal_the_reference",
    "optim/test_optim.py": "adamw_is_pytorchs_and_float64s muon_turns_singular_values_alone",
    "parallel/test_parallel.py": "gradients_are_those_of_ddp",
    "precision/test_formats.py": "nearest_even_is_ml_dtypes "
                                 "both_roundings_and_overflows_are_gfloats",
    "precision/test_recipes.py": "every_recipe_learns_what_bf16_learns_and_resumes_bit_for_bit",
    "precision/test_scaled_linear.py": "emulation_is_torchao three_products_against_fp32",
    "predict/test_predict.py": "flops_are_pytorchs_count parameters_are_pytorchs_count "
                               "activations_are_what_autograd_keeps_to_the_byte",
    "techniques/test_promise.py": "every_row_of_the_kit_can_be_loaded",
    "training/test_checkpoint.py": "every_bit_comes_back",
    "training/test_train.py": "the_loop_is_the_plain_loop "
                              "a_resumed_run_is_bit_for_bit_the_uninterrupted_one",
}
NAMES = {file: {f"test_{name}" for name in names.split()} for file, names in MACHINE.items()}


def proves_the_machine(file: str, test: str) -> bool:
    """Returns whether `make test` runs a test of `file` (its path below tests/)."""
    return test in NAMES.get(file, ())
