"""A small tokenizer of the usual kind, and chat templates of the kinds that are about."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

WORDS = (
    "You are helpful. What is two plus two? It is four. user assistant system Hello there, hi! [INST] answer: yes no "
)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (  # the same, learning what CHATML's turns add: content, end of turn and line end
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_CONTENT = MARKED.replace("<|im_end|>\n{% endgeneration %}", "<|im_end|>{% endgeneration %}\n")
INST = (  # no header before the answer, a BOS, a refusal of anything but turns
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must take turns') }}{% endif %}"
    "{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
FORGETFUL = CHATML.replace(  # as those that keep the thoughts of the last answer only
    "{{ message.content }}",
    "{% if loop.last and message.role == 'assistant' %}(thought) {% endif %}{{ message.content }}",
)


def build_tokenizer(template: str | None = CHATML, *, bos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose merges are of `WORDS`; with `bos` it puts one before every text, as Llama's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS] * 20, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|im_end|>", chat_template=template
    )


def save_tokenizer(directory: Path, template: str | None = CHATML, *, bos: bool = False) -> PreTrainedTokenizerFast:
    """The same, in a directory."""
    tokenizer = build_tokenizer(template, bos=bos)
    tokenizer.save_pretrained(directory)
    return tokenizer
