"""The jinja2 environment that chat templates run in: sandboxed, immutable and metered.

A template comes with a checkpoint and its input comes from strangers, so neither may cost more than a bounded amount
of work. `chat_template` imports this module on first use (jinja2 costs tens of milliseconds of a launch) and nothing
else does. Every operation whose cost can grow (loops, calls, filters, joins, output) is charged to the `Budget` of
the render that runs it. Must never load another template, keep state between renders, or let a template reach a
method that is not listed here.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, Undefined, nodes, pass_context
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from janus_server.chat_budget import (
    SIZED,
    Budget,
    Exhausted,
    charge_join,
    charge_replace,
    check_format,
    check_power,
    check_product,
    written,
)

# Keys with a space cannot be written in a template's syntax, so a template can neither read nor replace what they hold.
BUDGET_KEY = "the budget"
_CHARGE, _WEIGH, _OPERAND, _CONCAT = "meter charge", "meter weigh", "meter operand", "meter concat"
_STR_METHODS = frozenset(
    "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric "
    "isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition "
    "rsplit rstrip split splitlines startswith strip swapcase title upper".split()
)
_DICT_METHODS = frozenset(("get", "items", "keys", "values"))
_LIST_METHODS = frozenset(("count", "index"))
_FILTERS = (
    "abs capitalize count d default dictsort e escape first float indent int items join last length list lower map max "
    "min reject rejectattr replace reverse safe select selectattr sort string title trim unique upper wordcount"
).split()
_TESTS = (
    "boolean defined divisibleby eq equalto == even false filter float ge >= greaterthan gt > in integer iterable le "
    "<= lessthan lower lt < mapping ne != none number odd sameas sequence string test true undefined upper"
).split()
_DEEP_FILTERS = frozenset(("string", "join", "sort", "unique", "min", "max", "escape", "e", "tojson", "dictsort"))


class RaisedByTemplate(TemplateError):
    """The template itself called raise_exception; the message is its author's."""


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """Jinja2 as chat templates expect it (trim_blocks, lstrip_blocks, break/continue, the generation tag), metered."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constant folding would run unmetered at compile time
            extensions=[LoopControlExtension, _GenerationTag],
            finalize=_finalize,
        )
        safe_range = self.globals["range"]
        self.globals = {
            "range": safe_range,
            "dict": dict,
            "namespace": _namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self.filters = {name: _metered(name, DEFAULT_FILTERS[name]) for name in _FILTERS}
        self.filters["tojson"] = _metered("tojson", _tojson)
        self.filters.update({_CHARGE: _charge, _WEIGH: _weigh, _OPERAND: _operand, _CONCAT: _concat})
        self.tests = {name: _metered_test(DEFAULT_TESTS[name]) for name in _TESTS}

    def build(self, source: str) -> Template:
        """Compile `source` with meters in it. Raises TemplateError, RecursionError, MemoryError or SyntaxError."""
        tree = _Meter().visit(self.parse(source))
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr.startswith("_"):
            return False
        if isinstance(obj, str):
            return attr in _STR_METHODS
        if isinstance(obj, dict):
            return attr in _DICT_METHODS
        if isinstance(obj, list | tuple):
            return attr in _LIST_METHODS
        return isinstance(obj, LoopContext | Namespace)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        if attribute.startswith("_"):
            raise SecurityError("a chat template may not read private attributes")
        return super().unsafe_undefined(obj, attribute)

    def wrap_str_format(self, value: Any) -> None:
        """No str.format: its widths make arbitrarily long strings."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(__context)
        budget.spend(1, 0)
        for value in (*args, *kwargs.values()):
            budget.charge(value)
        receiver = getattr(__obj, "__self__", None)
        if isinstance(receiver, str):
            budget.charge(receiver)
            if __obj.__name__ == "replace" and len(args) >= 2:
                charge_replace(budget, receiver, args[0], args[1])
            elif __obj.__name__ == "join" and len(args) == 1:
                args = (charge_join(budget, receiver, args[0]),)
        elif isinstance(receiver, list | tuple):
            budget.weigh(receiver)
        elif __obj is dict or __obj is _namespace:
            budget.weigh([*args, *kwargs.values()])
        result = super().call(__context, __obj, *args, **kwargs)
        budget.charge(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget(context)
        if operator == "+":
            budget.charge(left)
            budget.charge(right)
        elif operator == "*":
            check_product(budget, left, right)
        elif operator == "**":
            check_power(left, right)
        elif isinstance(left, str):
            check_format(budget, left, right)
        return super().call_binop(context, operator, left, right)


def _budget(context: Context) -> Budget:
    budget = context.parent[BUDGET_KEY]  # parent: what the render was called with; `set` writes elsewhere
    if not isinstance(budget, Budget):
        raise SecurityError("the render has no budget")
    return budget


# What replaces or wraps parts of a template


class _GenerationTag(Extension):
    """{% generation %} … {% endgeneration %} marks an assistant's words for training; here the body is just written."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 reads a plain class attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Meter(NodeTransformer):
    """Puts a charge wherever the compiled template would otherwise do work of a size that nobody counted."""

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # a constant goes through finalize, raw data would not

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _wrap(node.iter, _CHARGE)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _wrap(node.node, _CHARGE)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _wrap(node.expr, _WEIGH)
        for operand in node.ops:
            operand.expr = _wrap(operand.expr, _OPERAND if operand.op in ("in", "notin") else _WEIGH)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _wrap(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _wrap(node, _WEIGH)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _wrap(node, _WEIGH)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _wrap(node, _WEIGH) if node.ctx == "load" else node

    def visit_NSRef(self, node: nodes.NSRef) -> nodes.Node:
        if node.attr.startswith("_"):
            raise TemplateSyntaxError("a namespace has no private attributes", node.lineno)
        return node

    def visit_Include(self, node: nodes.Node) -> nodes.Node:
        raise TemplateSyntaxError("a chat template cannot load another", node.lineno)

    visit_Import = visit_FromImport = visit_Extends = visit_Include


def _wrap(node: nodes.Expr, meter: str) -> nodes.Expr:
    return nodes.Filter(node, meter, [], [], None, None, lineno=node.lineno)


@pass_context
def _charge(context: Context, value: Any) -> Any:
    budget = _budget(context)
    budget.charge(value)
    return value if isinstance(value, (str, *SIZED)) else budget.counted(value)


@pass_context
def _weigh(context: Context, value: Any) -> Any:
    _budget(context).weigh(value)
    return value


@pass_context
def _operand(context: Context, value: Any) -> Any:
    budget = _budget(context)
    if isinstance(value, dict):
        budget.spend(1, 0)  # a lookup, whatever its size
    else:
        budget.weigh(value)
    return value


@pass_context
def _concat(context: Context, values: list[Any]) -> str:
    return "".join([written(_budget(context), value) for value in values])


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    return written(_budget(context), value)


# Filters, tests and globals


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    pass_arg = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        budget.spend(1, 0)
        for argument in (*args, *kwargs.values()):
            budget.charge(argument)
        if name in ("join", "sort", "unique", "min", "max") and not isinstance(value, (str, *SIZED)):
            value = list(budget.counted(value))
        if name in _DEEP_FILTERS:
            budget.weigh(value)
        elif name not in ("length", "count", "default", "d"):
            budget.charge(value)
        _charge_growth(budget, name, value, [*args, *kwargs.values()])
        leads = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        lead = (leads[pass_arg],) if pass_arg else ()
        result = function(*lead, value, *args, **kwargs)
        budget.charge(result)
        return budget.counted(result) if isinstance(result, Iterator) else result

    return run


def _metered_test(function: Callable[..., Any]) -> Callable[..., Any]:
    pass_arg = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    @pass_context
    def run(context: Context, value: Any, *args: Any) -> Any:
        budget = _budget(context)
        budget.spend(1, 0)
        if args:
            budget.weigh([value, *args])
        lead = (context.environment,) if pass_arg else ()
        return function(*lead, value, *args)

    return run


def _charge_growth(budget: Budget, name: str, value: Any, arguments: list[Any]) -> None:
    """Charge ahead of time what a filter's arguments multiply."""
    if name == "replace" and len(arguments) >= 2:
        charge_replace(budget, str(value), str(arguments[0]), str(arguments[1]))
    elif name == "join" and isinstance(value, SIZED):
        budget.spend(0, sum(len(a) for a in arguments if isinstance(a, str)) * len(value))
    elif name == "indent":
        widest = max((len(a) if isinstance(a, str) else a for a in arguments if isinstance(a, str | int)), default=4)
        budget.spend(0, widest * (1 + str(value).count("\n")))
    elif name == "tojson" and any(isinstance(a, int) and a > 16 for a in arguments):
        raise Exhausted("indented too far")


def _raise_exception(message: object) -> None:
    raise RaisedByTemplate(str(message)[:200] if isinstance(message, str) else "")


def _namespace(*args: Any, **kwargs: Any) -> Namespace:
    values = dict(*args, **kwargs)
    if any(not isinstance(name, str) or name.startswith("_") for name in values):
        raise SecurityError("a namespace has no private attributes")
    return Namespace(values)


def _strftime_now(pattern: str) -> str:
    """The local time now; a field width in the pattern could ask for gigabytes, so digits are refused."""
    if len(pattern) > 200 or re.search(r"%[^%]?\d", pattern):
        raise Exhausted("a date format asks for too wide a field")
    return datetime.datetime.now().strftime(pattern)


@pass_context
def _tojson(context: Context, value: Any, ensure_ascii: bool = False, **style: Any) -> str:
    """JSON without HTML escapes: models were trained on plain text. `style`: indent, separators, sort_keys."""
    if not style:
        return json.dumps(value, ensure_ascii=ensure_ascii)
    pieces = []
    for piece in json.JSONEncoder(ensure_ascii=ensure_ascii, **style).iterencode(value):
        _budget(context).spend(1, len(piece))  # an indent is written once per item and level
        pieces.append(piece)
    return "".join(pieces)
