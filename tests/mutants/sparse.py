"""Defects of drafting over a part of the KV cache, which change no text and cost acceptance."""

from catalogue import Mutant

SPARSE = "tests/integration/test_sparse_kv.py"
GAPS = f"{SPARSE}::test_left_out_pages_count_as_hidden"
SHARES = f"{SPARSE}::test_shares_are_those_of_a_direct_sum"
MOST = f"{SPARSE}::test_the_parts_with_most_attention_are_read"

SPARSE_MUTANTS = (
    Mutant(
        70,
        "positions are counted without the pages that are left out",
        "speculation/layout.py",
        "BatchBuffers.lay_out",
        "np.repeat(left_out, rows.counts)",
        "0 * np.repeat(left_out, rows.counts)",
        (f"{GAPS}[torch-plain]",),
    ),
    Mutant(
        70,
        "attention on CUDA counts the pages that are left out",
        "backends/cuda/decoder.py",
        "CudaDecoder._metadata",
        "positions = row_indices(prefixes, batch.ancestor_masks)",
        "positions = batch.positions",
        (f"{GAPS}[cuda-plain]",),
    ),
    Mutant(
        70,
        "a draft's first pass attends to a part of a text whose attention it measures",
        "drafters/model/sparse_kv.py",
        "SparseKvDrafter._draft",
        "TextRows(selection.pages.kv) if is_due else self._chosen(request, selection)",
        "self._chosen(request, selection)",
        (f"{SPARSE}::test_attention_is_measured_in_a_draft_s_first_pass_and_again_after_some_tokens",),
    ),
    Mutant(
        70,
        "the attention to sinks selects the part that they are in",
        "drafters/model/sparse_kv.py",
        "Selection.rows",
        "self.first <= part * each < self.window",
        "part * each < self.window",
        (f"{MOST}[128]",),
    ),
    Mutant(
        70,
        "a layer with a window takes part in the shares",
        "backends/torch/decoder.py",
        "TorchDecoder.forward",
        "shares if window is None and spec.has_attention else None",
        "shares",
        (f"{SHARES}[torch-gpt_oss]",),
    ),
)
