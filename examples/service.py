"""A search service with FastAPI, in several processes that read one index.

pip install 'diffcse_jax[search]' fastapi uvicorn
diffcse search --model minilm --input documents/ --output index 'a first query'
DIFFCSE_INDEX=index uvicorn --app-dir examples --workers 3 service:app

If the index is of another model than MiniLM, name that too: DIFFCSE_MODEL=runs/mine.

Then open http://127.0.0.1:8000/search?query=how+do+I+return+an+item. Each worker loads the encoder
once, maps the index into memory, and answers several queries at the same time in threads. Uvicorn
starts workers as new processes. JAX does not work in processes that are forked after it was loaded,
so do not use Gunicorn's `--preload`.
"""

import os
from typing import Any

from fastapi import FastAPI, HTTPException, Query
from pydantic import BaseModel

from diffcse_jax import SentenceEncoder, UserError


class Hit(BaseModel):
    """A passage, with its document and the other columns of the document."""

    id: str
    score: float
    title: str
    snippet: str
    columns: dict[str, Any]


class Answer(BaseModel):
    """The best passages, a note if none of them fits, and the worker that has answered."""

    hits: list[Hit]
    note: str
    worker: int


encoder = SentenceEncoder.from_pretrained(os.environ.get("DIFFCSE_MODEL", "minilm"))
encoder.load_index(os.environ.get("DIFFCSE_INDEX", "index"))
encoder.search("the first search compiles")
app = FastAPI(title="Search")


@app.get("/search")
def search(query: str, top_k: int = Query(5, ge=1, le=100)) -> Answer:
    """Return the passages nearest to a query."""
    try:
        (hits,) = encoder.search_hits([query], top_k)
    except UserError as error:  # such as an empty query
        raise HTTPException(422, str(error)) from error
    answers = [Hit(**hit._asdict()) for hit in hits]
    return Answer(hits=answers, note=hits.note, worker=os.getpid())
