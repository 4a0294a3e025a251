"""Defects of recurrent layers: states that are shared, folded, kept and rolled back wrongly."""

from catalogue import UNIT, Mutant

CHUNKS = f"{UNIT}/kv/test_chunks.py"
HYBRIDS = "tests/integration/test_hybrids.py"
KERNELS = f"{UNIT}/backends/cuda/test_recurrent.py"

HYBRID_MUTANTS = (
    Mutant(
        121,
        "a draft crosses the end of its chunk",
        "kv/chunks.py",
        "draft_room",
        "CHUNK - 1 - last % CHUNK",
        "CHUNK - last % CHUNK",
        (f"{CHUNKS}::test_drafts_end_with_their_chunk_and_trees_fit_into_a_ring",),
    ),
    Mutant(
        121,
        "a state is released while passes in flight may still fail",
        "kv/chunks.py",
        "ChunkPool.drop_passed",
        "chunks[1].start < computed",
        "True",
        (CHUNKS,),
    ),
    Mutant(
        121,
        "a failed pass leaves its state behind",
        "kv/chunks.py",
        "ChunkPool.drop_from",
        "chunks[-1].start >= begin",
        "chunks[-1].start > begin + CHUNK",
        (f"{CHUNKS}::test_a_failed_pass_loses_no_state",),
    ),
    Mutant(
        121,
        "a hit goes beyond the last state",
        "kv/chunks.py",
        "ChunkPool.usable",
        "chain[:last]",
        "chain",
        (f"{CHUNKS}::test_prompts_keep_states_now_and_then_and_at_their_end",),
    ),
    Mutant(
        121,
        "a fork shares the KV rows of its chunk, which it computes again if its ring is lost",
        "kv/paged_cache.py",
        "PagedCache.fork",
        "min(rows, self._moves.settled(sequence), *(chunk.start for chunk in chunks))",
        "min(rows, self._moves.settled(sequence))",
        (f"{CHUNKS}::test_a_fork_whose_ring_was_lost_computes_its_chunk_again_in_pages_of_its_own",),
    ),
    Mutant(
        121,
        "ring rows of an accepted branch stay where they were",
        "speculation/layout.py",
        "_ring_copies",
        "(move.ring_source, cache.ring_slot(move.owner, move.row))",
        "(move.ring_source, move.ring_source)",
        (f"{HYBRIDS}::test_trees_what_is_committed_of_them_and_what_is_rolled_back",),
    ),
    Mutant(
        121,
        "a node reads the updates of other branches",
        "backends/torch/recurrent_rows.py",
        "_segment",
        "visible[row, committed:] = False",
        "",
        (f"{HYBRIDS}::test_trees_what_is_committed_of_them_and_what_is_rolled_back",),
    ),
    Mutant(
        121,
        "a state forgets to decay when a chunk is folded",
        "backends/torch/recurrent.py",
        "folded",
        "rows.decays[-1].exp()[:, None, None] * state.matrix + added",
        "state.matrix + added",
        (
            f"{HYBRIDS}::test_prompts_and_decoded_tokens_equal_transformers_to_what_its_own_two_forms_differ_by",
        ),
    ),
    Mutant(
        121,
        "a node's decays on a GPU follow the row before it, not its parent",
        "backends/cuda/kernels/gates.py",
        "_sum_decays",
        "parent != row - 1",
        "False",
        (KERNELS,),
    ),
    Mutant(
        121,
        "a node's convolution on a GPU reads the rows before it, not its ancestors",
        "backends/cuda/state_plan.py",
        "_windows",
        "masks & (masks + 1)",
        "masks & 0",
        (KERNELS,),
    ),
    Mutant(
        121,
        "a state forgets to decay when a GPU folds a chunk",
        "backends/cuda/kernels/recurrence.py",
        "_folded",
        "state * tl.exp(total)",
        "state",
        (KERNELS,),
    ),
)
