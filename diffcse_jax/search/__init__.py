"""Search among embeddings and words: an index, nearest neighbours, and files of embeddings.

    index.py      Index: what users call. It locks, encodes, and replaces its `Contents`.
      |
      |-- settings.py     how it is built (modes.py: the names), and which inputs it has read
      |-- contents.py     what it holds at one moment, and never changes:
      |                     documents   a table: id, file, row, digest, columns
      |                     passages    a table: their document, title, text, start
      |                     embeddings  one for each passage (embeddings.py), or None
      |                     lexical     the words of each passage (lexical.py, words.py), or None
      |-- changes.py      from one contents to the next: what stays, and what is encoded
      |-- folder.py       the same on disk: `Stored` (settings, contents, encoder, inputs) as
      |                   index.json and the files that it names; reading, writing, checking
      `-- ranking.py      from queries to hits (hits.py), by meaning, words or both (fusion.py)

Around it, `reading.py` and `passages.py` turn documents into passages, `vector_store.py` holds the
Parquet files of `diffcse embed`, and `recommended.py` says how a run wants its model searched.
"""
