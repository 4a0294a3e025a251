"""Defects of a GPU's kernels and of what is handed to them: sums, parts, rows, captures and uploads."""

from catalogue import UNIT, Mutant

KERNELS = f"{UNIT}/backends/cuda/test_kernels.py"
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
        "            inside = (first + k) < end\n",
        "            inside = (first + k) < K\n",
        (f"{KERNELS}::test_products_in_parts",),
    ),
    Mutant(
        98,
        "how K is cut depends on the rows of the pass",
        "backends/cuda/products.py",
        "        rows, columns, depth = len(x), len(weight), self.part_depth(weight)\n",
        "        rows, columns, depth = len(x), len(weight), self.part_depth(weight)\n"
        "        depth = depth if rows <= 32 else x.shape[1]\n",
        (f"{PRODUCTS}::test_a_row_of_a_product_in_parts_has_the_same_bits_beside_others",),
    ),
    Mutant(
        98,
        "the last part of a product is not added",
        "backends/cuda/kernels/rows.py",
        "    for part in tl.static_range(1, PARTS):\n",
        "    for part in tl.static_range(1, PARTS - 1):\n",
        (f"{KERNELS}::test_parts_are_joined_in_their_order_and_rounded_once",),
    ),
    Mutant(
        98,
        "the second piece of rows reads those of the first",
        "backends/cuda/kernels/tall.py",
        "more_x.load([row + ROWS, k])",
        "more_x.load([row, k])",
        (f"{KERNELS}::test_tall_products",),
    ),
    Mutant(
        98,
        "a long text among many short ones is read by one program",
        "backends/cuda/layout.py",
        "splits=narrow_tiles * kv_heads < ENOUGH_PROGRAMS or not is_even,",
        "splits=narrow_tiles * kv_heads < ENOUGH_PROGRAMS,",
        (f"{LAYOUT}::test_positions_are_split_unless_many_texts_are_about_as_long",),
    ),
    Mutant(
        98,
        "a norm leaves out eps",
        "backends/cuda/kernels/rows.py",
        "    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)\n",
        "    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH)\n",
        (f"{KERNELS}::test_add_norm",),
    ),
    Mutant(
        98,
        "a row's heads after the first sixteen are not rotated",
        "backends/cuda/kernels/rows.py",
        "    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)\n",
        "    head = tl.arange(0, HEAD_BLOCK)\n",
        (f"{KERNELS}::test_rotation_with_the_write_to_kv_memory",),
    ),
    Mutant(
        98,
        "a pending id is filled in with the draw of the row after its own",
        "backends/cuda/kernels/rows.py",
        "    found = tl.load(drawn + (-1 - token), mask=is_pending, other=0)\n",
        "    found = tl.load(drawn - token, mask=is_pending, other=0)\n",
        (f"{KERNELS}::test_ids_that_stand_for_drawn_tokens_are_replaced",),
    ),
    Mutant(
        98,
        "the second piece of a tall tile is stored where the first one ends early",
        "backends/cuda/kernels/tall.py",
        "        _store(more_total, y, row + ROWS, column",
        "        _store(more_total, y, row + MORE, column",
        (f"{KERNELS}::test_tall_products",),
    ),
    Mutant(
        98,
        "a move of rows leaves out those of a head",
        "backends/cuda/kv_store.py",
        "            for row in self.spec.rows:\n",
        "            for row in self.spec.rows[:1]:\n",
        (f"{KERNELS}::test_moves_take_keys_and_values_of_every_kind_along",),
    ),
    Mutant(
        98,
        "a tall product leaves out the bias",
        "backends/cuda/products.py",
        "        tall = tall_for(len(x), len(weight)) if bias is None else None\n",
        "        tall = tall_for(len(x), len(weight))\n",
        (f"{PRODUCTS}::test_products_of_many_rows_add_the_bias",),
    ),
    Mutant(
        98,
        "adapters add nothing to a product in parts",
        "backends/cuda/decoder.py",
        "        if bias is None and added is None:\n",
        "        if bias is None:\n",
        (f"{UPLOAD}::test_a_product_in_parts_has_its_bias_and_what_adapters_add",),
    ),
    Mutant(
        98,
        "an upload is found again by its shape alone, with the moves of another pass",
        "backends/cuda/upload.py",
        "self._known.get(key := (shape, len(moves.source)))",
        "self._known.get(key := (shape, 0))",
        (f"{UPLOAD}::test_passes_of_one_shape_lie_in_one_place_whatever_they_move",),
    ),
    Mutant(
        98,
        "engines with memory of their own share captured passes",
        "backends/cuda/graphs.py",
        "        if store not in self._of:\n            self._of[store] = GraphCache()\n"
        "        return self._of[store]\n",
        "        if not self._of:\n            self._of[store] = GraphCache()\n"
        "        return next(iter(self._of.values()))\n",
        (f"{UPLOAD}::test_every_store_has_captures_of_its_own",),
    ),
    Mutant(
        98,
        "a pass whose first request has no adapter runs without any",
        "backends/cuda/layout.py",
        "            has_adapters=any(batch.adapters),\n",
        "            has_adapters=any(batch.adapters[:1]),\n",
        (f"{UPLOAD}::test_passes_of_one_shape_lie_in_one_place_whatever_they_move",),
    ),
    Mutant(
        98,
        "the MLP's product gets the attention's adapter",
        "backends/cuda/adapters.py",
        "(layer, modules[0]), widths)",
        "(layer, 0), widths)",
        (f"{ADAPTERS}::test_modules_side_by_side_have_their_own_factors",),
    ),
    Mutant(
        98,
        "a draft token is drawn with the noise of its place in the head's own vocabulary",
        "kernels/triton_draw.py",
        "_gumbel(key + tl.zeros_like(token), name)",
        "_gumbel(key + tl.zeros_like(token), token)",
        (f"{DRAW}::test_names_decide_the_noise_and_the_tokens",),
    ),
    Mutant(
        98,
        "the second level of a chain reads rows that the head never wrote",
        "backends/cuda/heads.py",
        "positions, seen[level], tables, told.tiles.requests, store.page_size, False, told.starts\n",
        "positions, seen[level], tables, told.tiles.requests, store.page_size, False, None\n",
        (f"{CHAINS}::test_a_chain_has_the_guesses_of_one_call_per_level",),
    ),
)
