"""Defects of a GPU's kernels: sums in another order, parts that are left out."""

from catalogue import UNIT, Mutant

KERNELS = f"{UNIT}/backends/cuda/test_kernels.py"
PRODUCTS = f"{UNIT}/backends/cuda/test_products.py"
LAYOUT = f"{UNIT}/backends/cuda/test_layout.py"

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
)
