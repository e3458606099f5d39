"""Chat templates that attack: whatever one does, its row (or the start) fails by name, soon, and nothing else does."""

from __future__ import annotations

import os
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from kv_common.errors import ConfigError, RequestError
from maxtext_paged.chat_template import MAX_SOURCE_CHARACTERS, ChatTemplate
from maxtext_paged.template_process import Limits, TemplateRenderer

CHAT = [{"role": "user", "content": "hello"}]
GOOD = "{{ messages[0].content }}"
BOUND_SECONDS = 30
"""Of a loaded machine; the limits below are half a second of processor time and 10 s of any."""


@pytest.fixture(scope="module")
def renderer() -> Any:
    renderer = TemplateRenderer(Limits(cpu_seconds=0.5, wall_seconds=10, memory_bytes=2**28, max_characters=10**6))
    yield renderer
    renderer.close()


@pytest.fixture(scope="module")
def patient_renderer() -> Any:
    """Of the same memory and more time: touching it takes a busy machine longer than half a second."""
    renderer = TemplateRenderer(Limits(cpu_seconds=20, wall_seconds=20, memory_bytes=2**28, max_characters=10**6))
    yield renderer
    renderer.close()


def render(renderer: TemplateRenderer, source: str, messages: Any = None) -> str:
    return ChatTemplate(source, {}, renderer=renderer).render(messages or CHAT)


TIME = "processor time"
MEMORY = "memory|process that renders"
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
ENDS = "{% endfor %}" * 3


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (LOOP + ENDS, TIME),
        (LOOP + "{{ i }}" + ENDS, f"{TIME}|{MEMORY}"),
        ("{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}", "recurses too deeply"),
        ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}", TIME),
        ("{{ (7 * messages | length) ** 40353607 }}", f"{TIME}|{MEMORY}|4300 digits"),
        ("{{ range(10**9) | list }}", "Range too big"),
        ("{{ 'a' * 10**7 }}", "longer than 1000000 characters"),
        ("{{ lipsum(n=10**6) }}", "undefined"),
    ],
)
def test_what_takes_too_much_fails_its_row_within_a_bound(renderer: TemplateRenderer, source: str, said: str) -> None:
    started = time.monotonic()
    with pytest.raises(RequestError, match=f"the chat template refuses these messages: .*({said})"):
        render(renderer, source)
    assert time.monotonic() - started < BOUND_SECONDS
    assert render(renderer, GOOD) == "hello", "the next row is served"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}",
        "{{ [0] * 10**9 }}",
        "{{ 'a' | center(10**9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{{ {} | tojson(indent=10**9) }}{{ [[[1]]] | tojson(indent=10**9) }}",
    ],
)
def test_what_takes_too_much_memory_fails_its_row_within_a_bound(patient_renderer: Any, source: str) -> None:
    started = time.monotonic()
    with pytest.raises(RequestError, match=f"the chat template refuses these messages: .*({MEMORY})"):
        render(patient_renderer, source)
    assert time.monotonic() - started < BOUND_SECONDS
    assert render(patient_renderer, GOOD) == "hello", "the next row is served"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ self._TemplateReference__context.environment.globals }}",
        "{{ raise_exception.__globals__['sys'] }}",
        "{{ strftime_now.__closure__ }}{{ strftime_now.__globals__['sys'].exit() }}",
        "{{ ''['__class__']['__base__']['__subclasses__']() }}",
        "{{ (''|attr('__class__')|attr('__base__')|attr('__subclasses__'))() }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ 'x'.format_map({}).__class__.__mro__[9] }}",
        "{{ [1] | map(attribute='__class__.__mro__') | list | first | first }}{{ 1/0 }}",
        "{{ (1).__reduce_ex__(2)() }}",
        "{{ messages | tojson(default=raise_exception) }}",
        "{% import 'os' as os %}",
        "{% include '/etc/hostname' %}",
        "{% extends '../../../etc/passwd' %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'other'}) }}",
    ],
)
def test_what_reaches_out_of_the_sandbox_fails_its_row(renderer: TemplateRenderer, source: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(RequestError):
        render(renderer, source, messages)
    assert messages == CHAT


def test_attributes_that_python_keeps_for_itself_read_as_nothing(renderer: TemplateRenderer) -> None:
    assert render(renderer, "{{ messages.__class__ }}{{ strftime_now.__globals__ }}{{ messages.__init__ }}") == ""


def test_a_message_is_data_whatever_it_says(renderer: TemplateRenderer) -> None:
    evil = "{{ 1 / 0 }}{% for x in range(99999999) %}{{ messages.__class__ }}\x00\x1b[2J\n\u2028🎉"
    assert render(renderer, GOOD, [{"role": "user", "content": evil}]) == evil


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "{% if x %}" * 3000 + "{% endif %}" * 3000,
        "{{ x" + "['a']" * 100_000 + " }}",
        "x" * (MAX_SOURCE_CHARACTERS + 1),
        "{{ 7 ** (7 ** 9) }}",
    ],
    ids=["syntax", "parentheses", "blocks", "subscripts", "long", "constant"],
)
def test_what_cannot_be_compiled_is_refused_at_the_start(renderer: TemplateRenderer, source: str) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError, match="the chat template"):
        ChatTemplate(source, {}, renderer=renderer)
    assert time.monotonic() - started < BOUND_SECONDS
    assert render(renderer, GOOD) == "hello"


