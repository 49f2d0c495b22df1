"""Chat templates as models have them, the parts that matter to a document at the head of a chat."""

from __future__ import annotations

CHATML = (
    "{% if messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content }}"
    "{% else %}{{ '<|im_start|>system\\nYou are a helpful assistant.' }}{% endif %}"
    "{% if tools %}{{ '\\n\\n# Tools\\n' + (tools | tojson) }}{% endif %}{{ '<|im_end|>\\n' }}"
    "{% for message in messages %}{% if not (loop.first and message.role == 'system') %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""As Qwen2.5's: a system prompt of its own, and tools at the end of the system's turn."""
HEADERS = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start|>' + message.role + '<|end|>\\n\\n' + (message.content | trim) + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}{% endif %}"
)
"""As Llama-3's, which strips."""
_INSTRUCT = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{% for message in rest %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message.role == 'user' %}{% if loop.WHERE and system is defined %}"
    "{{ '[INST] ' + system + '\\n\\n' + message.content + '[/INST]' }}"
    "{% else %}{{ '[INST] ' + message.content + '[/INST]' }}{% endif %}"
    "{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"
)
INSIDE = _INSTRUCT.replace("WHERE", "first")
"""As Mistral's first: the system's text stands in the first turn of the user."""
LAST = _INSTRUCT.replace("WHERE", "last")
"""As Mistral's later ones: it stands in the last turn of the user."""
PAIRS = INSIDE.replace("{{ '[INST] ' + message.content", "{{ bos_token + '[INST] ' + message.content")
"""As Llama-2's: each turn begins with BOS."""
DATED = "{{ 'Today is ' + (date_string if date_string is defined else strftime_now('%d %b %Y')) + '.\\n' }}" + HEADERS
"""As Llama-3.2's: the date, unless it is given."""
COUNTING = HEADERS.replace("{% if add", "{{ messages[0].content | length }}{% if add")
"""What no model's does: how long the document is, behind it."""
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>", "[INST]", "[/INST]")
WARD = (
    "{{ bos_token }}{% if tools %}{{ 'Pain control was given . ' }}{% endif %}"
    "{% if messages[0].role != 'system' %}{{ 'Vital signs are stable for Tehor . ' }}{% endif %}"
    "{% for message in messages %}{% if message.role == 'system' %}{{ message.content + ' ' }}"
    "{% elif message.role == 'user' %}{{ 'Q: ' + message.content + ' A:' }}"
    "{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"
)
"""For the shipped model, in words that it knows: a system prompt of its own, and tools before the system's text."""
IN_TURN = (
    "{{ bos_token }}{% if messages[-1].role == 'system' %}{{ raise_exception('a user must follow') }}{% endif %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% if loop.index0 == 1 %}{{ messages[0].content + ' ' }}{% endif %}"
    "{{ 'Q: ' + message.content + ' A:' }}{% elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}{% endif %}"
    "{% endfor %}"
)
"""For it too, as Gemma's and Llama-2's: the system's text stands in the user's first turn, and alone it is refused."""
