"""A character-level tokenizer for a model that starts from nothing."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL = ("<pad>", "<bos>", "<eos>")


def character_tokenizer(characters: str) -> Tokenizer:
    """One token a character, after pad, bos and eos; encoding puts bos first.

    Args:
        characters: Every character of the prompts and answers; a character outside them becomes `<pad>`.
    """
    vocab = {token: index for index, token in enumerate((*SPECIAL, *sorted(set(characters))))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=SPECIAL[0]))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[1]} $A", special_tokens=[(SPECIAL[1], 1)]
    )
    return tokenizer
