"""Megatron's way with data: text to tokens by Hugging Face's tokenizers and megatron-core's builder, and the first
sample of its GPTDataset.

    python -m bench.peers.megatron_data tokenize TEXT.jsonl TOKENIZER PREFIX
    python -m bench.peers.megatron_data first PREFIX SAMPLES SEQUENCE_LENGTH CACHE

Prints the seconds that it took after all was imported. Of torch megatron-core's data sets need a few names alone,
which `data/tests/fixtures/make.py` has.
"""

import importlib.util
import json
import os
import sys
import time
import types
from itertools import islice
from pathlib import Path

import numpy
import tokenizers

ROOT = Path(__file__).resolve().parents[2]


def megatron():
    found = importlib.util.find_spec("megatron")
    sys.path.append(str(ROOT / "data/tests/fixtures"))
    import make

    make.stand_in(Path(list(found.submodule_search_locations)[0]).parent)


def tokenize(text, tokenizer, prefix):
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    begin = time.perf_counter()
    tokenizer = tokenizers.Tokenizer.from_file(tokenizer)
    end = tokenizer.token_to_id("<|endoftext|>")
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=DType.optimal_dtype(tokenizer.get_vocab_size()))
    with open(text, encoding="utf-8") as lines:
        while some := list(islice(lines, 1000)):
            texts = [json.loads(line)["text"] for line in some]
            for made in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                tokens = made.ids + [end]
                builder.add_document(tokens, [len(tokens)])
    builder.finalize(prefix + ".idx")
    return begin, []


def first(prefix, samples, length, cache):
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    begin = time.perf_counter()
    tokenizer = types.SimpleNamespace(vocab_size=128000, eod=0, unique_identifiers={})
    config = GPTDatasetConfig(random_seed=1234, sequence_length=int(length), tokenizer=tokenizer, blend=([prefix], None), split="1",
                              reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, path_to_cache=cache)
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [int(samples), None, None], lambda: True, config).build()
    tokens, _ = train._query_document_sample_shuffle_indices(0)
    return begin, [int(t) for t in tokens[:8]]


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    megatron()
    begin, tokens = {"tokenize": tokenize, "first": first}[sys.argv[1]](*sys.argv[2:])
    print(time.perf_counter() - begin, "-", tokens)
