"""Chat templates are programs by strangers: useful ones render, hostile ones are stopped quickly and cheaply."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from slipstream.errors import CheckpointError, RequestError
from slipstream.models import chat_template
from slipstream.models.chat_template import ChatTemplate

MESSAGES = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "hi<b>"}]
USEFUL = {
    "{% for m in messages %}{{ m.role ~ ': ' ~ m['content'] | trim }};{% endfor %}": "system: Be brief.;user: hi<b>;",
    "{%- for m in messages[1:] -%}\n{{ loop.index }}/{{ loop.length }} {{ loop.last }}\n{%- endfor -%}": "1/1 True",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}": "2",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}": "user",
    "{{ {'a': 'é<', 'b': [1, none]} | tojson }}": '{"a": "é<", "b": [1, null]}',
    "{{ {'a': 1} | tojson(indent=2) }}": '{\n  "a": 1\n}',
    "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') + f(2) }}": "<a><2>",
    "{{ 'a</think>b'.split('</think>')[-1].lstrip('\\n') }}{{ '%s-%d' % ('x', 3) }}": "bx-3",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(',') }}": "hi<b>",
    "{% generation %}{{ messages[0]['content'][1:3] }}{% endgeneration %}": "Be",
    "{{ '{}={:>3}'.format('a', 1) }}{{ messages | length }}{{ missing is defined }}": "a=  12False",
    "    {% if true %}\nx\n    {% endif %}\n": "x\n",
    "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ [1, 2][::-1] }}": "a1[2, 1]",
    "{{ messages[0].get('nothing', 'other') }}{{ strftime_now('%Y') | length }}": "other4",
}
HOSTILE = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ raise_exception.__globals__.os }}",
    "{{ namespace.__init__.__globals__['os'].system('true') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format('') + cycler.__init__ }}",
    "{{ messages.append(1) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ lipsum(n=100000) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ loop.index }}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(64) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for x in [[[[]]]] recursive %}{{ loop([x, x]) }}{{ loop([x, x]) }}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * [1] }}",
    "{{ 10 ** 10 ** 10 }}",
    "{% set ns = namespace(n=3) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s|tojson }}",
    "{% set ns = namespace(s='a') %}{% for i in range(99999) %}{% set ns.s = ns.s.replace('a', 'aa') %}{% endfor %}",
    "{{ ('a' * 9999999).replace('a', 'a' * 9999999) }}",
    "{{ ('a' * 9999999) | replace('a', 'a' * 9999999) }}",
    "{{ ('a' * 99999).join('b' * 99999) }}",
    "{{ (['a'] * 99999) | join('b' * 99999) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 1000000000) }}",
    "{{ 'a'.ljust(10000000000) }}",
    "{{ 'a' | center(10000000000) }}",
    "{{ 'a\na' | indent(10000000000) }}",
    "{{ [1] | tojson(indent=1000000000) }}",
    "{{ (7).to_bytes(10000000000) }}",
    "{{ ['_loop'] | map('_loop', -99999999999) | list }}{{ 'a' * 10**10 }}",
    "{{ [1] | _loop(-99999999999) | list }}{{ 'a' * 10**10 }}",
    "{% set ns = namespace(l=[]) %}{% set s = 'a' * 999999 %}"
    "{% for i in range(99999) %}{% set ns.l = ns.l + [s[1:]] %}{% endfor %}",
    "{% set s %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endset %}{{ s | length }}",
    "{% macro m() %}" + "x" * 9999 + "{% endmacro %}{% set ns = namespace(s='') %}"
    "{% for i in range(99999) %}{% set ns.s = ns.s + m() %}{% endfor %}",
    "{{ ('a ' * 4999999).split() | length }}{{ ('a' * 9999999).split('a') | length }}",
    "{{ ('a' * 9999999) | list | length }}",
    "{% for i in ('a' * 9999999) | map('upper') %}{% endfor %}",
)


@pytest.mark.parametrize(("source", "expected"), USEFUL.items())
def test_useful_templates_render(source: str, expected: str) -> None:
    assert ChatTemplate(source).render({"messages": MESSAGES}) == expected


@pytest.mark.parametrize("source", HOSTILE)
def test_hostile_templates_are_stopped_in_little_time_and_memory(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_STEPS", 50_000)  # tracing memory makes each step slow
    tracemalloc.start()
    started = time.perf_counter()
    try:
        with pytest.raises((RequestError, CheckpointError)) as caught:
            ChatTemplate(source).render({"messages": MESSAGES})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - started < 10
    assert peak < 400e6
    assert "\n" not in str(caught.value)


def test_a_template_may_refuse_a_conversation() -> None:
    template = ChatTemplate("{{ raise_exception('Roles must alternate\nplease') }}")
    with pytest.raises(RequestError, match="refuses this conversation: Roles must alternate please"):
        template.render({"messages": MESSAGES})


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ a b }}", "{% nothing %}", "{{ x | nofilter }}", "(" * 9 + "{{ " + "(" * 5000]
)
def test_broken_templates_are_checkpoint_errors(source: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be compiled"):
        ChatTemplate(source)


def test_long_conversations_fit_the_budget() -> None:
    source = "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content | trim + '</s>' }}{% endfor %}"
    messages = [{"role": "user", "content": "word " * 2000}] * 1000  # 10 MB, a million tokens and more
    assert len(ChatTemplate(source).render({"messages": messages})) > 9_000_000
