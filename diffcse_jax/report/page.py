"""The page of a report: its sections in the order in which they are read."""

import dataclasses
import datetime
from collections.abc import Iterable, Sequence

from diffcse_jax import __version__
from diffcse_jax.evaluation.results import Results
from diffcse_jax.pages import asset, page
from diffcse_jax.pages.markup import Markup, element, joined, table
from diffcse_jax.report import curves, tables, vectors, words
from diffcse_jax.report.charts import colour_of, gallery
from diffcse_jax.report.runs import Run
from diffcse_jax.report.sample import Sample
from diffcse_jax.report.vectors import Model
from diffcse_jax.report.words import short2

ARROW = "\N{RIGHTWARDS ARROW}"


@dataclasses.dataclass(frozen=True)
class Compared:
    """Encoders on a sample of text.

    Attributes:
        sample: the text.
        models: the starts and the runs' models.
        problems: why other models are missing.
    """

    sample: Sample
    models: Sequence[Model]
    problems: Sequence[str] = ()


def report(runs: Sequence[Run], compared: Compared | None = None, others: Sequence[Results] = (), now: str = "") -> str:
    """The whole page.

    Args:
        runs: at least one.
        compared: their encoders on a sample of text; None: no encoder was loaded.
        others: results of `diffcse evaluate` for models that are none of the runs.
        now: when the report is made; empty: the present time.
    """
    now = now or datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    sections = {
        "outcome": ("What came of it", _outcome(runs)),
        "curves": ("While it was training", _curves(runs)),
        "space": ("The space of sentences", _space(runs, compared)),
        "searches": ("Searches, before and after", _searches(compared)),
        "scores": ("Beside published scores", _scores(runs, others)),
        "configuration": ("Configuration", _configuration(runs)),
        "environment": ("Environment", _environment(runs)),
    }
    contents = element(
        "nav", *(element("a", title, href=f"#{key}") for key, (title, _) in sections.items()), aria_label="sections"
    )
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    header = element(
        "header",
        element("p", "training report", class_="kicker"),
        element("h1", title),
        element("p", ", ".join(run.label for run in runs), class_="soft") if len(runs) > 1 else "",
        contents,
    )
    body = [
        element("section", element("h2", heading), *content, id=key) for key, (heading, content) in sections.items()
    ]
    footer = element("footer", f"Written {now} by diffcse_jax {__version__}. Scores are \N{MULTIPLICATION SIGN} 100.")
    whole = joined([header, element("main", *body), footer])
    package = "diffcse_jax.report"
    return page(
        f"{title} \N{MIDDLE DOT} report", whole, style=asset(package, "report.css"), script=asset(package, "report.js")
    )


def _outcome(runs: Sequence[Run]) -> Iterable[Markup]:
    if len(runs) == 1:
        yield element("div", _card(runs[0], colour_of(0), is_alone=True), class_="alone")
        return
    titles = ["run", "state", "chosen by", "before", "after", "change", "model", "steps took"]
    yield table(titles, [_summary(run) for run in runs], numbers=True)
    yield element(
        "div", *(_card(run, colour_of(index), is_alone=False) for index, run in enumerate(runs)), class_="cards"
    )


def _summary(run: Run) -> list[str]:
    """The run's row among several."""
    before, after = run.before, run.best[1] if run.best else None
    change = _change(before, after)
    scores = [short2(before), short2(after), change or "\N{EN DASH}"]
    return [run.label, words.state(run), words.named(run.metric), *scores, words.chosen(run), words.duration(run)]


def _change(before: float | None, after: float | None) -> str:
    """The difference with its sign; empty where one of the two is unknown."""
    if before is None or after is None:
        return ""
    return ("+" if after >= before else "") + short2(after - before)


def _card(run: Run, colour: str, *, is_alone: bool) -> Markup:
    """The run and its outcome, with the numbers that matter most; one of several runs tells less at once."""
    outcome = element(
        "div",
        _headline(run),
        element("p", words.what_came_of_it(run), class_="verdict"),
        *(element("p", f"Note: {warning}.", class_="warning") for warning in words.warnings(run)),
    )
    details = element("div", element("p", words.what_was_run(run)), _facts(run))
    if not is_alone:
        details = element("details", element("summary", "what was run"), details)
    return element("article", element("h3", run.label), outcome, details, class_=f"card {colour}")


def _headline(run: Run) -> Markup:
    """The dev score before and after."""
    if run.best is None:
        return Markup("")
    numbers = [element("span", short2(run.best[1]), class_="after")]
    if change := _change(run.before, run.best[1]):
        verdict = "soft" if change == "+0.00" else "good" if change[0] == "+" else "bad"
        before = [element("span", short2(run.before), class_="before"), element("span", ARROW, class_="soft")]
        numbers = [*before, *numbers, element("span", change, class_=verdict)]
    name = element("span", words.named(run.metric), class_="soft")
    return element("p", name, element("span", *numbers, class_="row"), class_="numbers-large")


def _facts(run: Run) -> Markup:
    objectives = [
        element("span", element("b", name), " ", element("span", about, class_="soft"))
        for name, about in words.objectives_of(run)
    ]
    facts = {
        "state": words.state(run),
        "model": words.chosen(run),
        "steps took": words.duration(run) or "not recorded",
        "objectives": joined(objectives, element("br")),
    }
    return element("dl", *(part for name, fact in facts.items() for part in (element("dt", name), element("dd", fact))))


