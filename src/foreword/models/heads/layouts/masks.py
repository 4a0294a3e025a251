"""Tokens that stand for those that are not known yet."""

from collections.abc import Mapping

from foreword.errors import CheckpointError
from foreword.models.formats.fields import ConfigFields


def mask_token(fields: ConfigFields, vocab: int) -> int:
    """The id that stands for unknown tokens, wherever the config has it."""
    section = fields.get("dflash_config")
    nested = ConfigFields(section if isinstance(section, Mapping) else {}, fields.origin)
    for place, key in (
        (nested, "mask_token_id"),
        (fields, "mask_token_id"),
        (fields, "pard_token"),
        (fields, "ptd_token_id"),
    ):
        token = place.get(key)
        if token is None:
            continue
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise place.malformed(key, f"a token of the {vocab} that there are")
        return token
    raise CheckpointError(f"{fields.origin}: mask_token_id is missing; get the head again")
