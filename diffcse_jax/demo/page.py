"""The search page as HTML: all of it is made here, so that it works without a script, and its address can be shared."""

import dataclasses
from collections.abc import Mapping, Sequence
from urllib.parse import urlencode

from diffcse_jax.pages import asset, page
from diffcse_jax.pages.markup import Markup, element, joined

LONGEST_QUERY = 1000  # characters
EXAMPLES = 3

Hits = Sequence[tuple[str, float]]


@dataclasses.dataclass(frozen=True)
class Answer:
    """The results of a search.

    Attributes:
        query: the text that was searched for.
        hits: of each model its sentences with their cosine similarities, best first.
        milliseconds: how long it took.
    """

    query: str
    hits: Mapping[str, Hits]
    milliseconds: float


def search_page(corpus: str, size: int, examples: Sequence[str], answer: Answer | None, problem: str = "") -> str:
    """The page with its search box.

    Args:
        corpus: the name of the text.
        size: its number of sentences.
        examples: queries to begin with.
        answer: what was found; None before a search.
        problem: why there is no answer, for people.
    """
    query = answer.query if answer else ""
    parts = [_form(query, corpus, size)]
    if problem:
        parts.append(element("p", problem, class_="problem", role="alert"))
    parts += [_results(answer)] if answer else [_examples(examples)]
    title = f"{query} \N{MIDDLE DOT} search" if query else f"search {corpus}"
    package = "diffcse_jax.demo"
    body = element("main", *parts)
    return page(title, body, style=asset(package, "demo.css"), script=asset(package, "demo.js"))


def _form(query: str, corpus: str, size: int) -> Markup:
    box = element(
        "input",
        type="search",
        name="q",
        id="q",
        value=query,
        maxlength=LONGEST_QUERY,
        autocomplete="off",
        autofocus=not query,
        enterkeyhint="search",
    )
    label = element("label", "Search ", element("b", corpus), f", {size:,} sentence{'s' * (size != 1)}", for_="q")
    button = element("button", "Search", type="submit")
    return element("form", label, element("div", box, button, class_="box"), action="/", method="get", role="search")


def _examples(examples: Sequence[str]) -> Markup:
    """Links that search for sentences of the text itself."""
    links = [element("li", element("a", each, href=f"/?{urlencode({'q': each})}")) for each in examples]
    words = "Type what you mean, in any words: sentences are found by what they say. Or begin with one of the text:"
    return element("section", element("p", words), element("ul", *links), class_="examples")


def _results(answer: Answer) -> Markup:
    """A column for each model."""
    ranks = {name: {text: rank for rank, (text, _) in enumerate(hits, 1)} for name, hits in answer.hits.items()}
    columns = [
        _column(name, index, hits, {other: ranks[other] for other in answer.hits if other != name})
        for index, (name, hits) in enumerate(answer.hits.items(), 1)
    ]
    took = element("p", f"{answer.milliseconds:,.0f} ms", class_="took")
    return joined([took, element("div", *columns, class_="columns" if len(columns) > 1 else "columns alone")])


def _column(name: str, index: int, hits: Hits, others: Mapping[str, Mapping[str, int]]) -> Markup:
    items = [_hit(text, score, others) for text, score in hits]
    found = element("ol", *items) if items else element("p", "Nothing was found.")
    return element("section", element("h2", name), found, class_=f"c{index}")


def _hit(text: str, score: float, others: Mapping[str, Mapping[str, int]]) -> Markup:
    """A sentence, its score as a number and as a bar, and its place with the other model."""
    places = [
        f"place {ranks[text]} with {name}" if text in ranks else f"not found by {name}"
        for name, ranks in others.items()
    ]
    bar = element(
        "svg",
        element("rect", class_="whole", width=100, height=4, rx=2),
        element("rect", class_="score-bar", width=f"{100 * min(max(score, 0.0), 1.0):.1f}", height=4, rx=2),
        viewBox="0 0 100 4",
        preserveAspectRatio="none",
        aria_hidden="true",
    )
    number = f"{score:.3f}".replace("-", "\N{MINUS SIGN}")
    return element(
        "li",
        element("div", element("span", number, class_="score"), bar, class_="measure"),
        element("p", text, dir="auto"),
        *(element("p", place, class_="place") for place in places),
        class_="alone-hit" if any(text not in ranks for ranks in others.values()) else None,
    )