def _curves(runs: Sequence[Run]) -> Iterable[Markup]:
    if not any(run.rows for run in runs):
        yield _missing("No metrics are recorded yet.")
        return
    dev, losses = curves.of_dev(runs), curves.of_losses(runs)
    if not dev:
        yield _missing("No dev score is recorded yet.")
    if not losses:
        yield _missing("No loss is recorded yet.")
    yield gallery([*dev, *losses, *curves.of_objectives(runs)])
    if optimisation := curves.of_optimisation(runs):
        yield element("h3", "Throughput and optimisation")
        yield gallery(optimisation)
    if others := curves.of_others(runs):
        yield element("details", element("summary", f"{len(others)} more"), gallery(others), class_="more")


def _space(runs: Sequence[Run], compared: Compared | None) -> Iterable[Markup]:
    way = curves.trajectory(runs)
    if not way.lines:
        yield _missing("Alignment and uniformity are not recorded of training batches.")
    charts = [way]
    if compared is None:
        yield _missing("Similarities, singular values and searches were left out: no model was loaded.")
    else:
        yield element(
            "p", f"The sample of text: {compared.sample.about}. It is the same for all models.", class_="soft"
        )
        yield from (_missing(f"Left out: {problem}") for problem in compared.problems)
        if compared.models:
            yield _measures(compared)
            charts += [*vectors.density_charts(compared.models, compared.sample), vectors.spectrum(compared.models)]
    yield gallery(chart for chart in charts if chart.lines)


def _measures(compared: Compared) -> Markup:
    found = {model.label: vectors.measures(model, compared.sample) for model in compared.models}
    names = list(dict.fromkeys(name for measured in found.values() for name in measured))
    rows = [
        [
            label,
            *(
                f"{measured[name]:.3f}".replace("-", "\N{MINUS SIGN}")
                if name in ("alignment", "uniformity")
                else short2(measured[name])
                for name in names
            ),
        ]
        for label, measured in found.items()
    ]
    return table(["model", *names], rows, numbers=True)


def _searches(compared: Compared | None) -> Iterable[Markup]:
    if compared is None or not compared.models:
        yield _missing("There is no model to search with.")
        return
    found = vectors.searches(compared.models, compared.sample)
    wanted = " The text that belongs to the query is marked." if any(search.wanted for search in found) else ""
    yield element(
        "p",
        f"Queries are evenly spaced in the sample, chosen by their positions and not by what is found.{wanted}",
        class_="soft",
    )
    for search in found:
        columns = [_hits(model, hits, search.wanted) for model, hits in search.hits]
        yield element(
            "article", element("h3", search.query), element("div", *columns, class_="columns"), class_="search"
        )


def _hits(model: Model, hits: Sequence[tuple[str, float]], wanted: str) -> Markup:
    items = []
    for text, score in hits:
        is_wanted = text == wanted
        note = element("span", "belongs to the query", class_="belongs") if is_wanted else ""
        items.append(
            element(
                "li",
                element("span", short2(score), class_="score"),
                element("span", text, " ", note),
                class_="wanted" if is_wanted else None,
            )
        )
    return element("div", element("h4", model.label), element("ol", *items), class_=model.colour)


def _scores(runs: Sequence[Run], others: Sequence[Results]) -> Iterable[Markup]:
    found = tables.of_scores(runs, others)
    if missing := [run for run in runs if not run.results]:
        names = ", ".join(run.label for run in missing)
        command = (
            f"diffcse evaluate --model {missing[0].workdir} --tasks sts --output {missing[0].workdir}/results.json"
        )
        yield element(
            "p",
            f"No test scores are recorded of {names}. This command measures them, for the next report: ",
            element("code", command, class_="command"),
            class_="missing",
        )
    if found:
        yield element(
            "p",
            "Published rows need bert-base-uncased or roberta-base and 10\N{SUPERSCRIPT SIX} Wikipedia sentences: what "
            "to expect of these, no measurements.",
            class_="soft",
        )
    yield from found


def _configuration(runs: Sequence[Run]) -> Iterable[Markup]:
    if len(runs) > 1:
        between, count = tables.of_differences(runs)
        yield element("h3", "Between the runs")
        yield element("p", f"They differ in {words.counted(count, 'key')}." if count else "They do not differ.")
        if between:
            yield between
    for run in runs:
        name, differences = tables.of_shipped(run.config)
        yield element("h3", "Beside what is shipped" if len(runs) == 1 else run.label)
        nearest = element("code", f"configs/{name}.py")
        if differences:
            keys = words.counted(len(differences), "key")
            yield element("p", "The nearest shipped configuration is ", nearest, f", from which it differs in {keys}.")
            yield table(["key", "shipped", "this run"], differences)
        else:
            yield element("p", "It is ", nearest, ".")
        yield element("details", element("summary", "the whole configuration"), tables.of_configuration(run.config))


def _environment(runs: Sequence[Run]) -> Iterable[Markup]:
    yield tables.of_environments(runs) or _missing("No environment is recorded: runs of earlier versions did not.")


def _missing(message: str) -> Markup:
    return element("p", message, class_="missing")
