"""One choice for all ranks of a job: rank 0 makes it, and tells the others.

Each rank could make it, but two dry runs may differ in the last digit, and hosts have better things
to do than the same dry run many times.
"""

import itertools
import json
from collections.abc import Callable

from keras_spmd import _raised
from keras_spmd._words import Words

_counter = itertools.count()
_DOING = "choose layouts by dry runs"

Choice = tuple[str, str]


def chosen_by_rank_0(choose: Callable[[Callable[[], object]], Choice]) -> Choice:
    """What `choose` returns on rank 0; if it raises, all ranks do.

    It gets a function to call now and then. Choosing may take longer than ranks wait for each
    other, so what they wait for is the next sign that it goes on.
    """
    words = Words(f"choice/{next(_counter)}")
    if words.rank > 0:
        heard = _heard(words)
        words.part()
        return heard
    signs = itertools.count()

    def say(word: object) -> None:
        words.say(str(next(signs)), json.dumps(word))

    try:
        name, why = choose(lambda: say(None))
    except Exception as error:
        # Whatever a model may raise: the others must not wait for it.
        say({"error": _raised.as_word(error)})
        _part(words, next(signs))
        raise
    say({"name": name, "why": why})
    _part(words, next(signs))
    return name, why


def _heard(words: Words) -> Choice:
    for number in itertools.count():
        word = json.loads(words.hear(0, str(number), _DOING))
        if word is None:
            continue
        if "error" in word:
            words.part()
            raise _raised.of_rank_0(word["error"], _DOING)
        return word["name"], word["why"]
    raise AssertionError("it hears until there is an answer")


def _part(words: Words, count: int) -> None:
    words.part(*map(str, range(count)))
