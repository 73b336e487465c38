# ruff: noqa: E501 - a line is a template
"""Constructs of Jinja2, each line a template for messages; the last ones are refused."""

CONSTRUCTS = """
{{ 'abc'[-1] }}{{ 'abc'[0] }}{{ 'abc'[1:] }}{{ 'abcdef'[::-2] }}{{ [1,2,3][:-1] }}
{{ 'a' and 'b' }}{{ '' or 'c' }}{{ not 'a' }}{{ none and 1 }}
{{ '\\u00e9\\x3c\\t' }}{{ "a\\"b" }}{{ 'a\\'b' }}{{ 'a' 'b' }}
{{ 1.0 | string }} {{ 'a' ~ 2.0 }} {{ 1e3 }} {{ 7 / 2 }} {{ 7 // 2 }} {{ -7 % 3 }} {{ 2 ** 10 }} {{ 1_000 }} {{ 0x1f }}
{{ [none, true, 'a', {'b': 1.5}] }}|{{ none }}|{{ {'a': 'it\\'s'} }}|{{ (1, 'a') }}|{{ () }}
{{ none | default('x') }}{{ undefined_name | default('x') }}{{ '' | default('x', true) }}{{ '' | d('y', boolean=true) }}
{{ 'éß' | upper }}{{ 'ÀB' | lower }}{{ 'éa bc-d' | title }}{{ 'élan VITAL' | capitalize }}
[{{ '\u3000a\u00a0' | trim }}][{{ 'xxaxx' | trim('x') }}]
{% raw %}{{ x }}{% endraw %}
{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}
{{ 1 < 2 < 3 }}{{ 3 > 2 != 1 }}{{ 'a' in 'abc' }}{{ 'd' not in ['a'] }}
{{ messages | reverse | map(attribute='role') | join(',') }}{{ messages | map(attribute='content') | list }}
{{ 'a-b-c'.rsplit('-', 1)[0] }}{{ 'a b'.split() }}{{ 'a\\nb'.splitlines() }}{{ 'a=b'.partition('=') }}
{{ 2.56 | round(1) }}{{ 2.5 | round }}{{ 2.1 | round(0, 'ceil') | int }}{{ '3' | int + 1 }}{{ 'x' | int(7) }}{{ '1.5' | float }}
{% for g in messages | groupby('role') %}{{ g.grouper }}{{ g.list | length }}{% endfor %}
{% for role, items in messages | groupby('role') %}{{ role }}{% endfor %}
{{ {'b': 1, 'a': 'é<>&'} | tojson }}{{ {'b': 1, 'a': [1]} | tojson(indent=2) }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}
{{ ['é'] | tojson(ensure_ascii=true) }}{{ [1, 2] | tojson(separators=(',', ':')) }}{{ 1.0 | tojson }}{{ none | tojson }}
{% set ns = namespace(n=0, found=false) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}
{% set n = 0 %}{% for m in messages %}{% set n = n + 1 %}{% endfor %}{{ n }}
{% for m in messages %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{% endfor %}
{% for m in messages %}{{ loop.cycle('a', 'b') }}{{ loop.previtem.role if loop.previtem }}{{ loop.nextitem.role }}{{ loop.changed(m.role) }}{% endfor %}
{% for m in messages if m.role == 'user' %}{{ loop.length }}{% else %}none{% endfor %}
{% for m in [] %}x{% else %}none{% endfor %}{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}
{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}{% for i in range(8, 0, -3) %}{{ i }}{% endfor %}
{% macro m(a, b='x') %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1) }}{{ m(1, 2, 3, c=4) }}
{% macro w(n) %}<{{ caller(n) }}>{% endmacro %}{% call(n) w(3) %}in {{ n }}{% endcall %}{{ w.name }}{{ w.arguments }}
{% set block %} a {{ 1 }} {% endset %}[{{ block }}][{{ block | trim }}]{% set up | upper %}x{% endset %}{{ up }}
{% filter upper %}abc{% endfilter %}{% filter replace('a', 'b') %}aaa{% endfilter %}
  {%- if true -%}  trimmed  {%- endif %}
    {% if true %}
    kept
    {% endif %}
    {%+ if true %}plus{% endif +%}
after
{# a comment #}{#- another -#}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages | rejectattr('role', 'eq', 'user') | list }}
{{ [1, 2, 3, 4] | select('odd') | list }}{{ [0, 1, '', 'a'] | select | list }}{{ [1, 2, 3] | reject('divisibleby', 2) | list }}
{{ [1, 2, 2, 'A', 'a'] | unique | list }}{{ [1, 2, 3, 4, 5] | batch(2, 'x') | list }}{{ [1, 2, 3, 4, 5] | slice(2) | list }}
{{ ['b', 'A', 'c'] | sort }}{{ ['b', 'A'] | sort(case_sensitive=true) }}{{ messages | sort(attribute='content', reverse=true) | map(attribute='role') | join }}
{{ [3, 1, 2] | min }}{{ [3, 1, 2] | max }}{{ [1, 2] | sum }}{{ [{'a': 2}] | sum(attribute='a', start=1) }}{{ [[1], [2]] | sum(start=[]) }}
{{ [1, 2] | first }}{{ [1, 2] | last }}{{ 'ab' | list }}{{ 'ab' | length }}{{ {'a': 1} | length }}{{ [1, 2] | random in [1, 2] }}
{{ 'a' is string }}{{ 1 is number }}{{ 1 is integer }}{{ 1.0 is float }}{{ true is boolean }}{{ none is none }}{{ {} is mapping }}{{ 'a' is iterable }}{{ [] is sequence }}
{{ x is defined }}{{ x is undefined }}{{ 'a' is in 'ab' }}{{ 1 is eq 1 }}{{ 2 is gt 1 }}{{ 'a' is lower }}{{ m is callable }}{{ 3 is odd }}{{ true is true }}{{ 'upper' is filter }}{{ 'odd' is test }}{{ 1 is sameas 1 }}
{{ {'a': 1}.get('b', 2) }}{{ {'a': 1}.items() | list }}{{ {'a': 1}.keys() | list }}{{ {'a': 1}.values() | list }}{{ {'b': 1, 'a': 2} | dictsort }}{{ {'a': 1} | items | list }}{{ dict(a=1) }}
{{ 'abc'.startswith('ab') }}{{ 'abc'.endswith(('x', 'c')) }}{{ 'abc'.find('c') }}{{ 'aXbX'.replace('X', '-', 1) }}{{ 'abc'.index('b') }}{{ 'a,b'.count(',') }}{{ ' a '.strip() }}{{ 'xay'.lstrip('x').rstrip('y') }}
{{ 'abc'.upper() }}{{ 'é'.capitalize() }}{{ 'a b'.title() }}{{ 'Ab'.swapcase() }}{{ '12'.isdigit() }}{{ 'a'.isalpha() }}{{ '-'.join(['a', 'b']) }}{{ 'a'.center(5) }}{{ '7'.zfill(3) }}{{ 'prefix'.removeprefix('pre') }}
{{ '{} {b}'.format(1, b=2) }}{{ '{:>5}|{:.2f}'.format('a', 2) }}{{ '%s-%03d' % ('a', 7) }}{{ '%s' | format('x') }}{{ '%.1f%%' % 12.34 }}
{{ 'a' if false }}{{ 'a' if false else 'b' }}{{ (1 if true else 2) + 1 }}{{ [1, 2] + [3] }}{{ 'ab' * 3 }}{{ [0] * 2 }}{{ 'a' + 'b' }}
{{ undefined_name }}{{ messages[0].missing }}{{ messages[0]['missing'] }}{{ messages[9] }}{{ tools is none }}{{ documents is none }}{{ bos_token }}{{ unk_token is defined }}
{{ 'a b c' | wordcount }}{{ 'abcdef' | truncate(5, true, '…', 0) }}{{ 'a\\nb' | indent(2) }}{{ 'a\\nb' | indent('>', first=true) }}{{ '<a>' | e }}{{ '<a>' | escape | upper }}{{ '<a>' | safe }}{{ 'aa' | replace('a', 'b', 1) }}{{ 'a' | center(5) }}{{ -1 | abs }}{{ 'ab' | reverse }}
{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}={{ v }}{{ ', ' if not loop.last }}{% endfor %}{% for (a, b), c in [((1, 2), 3)] %}{{ a + b + c }}{% endfor %}
{% for a in [[1, [2]], 3] recursive %}{% if a is number %}{{ a }}{% else %}({{ loop(a) }}){{ loop.depth }}{% endif %}{% endfor %}
{% set a, b = 1, 2 %}{{ b }}{{ a }}{% set c = [1, 2] %}{{ c }}{% set x = cycler('a', 'b') %}{{ x.next() }}{{ x.current }}{{ x.next() }}{% set j = joiner(', ') %}{{ j() }}{{ j() }}
{% generation %}learned {{ 1 }}{% endgeneration %}{%- generation -%} b {%- endgeneration -%}
{% block part %}in a block{% endblock %}{{ self.part() }}
{{ raise_exception('no') if false }}{{ strftime_now('%Y') | length }}{{ '日本'[1] }}{{ 'é' | length }}{{ '\U0001f642' | list }}
{{ messages | tojson }}{{ messages | map('tojson') | join('\\n') }}{{ messages | length > 1 }}{{ messages[-1]['role'] }}{{ messages[1:] | length }}{{ loop is defined }}
{{ [1, [2, [3]]] | string }}{{ [] | first is defined }}{{ 5 | string | length }}{{ ['a'] | join | upper ~ 'b' }}{{ 'a' ~ none ~ true ~ 1 }}{{ {} or 'empty' }}{{ 10 // 3 * 3 + 1 }}{{ -2 ** 2 }}{{ 'a' == 'a' and 1 != 2 or false }}
{{ raise_exception('refused ' ~ 1) }}
{{ 1 / 0 }}
{{ undefined_name.attribute }}
{{ none + 1 }}
{{ 'a' | no_such_filter }}
{% if %}
{{ x
{% include 'other' %}
{{ ''.__class__.__mro__ }}
{{ messages.append(1) }}
{{ messages[0].update({'a': 1}) }}
{{ 'a'.join([1]) }}
{{ namespace.__init__.__globals__ }}
{{ ''['format'].__globals__ }}
""".strip("\n").split("\n")
