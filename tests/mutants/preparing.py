"""Defects of what is made ready before the first request."""

from catalogue import UNIT, Mutant

PREPARING = f"{UNIT}/engine/test_preparing.py"
EVERY_SIZE = f"{PREPARING}::test_every_size_is_run_until_it_is_ready_and_nothing_else_changes"
COLD = f"{UNIT}/speculation/test_cold_runs.py"

PREPARING_MUTANTS = (
    Mutant(
        98,
        "a size is run once, and captured in its first request",
        "engine/preparing.py",
        "_step_until_ready",
        "number + 1 >= least and (not is_cold)",
        "number + 1 >= least",
        (EVERY_SIZE,),
    ),
    Mutant(
        98,
        "texts that nobody wrote are found in the prefix cache",
        "engine/preparing.py",
        "_PlaceholderTexts._new",
        "request.kv.publishes = False",
        "",
        (EVERY_SIZE,),
    ),
    Mutant(
        98,
        "the start takes as long as it takes",
        "engine/preparing.py",
        "prepare_passes",
        "done < len(cases) and clock() - began < SECONDS",
        "done < len(cases)",
        (f"{PREPARING}::test_the_rest_is_left_to_its_first_request_when_the_time_is_up",),
    ),
    Mutant(
        98,
        "captures take all of the memory that prompts need",
        "engine/preparing.py",
        "prepare_passes",
        "free * (1 - MEMORY_SHARE)",
        "0",
        (f"{PREPARING}::test_the_rest_is_left_out_when_half_of_the_free_memory_is_gone",),
    ),
    Mutant(
        98,
        "an engine does not start where a capture finds no memory",
        "engine/preparing.py",
        "prepare_passes",
        "_log.warning('no memory is left to prepare more passes: the others are prepared on first use')",
        "raise\n"
        "_log.warning('no memory is left to prepare more passes: the others are prepared on first use')",
        (f"{PREPARING}::test_out_of_memory_costs_a_line_and_no_engine",),
    ),
    Mutant(
        98,
        "a driver without memory for a graph costs the pass",
        "backends/cuda/graphs.py",
        "GraphCache._capture",
        "not isinstance(error, torch.OutOfMemoryError) and 'out of memory' not in str(error)",
        "not isinstance(error, torch.OutOfMemoryError)",
        (f"{COLD}::test_no_memory_for_a_capture_costs_the_capture_alone",),
    ),
    Mutant(
        98,
        "of batches that are rounded alike, guesses are forgotten",
        "backends/cuda/layout.py",
        "decode_sizes",
        "padded_rows(count * rows)",
        "0",
        (
            f"{UNIT}/backends/cuda/test_layout.py::test_sizes_to_prepare_are_one_for_each_shape_that_a_batch_can_have",
        ),
    ),
)
