"""Write gemma3-greedy.jsonl with numpy: an implementation without JAX, MaxText or this project's converter.

For:        making the expected greedy tokens again, as README.md beside this file says.
Not for:    the tests, which read its output. Text becomes ids through SentencePiece itself, over the file's own pieces.
May import: numpy, gguf, sentencepiece, tests.gemma3_numpy.

    python -m tests.data.make_gemma3_greedy MODEL.gguf [NAME ...] > tests/data/gemma3-greedy.jsonl
"""

from __future__ import annotations

import json
import sys

from gguf import GGUFReader, TokenType
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

from tests.gemma3_numpy import Gemma3Numpy

NUM_NEW_TOKENS = 24
BOS = 2

ALICE = (
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: "
    "once or twice she had peeped into the book her sister was reading, but it had no pictures or "
    "conversations in it, \u201cand what is the use of a book,\u201d thought Alice \u201cwithout pictures or "
    "conversations?\u201d\n"
)
ALICE_GOES_ON = (
    "So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy "
    "and stupid), whether the pleasure of making a daisy-chain would be worth the trouble of getting up and "
    "picking the daisies, when suddenly a White Rabbit with pink eyes ran close by her.\n"
    "There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear "
    "the Rabbit say to itself, \u201cOh dear! Oh dear! I shall be late!\u201d (when she thought it over "
    "afterwards, it occurred to her that she ought to have wondered at this, but at the time it all seemed "
    "quite natural); but when the Rabbit actually took a watch out of its waistcoat-pocket, and looked at it, "
    "and then hurried on, Alice started to her feet, for it flashed across her mind that she had never before "
    "seen a rabbit with either a waistcoat-pocket, or a watch to take out of it, and burning with curiosity, "
    "she ran across the field after it, and fortunately was just in time to see it pop down a large "
    "rabbit-hole under the hedge.\n"
    "In another moment down went Alice after it, never once considering how in the world she was to get out "
    "again.\n"
    "The rabbit-hole went straight on like a tunnel for some way, and then dipped suddenly down, so suddenly "
    "that Alice had not a moment to think about stopping herself before she found herself falling down a very "
    "deep well.\n"
    "Either the well was very deep, or she fell very slowly, for she had plenty of time as she went down to "
    "look about her and to wonder what was going to happen next. First, she tried to look down and make out "
    "what she was coming to, but it was too dark to see anything; then she looked at the sides of the well, "
    "and noticed that they were filled with cupboards and book-shelves; here and there she saw maps and "
    "pictures hung upon pegs. She took down a jar from one of the shelves as she passed; it was labelled "
    "\u201cORANGE MARMALADE\u201d, but to her great disappointment it was empty: she did not like to drop the "
    "jar for fear of killing somebody underneath, so managed to put it into one of the cupboards as she fell "
    "past it.\n"
)
TEXTS = {
    "alice": ALICE,
    "code": 'def quicksort(items):\n    """Sort a list by partitioning it around a pivot."""\n    if len(items) <= 1:\n'
    "        return items\n    pivot = items[len(items) // 2]\n",
    "window": ALICE + ALICE_GOES_ON,
}
"""Public domain. "window" is longer than the 512 tokens that a local layer sees."""


def load_tokenizer(reader: GGUFReader) -> SentencePieceProcessor:
    """SentencePiece over the file's pieces; runs of spaces, which llama.cpp keeps as such, under its own sign."""
    meta = {name: reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores", "token_type")}
    model = sentencepiece_model_pb2.ModelProto()
    for text, score, kind in zip(meta["tokens"], meta["scores"], meta["token_type"], strict=True):
        piece = model.pieces.add()
        piece.piece = text.replace(" ", "\u2581") if kind == TokenType.USER_DEFINED else text
        piece.score, piece.type = score, kind
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.byte_fallback = sentencepiece_model_pb2.TrainerSpec.BPE, True
    trainer.pad_id, trainer.eos_id, trainer.bos_id, trainer.unk_id = 0, 1, BOS, 3
    normalizer.name, normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces = "identity", False, False
    return SentencePieceProcessor(model_proto=model.SerializeToString())


def main() -> None:
    reader = GGUFReader(sys.argv[1])
    tokenizer, model = load_tokenizer(reader), Gemma3Numpy(reader)
    for name in sys.argv[2:] or TEXTS:
        text = TEXTS[name]
        prompt = [BOS, *tokenizer.encode(text)]
        new, margins = model.greedy(prompt, NUM_NEW_TOKENS)
        record = {
            "name": name,
            "prompt": prompt,
            "new": new,
            "margins": [round(margin, 5) for margin in margins],
            "prompt_text": text,
            "new_text": tokenizer.decode(new),
        }
        print(json.dumps(record, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
