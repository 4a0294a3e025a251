"""Defects of the CPU backend: how weights are packed, batches read and models chosen for it."""

from catalogue import UNIT, Mutant

PACKING = f"{UNIT}/backends/test_packing.py"
RUNNER = f"{UNIT}/backends/test_model_runner.py"

CPU_BACKEND_MUTANTS = (
    Mutant(
        106,
        "a minimum of NaN in a block is not seen",
        "backends/cpu/packing.py",
        "has_finite_scales",
        "BLOCK_KINDS[stored.kind]",
        "BLOCK_KINDS[stored.kind][:1]",
        (PACKING,),
    ),
    Mutant(
        106,
        "blocks are kept only where all matrices of an input have them",
        "backends/cpu/packing.py",
        "MatrixPacker.matrices",
        "any",
        "all",
        (PACKING,),
    ),
    Mutant(
        106,
        "a matrix beside kept blocks reads a rotated input",
        "backends/cpu/packing.py",
        "MatrixPacker._matrix",
        "self._number_format.is_rotated and (not keeps_blocks)",
        "self._number_format.is_rotated",
        (PACKING,),
    ),
    Mutant(
        106,
        "blocks of any shape are read",
        "backends/cpu/packing.py",
        "MatrixPacker._blocks",
        "self._loader.check_shape(name, stored.shape)",
        "",
        (PACKING,),
    ),
    Mutant(
        106,
        "a rotated matrix has more scales than it needs",
        "backends/cpu/packing.py",
        "rotated_group_size",
        "-group",
        "group",
        (PACKING,),
    ),
    Mutant(
        107,
        "a token that could not be drawn is looked up in the embedding",
        "backends/batch.py",
        "known_ids",
        "drawn[(-1 - token_ids).clamp(min=0).long()].clamp(min=0)",
        "drawn[(-1 - token_ids).clamp(min=0).long()]",
        (RUNNER,),
    ),
    Mutant(
        107,
        "what the pass before has drawn is read one place late",
        "backends/batch.py",
        "known_ids",
        "-1 - token_ids",
        "-token_ids",
        (RUNNER,),
    ),
)
