"""Defects of a GPU's kernels and of what is handed to them: sums, parts, rows, captures and uploads."""

from catalogue import UNIT, Mutant

KERNELS = f"{UNIT}/backends/cuda/test_kernels.py"
FP8 = f"{UNIT}/backends/cuda/test_fp8.py"
PRODUCTS = f"{UNIT}/backends/cuda/test_products.py"
LAYOUT = f"{UNIT}/backends/cuda/test_layout.py"
UPLOAD = f"{UNIT}/backends/cuda/test_upload.py"
ADAPTERS = f"{UNIT}/backends/cuda/test_adapters.py"
DRAW = f"{UNIT}/kernels/test_triton_draw.py"
CHAINS = "tests/integration/test_cuda_head_chains.py"

GPU_KERNEL_MUTANTS = (
    Mutant(
        98,
        "a part of K goes on into the next one where no load ends",
        "backends/cuda/kernels/linear.py",
        "_linear",
        "tl.minimum(part_depth, K - begin)",
        "K - begin",
        (f"{KERNELS}::test_products_in_parts",),
    ),
    Mutant(
        98,
        "how K is cut depends on the rows of the pass",
        "backends/cuda/products.py",
        "Products.parts",
        "if isinstance(weight, Tensor) and self._uses_library(x, weight, depth):\n"
        "    return library_sum(x, weight, depth).unsqueeze(0)",
        "depth = depth if rows <= 32 else x.shape[1]\n"
        "if self._uses_library(x, weight, depth):\n"
        "    return library_sum(x, weight, depth).unsqueeze(0)",
        (f"{PRODUCTS}::test_a_row_of_a_product_in_parts_has_the_same_bits_beside_others",),
    ),
    Mutant(
        42,
        "scales of blocks are those of the first one",
        "backends/cuda/kernels/fp8.py",
        "_fp8_linear",
        "scales + n // BLOCK * groups + first // BLOCK",
        "scales + n // BLOCK * groups",
        (f"{FP8}::test_products_in_8_bits",),
    ),
    Mutant(
        42,
        "a tile whose bits differ is used all the same",
        "backends/cuda/packed_products.py",
        "PackedProducts.check",
        "self._unusable.add((kind, tile))",
        "pass",
        (f"{FP8}::test_a_tile_with_other_bits_is_not_used",),
    ),
    Mutant(
        98,
        "the last part of a product is not added",
        "backends/cuda/kernels/rows.py",
        "_sum_of_parts",
        "PARTS",
        "PARTS - 1",
        (f"{KERNELS}::test_parts_are_joined_in_their_order_and_rounded_once",),
    ),
    Mutant(
        98,
        "the second piece of rows reads those of the first",
        "backends/cuda/kernels/tall.py",
        "_tall_linear",
        "[row + ROWS, k]",
        "[row, k]",
        (f"{KERNELS}::test_tall_products",),
    ),
    Mutant(
        98,
        "a long text among many short ones is read by one program",
        "backends/cuda/layout.py",
        "_layout",
        "narrow_tiles * kv_heads < ENOUGH_PROGRAMS or not is_even or wants_shares",
        "narrow_tiles * kv_heads < ENOUGH_PROGRAMS",
        (f"{LAYOUT}::test_positions_are_split_unless_many_texts_are_about_as_long",),
    ),
    Mutant(
        98,
        "a norm leaves out eps",
        "backends/cuda/kernels/rows.py",
        "_normed",
        "tl.sum(wide * wide, axis=0) / WIDTH + eps",
        "tl.sum(wide * wide, axis=0) / WIDTH",
        (f"{KERNELS}::test_add_norm",),
    ),
    Mutant(
        98,
        "a row's heads after the first sixteen are not rotated",
        "backends/cuda/kernels/rotation.py",
        "_rotate_and_store",
        "tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)",
        "tl.arange(0, HEAD_BLOCK)",
        (f"{KERNELS}::test_rotation_with_the_write_to_kv_memory",),
    ),
    Mutant(
        98,
        "a pending id is filled in with the draw of the row after its own",
        "backends/cuda/kernels/rows.py",
        "_fill_in",
        "drawn + (-1 - token)",
        "drawn - token",
        (f"{KERNELS}::test_ids_that_stand_for_drawn_tokens_are_replaced",),
    ),
    Mutant(
        98,
        "the second piece of a tall tile is stored where the first one ends early",
        "backends/cuda/kernels/tall.py",
        "_tall_linear",
        "_store(more_total, y, row + ROWS, column, num_rows, N, MORE, COLUMNS)",
        "_store(more_total, y, row + MORE, column, num_rows, N, MORE, COLUMNS)",
        (f"{KERNELS}::test_tall_products",),
    ),
    Mutant(
        98,
        "a move of rows leaves out those of a head",
        "backends/torch/kv_store.py",
        "TorchKvStore.move",
        "self._arrays.values()",
        "list(self._arrays.values())[:1]",
        (f"{KERNELS}::test_moves_take_keys_and_values_of_every_kind_along",),
    ),
    Mutant(
        98,
        "a tall product leaves out the bias",
        "backends/cuda/products.py",
        "Products.__call__",
        "tall_for(len(x), len(weight)) if bias is None else None",
        "tall_for(len(x), len(weight))",
        (f"{PRODUCTS}::test_products_of_many_rows_add_the_bias",),
    ),
    Mutant(
        98,
        "adapters add nothing to a product in parts",
        "backends/cuda/layers.py",
        "CudaLayers._addend",
        "bias is None and adapters is None",
        "bias is None",
        (f"{UPLOAD}::test_a_product_in_parts_has_its_bias_and_what_adapters_add",),
    ),
    Mutant(
        98,
        "an upload is found again by its shape alone, with the moves of another pass",
        "backends/cuda/upload.py",
        "PassUpload.send",
        "len(moves[0].source)",
        "0",
        (f"{UPLOAD}::test_passes_of_one_shape_lie_in_one_place_whatever_they_move",),
    ),
    Mutant(
        98,
        "engines with memory of their own share captured passes",
        "backends/cuda/graphs.py",
        "GraphsByMemory.of",
        "if store not in self._caches:\n    self._caches[store] = GraphCache()\nreturn self._caches[store]",
        "if not self._caches:\n    self._caches[store] = GraphCache()\nreturn next(iter(self._caches.values()))",
        (f"{UPLOAD}::test_every_store_has_captures_of_its_own",),
    ),
    Mutant(
        98,
        "a pass whose first request has no adapter runs without any",
        "backends/cuda/layout.py",
        "_layout",
        "any(adapters)",
        "any(adapters[:1])",
        (f"{UPLOAD}::test_passes_of_one_shape_lie_in_one_place_whatever_they_move",),
    ),
    Mutant(
        98,
        "the MLP's product gets the attention's adapter",
        "backends/cuda/adapters.py",
        "RowAdapters.add",
        "modules[0]",
        "0",
        (f"{ADAPTERS}::test_modules_side_by_side_have_their_own_factors",),
    ),
    Mutant(
        98,
        "a draft token is drawn with the noise of its place in the head's own vocabulary",
        "kernels/triton_draw.py",
        "_best_of_chunk",
        "_gumbel(key + tl.zeros_like(token), token_id)",
        "_gumbel(key + tl.zeros_like(token), token)",
        (f"{DRAW}::test_names_decide_the_noise_and_the_tokens",),
    ),
    Mutant(
        98,
        "the second level of a chain reads rows that the head never wrote",
        "backends/cuda/chain_heads.py",
        "CudaHead._run_level",
        "AttentionMetadata(level.position, level.prefix_len, inputs.tables, requests, "
        "store.page_size, starts=inputs.starts)",
        "AttentionMetadata(level.position, level.prefix_len, inputs.tables, requests, "
        "store.page_size, False, None)",
        (f"{CHAINS}::test_a_chain_has_the_guesses_of_one_call_per_level",),
    ),
)
