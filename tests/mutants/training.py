"""Defects of `foreword train` that cost a user's files or a whole training."""

from catalogue import UNIT, Mutant

RUN = f"{UNIT}/train/loop/test_run.py"
OUTPUT = f"{UNIT}/train/loop/test_output.py"
COMMANDS = "tests/e2e/test_train_cli.py"
OF_ANOTHER = f"{COMMANDS}::test_texts_and_states_of_another_model_are_told"

TRAINING_MUTANTS = (
    Mutant(
        99,
        "a training replaces files that are not its own",
        "train/files.py",
        "require_run_directory",
        "_names(out) - {TEXTS, TRAINING}",
        "set()",
        (f"{RUN}::test_no_file_of_others_is_replaced",),
    ),
    Mutant(
        99,
        "--resume without a state begins anew",
        "train/files.py",
        "require_run_directory",
        "resume and (not state_in(out).exists())",
        "False",
        (f"{COMMANDS}::test_what_cannot_be_done_is_told",),
    ),
    Mutant(
        99,
        "pieces are written over what they are made of",
        "train/files.py",
        "require_export_directory",
        "export.resolve() == trained.resolve()",
        "False",
        (f"{OUTPUT}::test_pieces_go_where_nothing_else_is",),
    ),
    Mutant(
        99,
        "pieces are written among files of others",
        "train/files.py",
        "require_export_directory",
        "MANIFEST not in names or not all(re.fullmatch(piece, name) for name in names - {MANIFEST})",
        "MANIFEST not in names",
        (f"{OUTPUT}::test_pieces_go_where_nothing_else_is",),
    ),
    Mutant(
        99,
        "the same weights have another SHA-256 with every run",
        "train/files.py",
        "write_tensors",
        "_sort_metadata(partial)",
        "",
        (f"{OUTPUT}::test_the_same_weights_are_the_same_file",),
    ),
    Mutant(
        99,
        "shards do not say who wrote them",
        "train/texts/data.py",
        "_Shards.flush",
        "write_shard(self._directory, self._pending, self._model)",
        "write_shard(self._directory, self._pending)",
        (OF_ANOTHER,),
    ),
    Mutant(
        99,
        "a state of another model is resumed",
        "train/loop/run.py",
        "SavedTraining.check",
        "None not in (model, self.state.get('model')) and model != self.state['model']",
        "False",
        (OF_ANOTHER,),
    ),
)