def test_the_process_can_open_no_file_and_starts_no_other(renderer: TemplateRenderer) -> None:
    render(renderer, GOOD)
    assert renderer._child is not None
    limits = {
        line[:25].strip(): line[25:].split()[0]
        for line in Path(f"/proc/{renderer._child.pid}/limits").read_text().splitlines()
    }
    assert limits["Max open files"] == "3" and limits["Max file size"] == "0" and limits["Max processes"] == "0"
    assert int(limits["Max address space"]) == renderer.limits.memory_bytes
    environ = Path(f"/proc/{renderer._child.pid}/environ").read_bytes().split(b"\0")
    assert {entry.partition(b"=")[0] for entry in environ if entry} <= {b"PYTHONPATH", b"TZ", b"PATH"}


def test_a_process_that_was_killed_is_started_again(renderer: TemplateRenderer) -> None:
    assert render(renderer, GOOD) == "hello"
    assert renderer._child is not None
    renderer._child.kill()
    renderer._child.wait()
    assert render(renderer, GOOD) == "hello"


def test_a_process_that_hangs_is_given_up(renderer: TemplateRenderer) -> None:
    quick = TemplateRenderer(Limits(wall_seconds=1.0))
    try:
        quick.render(GOOD, {"messages": CHAT})
        assert quick._child is not None
        os.kill(quick._child.pid, 19)  # stopped: it uses no processor time
        with pytest.raises(RequestError, match="took more than 1 s"):
            quick.render(GOOD, {"messages": CHAT})
        quick.limits = Limits()
        assert quick.render(GOOD, {"messages": CHAT}) == "hello"
    finally:
        quick.close()


def test_threads_get_their_own_texts(renderer: TemplateRenderer) -> None:
    found: dict[int, str] = {}

    def work(number: int) -> None:
        for _ in range(20):
            found[number] = render(renderer, GOOD, [{"role": "user", "content": str(number)}])
            assert found[number] == str(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: str(number) for number in range(4)}


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # jax may run in this process; the child uses none of it
def test_a_fork_has_a_renderer_of_its_own(renderer: TemplateRenderer) -> None:
    assert renderer.render(GOOD, {"messages": CHAT}) == "hello"
    assert renderer._child is not None
    parents = renderer._child.pid
    child = os.fork()
    if not child:
        try:
            own = renderer.render(GOOD, {"messages": [{"content": "child"}]}) == "child"
            own = own and renderer._child.pid != parents
        except BaseException:
            own = False
        renderer.close()
        os._exit(0 if own else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert renderer.render(GOOD, {"messages": CHAT}) == "hello"
    assert renderer._child.pid == parents, "the fork left it alone"


def test_messages_that_are_no_plain_data_fail_their_row(renderer: TemplateRenderer) -> None:
    with pytest.raises(RequestError, match="not plain data"):
        render(renderer, GOOD, [{"role": "user", "content": "x", "extra": object()}])
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="not plain data"):
        render(renderer, GOOD, [{"role": "user", "content": "x", "extra": deep}])


def test_the_clock_is_the_callers(renderer: TemplateRenderer) -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2024, 7, 26), renderer=renderer)
    assert template.render(CHAT) == "26 Jul 2024"
