"""Small models and tokenizers of transformers, saved on the spot."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from realrl.engine.buffers import FlatBuffer
from realrl.families.registry import model_tensors
from realrl.families.shape import Head
from realrl.huggingface import model_files
from realrl.huggingface.directory import read_origin

WORDS = ("the", "film", "is", "great", "dull", "and", "moving", "plot")
CHAT = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"


def make_tokenizer(directory: Path, special: dict[str, str], *, reserved: tuple[str, ...] = ()) -> Path:
    """A tokenizer of whole words whose special tokens come first: BOS 0, EOS 1, then `reserved` and the rest."""
    names = list(dict.fromkeys(["<s>", "</s>", *reserved, *special.values(), *WORDS]))
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        extra_special_tokens=list(reserved),
        **{"bos_token": "<s>", "eos_token": "</s>", **special},
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(str(directory))
    return directory


def make_model(directory: Path, **config: Any) -> Path:
    """A random language model of transformers beside the tokenizer that is in the directory already."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = {"vocab_size": 32, "num_key_value_heads": 2, "initializer_range": 0.3, **sizes, **config}
    LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(directory)
    return directory


def change_json(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file, which may not be there yet."""
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | changes))


def save_again(
    source: Path, directory: Path, head: Head = "lm", stop_token_ids: tuple[int, ...] = ()
) -> Path:
    """Open a model as a run does, and save it."""
    shape = model_files.read_shape(source)
    tensors = model_tensors(shape, head)
    buffer = FlatBuffer(tensors, torch.float32, "cpu")
    for name in model_files.load(source, shape, tensors, buffer):
        buffer[name].normal_(generator=torch.Generator().manual_seed(1))
    tokenizer = AutoTokenizer.from_pretrained(source)
    origin = read_origin(source)
    model_files.save(
        directory, shape, head, buffer, tokenizer, torch.float32, origin=origin, stop_token_ids=stop_token_ids
    )
    return directory
