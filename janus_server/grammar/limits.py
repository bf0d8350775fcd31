"""What compiling a grammar, and a step of it, may cost. The checking process and the server use the same numbers.

The library counts work, not time: items of its Earley parser, fuel of its lexer. An item costs 0.1 µs in an ordinary
grammar, and up to 50 µs in one written to be ambiguous, where a row of n items is compared n² to n³ times. So grammars
that clients write themselves get far less than schemas and patterns, whose shape is the library's: of all that was
tried, a step over 151 thousand tokens then takes 50 ms at most where the check lets it through, and 130 ms if the check
were fooled. What is slow more than once is stopped by the clock: see `matcher.Budget`.
"""

from __future__ import annotations

from typing import Final

import llguidance

from janus_server.types import GrammarKind

# As Python's json writes it with an indent, or without; a run of blanks without end would be where a small model stays.
WHITESPACE: Final = r"(\x20{1,2}|\r?\n[\x20\t]{0,40})"
# In front of a grammar and after it, so that its own options cannot turn it off. Text that has only one way to go on
# would else be cut into tokens by the library, which asks for the model's tokenizer in the middle of a step.
NO_FORCING: Final = '%llguidance {"no_forcing": true}\n'

# Altogether: the states of the lexer live as long as the request, at 0.5 to 1 kB each.
LEXER_STATES: Final = 50_000


def parser_limits(kind: GrammarKind, lexer_states: int = LEXER_STATES) -> llguidance.LLParserLimits:
    """What the library may do for a grammar of that kind, altogether and in a step."""
    strict = kind is GrammarKind.LARK
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,
        max_grammar_size=500 if strict else 4_000,
        max_lexer_states=lexer_states,
        step_lexer_fuel=100_000,
        step_max_items=2_000 if strict else 25_000,
        max_items_in_row=500 if strict else 1_000,
        # Compiling must not depend on the vocabulary, since another one is used to check it.
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
