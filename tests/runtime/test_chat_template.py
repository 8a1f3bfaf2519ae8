"""Chat templates: transformers' output for honest ones, a quick and small end for hostile ones."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotc.errors import RequestError
from aotc.frontend.gguf import open_gguf
from aotc.runtime.chat_template import MAX_TEMPLATE, ChatTemplate

USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: Any = USER, **arguments: Any) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **arguments)


# --- honest templates ---

# Short templates in the manners of published ones: ChatML, Llama 3.1's tools, Qwen 3's thinking, Mistral's checks,
# Hermes' macros, and the tags of training.
HONEST = {
    "chatml": """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}
{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "tools": """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "Today: " + date_string + "\\n\\n" }}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<' + message['role'] + '>' + message['content'] | trim + '<eot>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call only") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- tool_call.name + "(" }}{%- for name, value in tool_call.arguments | items %}
        {{- name + '="' ~ value ~ '"' }}{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}{{- ")" }}
    {%- else %}{{- message.content | tojson }}{%- endif %}
{%- endfor %}""",
    "thinking": """{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.reasoning_content is string %}{{ message.reasoning_content }}
    {%- elif '</think>' in message.content %}
        {{- message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') }}
    {%- endif %}[{{ loop.index0 > ns.last }} {{ loop.previtem.role if loop.previtem is defined }}]
    {{- message.content.split('</think>')[-1].strip() }}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>' }}{%- endif %}""",
    "checks": """{%- set loop_messages = messages | rejectattr("role", "equalto", "system") | list %}
{%- for message in loop_messages %}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception("roles must alternate") }}{%- endif %}
{%- if message.role == "user" %}{{- "[INST] " + message["content"] + "[/INST]" }}
{%- else %}{{- " " + message["content"] | trim + eos_token }}{%- endif %}{%- endfor %}
{{- loop_messages | map(attribute="role") | map("upper") | unique | join(", ") }}""",
    "macros": """{%- macro to_type(spec) -%}{%- set basic = {"string": "str", "number": "float"} -%}
{%- if basic[spec.type] is defined -%}{{ basic[spec.type] }}{%- elif spec.type == "array" -%}
list[{{ to_type(spec["items"]) if spec["items"] is mapping else "Any" }}]{%- elif spec.type is iterable
    and spec.type is not string -%}
{%- for t in spec.type -%}{{ to_type({"type": t}) }}{% if not loop.last %}|{% endif %}{%- endfor -%}
{%- else -%}{{ spec.type|capitalize|default("Any", true) }}{%- endif -%}{%- endmacro -%}
{%- for tool in tools or [] -%}{{ tool.function.name }}(
{%- for name, spec in tool.function.parameters.properties.items() -%}{{ name }}: {{ to_type(spec) }}
{%- if spec.enum %} in ({{ spec.enum|join('" | "') }}){% endif %}{% if not loop.last %}, {% endif %}
{%- endfor -%}){{ tool.function | tojson(sort_keys=true, separators=(",", ":")) }}
{%- endfor -%}{%- set block -%}{{ messages[-1].content.replace("i", "o") }}{%- endset -%}{{ block * 2 }}""",
    "tags": """{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}
{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}{{ 7 // 2 }} {{ 7 % 4 }} {{ -3 * 2 }} {{ 1.5 }} {{ none }}
{{ [1, "a", {"b": (2, true)}] }} {{ range(3)|list }} {{ 'x' ~ 1 }} {{ "a" if false }} {{ dict(a=1).a }}
{% for k, v in {"b": 1, "a": 2}|dictsort %}{{ k }}{{ v }}{% endfor %}{{ "a,b"|replace(",", ";")|title }}
{{ "12"|int + 1 }} {{ [3, 1]|sort|first }} {{ "abc"|reverse }} {{ "é"|tojson }} {{ 3 is odd }} {{ [1,2,3]|last }}""",
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string"},
                    "days": {"type": "array", "items": {"type": "number"}},
                    "unit": {"type": ["string", "number"], "enum": ["°C", "°F"]},
                    "deep": {"type": "object"},
                },
            },
        },
    }
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Köln", "days": 2}}}
CHATS: list[dict[str, Any]] = [
    {"messages": USER},
    {"messages": USER, "add_generation_prompt": False, "enable_thinking": False},
    {
        "messages": [
            {"role": "system", "content": " Be brief. "},
            {"role": "user", "content": "Hi <b>&amp;"},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello "},
            {"role": "user", "content": "日本"},
        ],
        "tools": TOOLS,
    },
    {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": '{"t": 3}'},
        ],
        "tools": TOOLS,
        "enable_thinking": True,
    },
]


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("chat", range(len(CHATS)))
def test_honest_templates_render_as_in_transformers(name: str, chat: int) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source, arguments = HONEST[name], dict(CHATS[chat])
    messages = arguments.pop("messages")
    theirs = {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"} | arguments
    try:
        expected = render_jinja_template([messages], chat_template=source, **theirs)[0][0]
    except jinja2.TemplateError as error:
        with pytest.raises(RequestError, match=str(error)):
            render(source, messages, **arguments)
    else:
        assert render(source, messages, **arguments) == expected


def test_the_template_of_a_real_model(smollm2_gguf: Path) -> None:
    source = open_gguf(smollm2_gguf).chat_template
    assert source is not None
    assert render(source, [{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_date_is_todays() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == datetime.now().strftime("%d %b %Y")


def test_a_long_conversation_is_no_attack() -> None:
    messages = [{"role": "user", "content": "word " * 2000}, {"role": "assistant", "content": "x" * 500}] * 150
    assert len(render(HONEST["chatml"], messages)) > 1_500_000
    assert len(render(HONEST["thinking"], messages)) > 1_500_000


@given(st.text())
def test_content_is_data_and_no_template(content: str) -> None:
    content += "{{ messages }}{% for x in y %}"
    assert render("{{ messages[0].content }}", [{"role": "user", "content": content}]) == content


# --- messages and arguments ---


def test_content_parts_are_joined_and_empty_keys_dropped() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts, "name": None, "refusal": None, "annotations": [], "tool_calls": None}
    assert render("{{ messages | tojson }}", [message]) == '[{"role": "user", "content": "a\\nb"}]'


def test_arguments_of_tool_calls_become_mappings() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert render("{{ messages[0].tool_calls[0].function.arguments.a[0] + 1 }}", [message]) == "2"
    assert call["function"]["arguments"] == '{"a": [1]}'


WRONG_MESSAGES = [
    [], None, "Hi", {}, [None], ["Hi"], [{}], [{"role": "user"}], [{"role": 1, "content": ""}],
    [{"role": "", "content": ""}], [{"role": "r" * 65, "content": ""}], [{"role": "user", "content": None}],
    [{"role": "user", "content": 3}], [{"role": "user", "content": {"type": "text", "text": ""}}],
    [{"role": "user", "content": ["text"]}], [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
    [{"role": "user", "content": [{"type": "text", "text": 1}]}], [{"role": "user", "content": "", "evil": 1}],
    [{"role": "user", "content": "", "name": 1}], [{"role": "assistant", "tool_calls": {"a": 1}}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": object()}}}]}],
    [{"role": "user", "content": "x" * 4_000_001}],
]  # fmt: skip


@pytest.mark.parametrize("messages", WRONG_MESSAGES, ids=range(len(WRONG_MESSAGES)))
def test_messages_of_another_form_are_refused(messages: Any) -> None:
    with pytest.raises(RequestError, match="^messages") as refused:
        render("{{ messages }}", messages)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 200


NESTED: Any = []
for _ in range(100):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    "arguments",
    [
        {"chat_template": "{{ 1 }}"}, {"self": 1}, {"__class__": 1}, {"bos_token": "x"}, {"tools": "x"},
        {"tools": [1]}, {"tools": [{"a": NESTED}]}, {"tools": [{"a": 10**100}]}, {"documents": {}},
        {"enable_thinking": "yes"}, {"add_generation_prompt": None}, {"tools": [dict.fromkeys(range(200_000))]},
    ],
)  # fmt: skip
def test_only_known_arguments_reach_the_template(arguments: dict[str, Any]) -> None:
    name = next(iter(arguments))
    if name == "self":
        arguments = {"messages_": 1}
    with pytest.raises(RequestError, match=name if name != "self" else "messages_"):
        render("{{ messages }}", **arguments)


# --- hostile templates ---

BIG = "{% set s = 'a' * 1000000 %}"
MANY = "{% set l = range(100000)|list %}"
HOSTILE = {
    # ways to Python
    "class": "{{ ''.__class__ }}",
    "class by key": "{{ ''['__class__']['mro']() }}",
    "class by filter": "{{ ''|attr('__class__') }}",
    "class by map": "{{ ['']|map(attribute='__class__')|list|first }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "macro by map": "{% macro m() %}{% endmacro %}{{ [m]|map(attribute='__init__')|list }}",
    "function": "{{ raise_exception.__globals__ }}",
    "cycler": "{{ cycler.__init__.__globals__ }}",
    "lipsum": "{{ lipsum(n=10000) }}",
    "self": "{{ self._TemplateReference__context }}",
    "self printed": "{{ self }}",
    "format": "{{ '{0.__class__}'.format(1) }}",
    "format_map": "{{ '{a}'.format_map({'a': 1}) }}",
    "format by map": "{{ ['{0.__class__}']|map('format', 1)|list }}",
    "percent": "{{ '%0999999999d' % 1 }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "extends": "{% extends 'x' %}",
    "block": "{% block x %}{% endblock %}",
    "autoescape": "{% autoescape true %}{{ 'a' * 10 }}{% endautoescape %}",
    "append": "{{ messages.append(1) }}",
    "update": "{{ messages[0].update({'role': 1}) }}",
    "dict method": "{{ {}.fromkeys(range(9)) }}",
    "namespace printed": "{% set n = namespace() %}{{ n }}",
    "undefined filter": "{{ 1|no_such_filter }}",
    "undefined test": "{{ 1 is no_such_test }}",
    "generator": "{{ messages|map('upper') }}",
    # ways to a hang
    "range": "{% for i in range(1000000000) %}{% endfor %}",
    "wide range": "{{ range(1000000000) }}",
    "range as list": "{{ range(1000000000)|list }}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that write": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "loops that filter": MANY + "{% for a in l %}{% for b in l if false %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for a in [[1]] recursive %}{{ loop(a) }}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "exponential recursion": "{% macro f(n) %}{% if n %}{% set x = f(n-1) ~ f(n-1) %}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "call blocks": "{% macro f(n) %}{% set c = caller %}{% if n %}{% call f(n-1) %}{% endcall %}"
    "{% call f(n-1) %}{% endcall %}{% endif %}{% endmacro %}{% call f(60) %}{% endcall %}",
    "power": "{{ 10 ** 10 ** 10 }}",
    "factorial": "{% set n = namespace(x=1) %}{% for i in range(1, 99999) %}{% set n.x = n.x * i %}{% endfor %}",
    "big integer": "{{ ('f' * 1000000)|int(0, 16) // 7 }}",
    "round": "{{ 1|round(1000000000) }}",
    "compare": "{% set n = namespace(a=[0], b=[0]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}"
    "{% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a == n.b }}",
    "compare often": MANY + "{% set m = range(100000)|list %}" + "{% set x = l == m %}" * 2500,
    "strings in a list": "{% set s = 'a' * 1000000 + 'b' %}{% set t = 'a' * 1000000 + 'c' %}{{ t in [s] * 100000 }}",
    "hash": "{% set n = namespace(a=(0,)) %}{% for i in range(60) %}{% set n.a = (n.a, n.a) %}{% endfor %}"
    "{{ {n.a: 1} }}",
    "strip": "{{ ('a' * 2000000).strip('b' * 1000000 ~ 'a') }}",
    "trim": "{{ ('a' * 2000000)|trim('b' * 1000000 ~ 'a') }}",
    "rfind": "{{ ('a' * 3000000).rfind('a' * 1000000 ~ 'b' ~ 'a' * 100000) }}",
    "map chain": "{{ range(100000)|" + "map('string')|" * 3000 + "list }}",
    "attribute chain": "{{ ([{}] * 100000)|" + "map(attribute='a')|" * 3000 + "list }}",
    "sort": "{% for i in range(99999) %}{% set x = range(99999)|sort %}{% endfor %}",
    # ways to fill the memory
    "repeat": "{{ 'a' * 1000000000 }}",
    "repeat a list": "{{ [1] * 1000000000 }}",
    "repeat in steps": BIG + "{{ s * 1000 * 1000 }}",
    "double": "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "double by tilde": "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "double a list": "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "double a block": "{% set s %}ab{% endset %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 60,
    "double a dict": "{% set n = namespace(s={}) %}{% for i in range(60) %}{% set n.s = {1: n.s, 2: n.s} %}{% endfor %}"
    "{{ n.s }}",
    "namespaces in namespaces": "{% set n = namespace(a=[0]) %}{% for i in range(60) %}"
    "{% set m = namespace(a=[n, n]) %}{% set n.a = m %}{% endfor %}{{ n|upper }}",
    "many literals": BIG + "{% set n = namespace(l=[]) %}{% for i in range(9999) %}{% set n.l = [n.l, s ~ i] %}"
    "{% endfor %}",
    "same text": BIG + "{{ [s, s, s, s, s, s, s, s] }}",
    "join": BIG + "{{ range(100000)|join(s) }}",
    "join method": BIG + "{{ s.join(range(100000)|map('string')) }}",
    "replace": BIG + "{{ s|replace('', s) }}",
    "replace method": BIG + "{{ s.replace('a', s) }}",
    "center": "{{ 'a'.center(1000000000) }}",
    "zfill": "{{ 'a'.zfill(1000000000) }}",
    "expandtabs": "{{ '\\t'.expandtabs(1000000000) }}",
    "indent": "{{ 'a\\nb'|indent(1000000000) }}",
    "batch": "{{ [1]|batch(1000000000, 0)|list }}",
    "split": "{% for i in range(99) %}{% set x = ('a ' * 2000000).split() %}{% endfor %}",
    "split often": "{% set n = namespace() %}" + "{% set n.a%d = (' a' * 90000).split(' ') %}" * 500,
    "title": "{% for i in range(99) %}{% set x = ('a b' * 1000000)|title %}{% endfor %}",
    "float": "{% for i in range(999) %}{% set x = ('9' * 4000000)|float %}{% endfor %}",
    "list of characters": "{{ ('a' * 4000000)|list }}",
    "tojson": "{% set n = namespace(l=[]) %}{% for i in range(63) %}{% set n.l = [n.l, n.l, 1] %}{% endfor %}"
    "{{ n.l|tojson }}",
    "tojson indent": MANY + "{{ l|tojson(indent=1000000000) }}",
    "tojson separators": BIG + MANY + "{{ l|tojson(separators=(s, s)) }}",
    "output": BIG + "{% for i in range(99) %}{{ s }}{% endfor %}",
    "output of a macro": BIG + "{% macro m() %}{% for i in range(9999) %}{{ s }}{% endfor %}{% endmacro %}"
    "{% set x = m() %}",
    "text of a macro": "{% macro m() %}{% for i in range(99999) %}" + "x" * 50000 + "{% endfor %}{% endmacro %}"
    "{% set x = m() %}",
    "filter block": BIG + "{% filter upper %}{% for i in range(9999) %}{{ s }}{% endfor %}{% endfilter %}",
    "date": "{{ strftime_now('%0999999999d') }}",
    "long date": "{{ strftime_now('%c' * 1000000) }}",
    "message": BIG + "{{ raise_exception(s * 3) }}",
    # ways to break the compiler
    "too long": "x" * (MAX_TEMPLATE + 1),
    "deep": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "not": "{{ " + "not " * 15000 + "1 }}",
    "sums": "{{ " + "1+" * 30000 + "1 }}",
    "deep loops": "{% for a in [1] %}" * 60 + "{% endfor %}" * 60,
    "open comment": "{#" * 30000,
    "open tags": "{{" * 30000,
    "lists": "{{ " + "[" * 30000 + " }}",
    "unclosed": "{% for x in messages %}",
    "constant": "{{ 'a'|replace('', 'b' * 100000)|replace('', 'c' * 100000) }}",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_soon_with_one_line(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()  # a busy machine is not the template's fault
    with pytest.raises(RequestError) as refused:
        ChatTemplate(HOSTILE[name].replace("%d", "1"), max_seconds=0.3).render(USER)
    assert time.process_time() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000  # KiB
    message = str(refused.value)
    assert "\n" not in message and " at 0x" not in message and len(message) < 400


def test_a_slow_template_is_stopped_at_its_deadline() -> None:
    template = ChatTemplate(HOSTILE["nested loops"], max_seconds=0.1)
    for _ in range(2):  # and can be tried again
        start = time.monotonic()
        with pytest.raises(RequestError, match=r"not done after 0\.1 s"):
            template.render(USER)
        assert 0.1 <= time.monotonic() - start < 1


def test_output_is_capped() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ messages[0].content }}", max_chars=100)
    assert template.render([{"role": "user", "content": "x" * 50}]) == "x" * 100
    with pytest.raises(RequestError, match="longer than 100 characters"):
        template.render([{"role": "user", "content": "x" * 51}])


def test_jinja_is_imported_on_the_first_render_only() -> None:
    code = "import sys; from aotc.runtime.chat_template import ChatTemplate; ChatTemplate('x'); " \
        "assert 'jinja2' not in sys.modules"  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True)
